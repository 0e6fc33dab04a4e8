"""The contract of purity: nothing is written to but what is returned, and nothing is remembered."""

from __future__ import annotations

import ast
import copy
import doctest
import importlib
import inspect
import io
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

import mfun
from mfun import nn, optim, rng, tree
from mfun.comm import map_ranks, single_groups
from mfun.config import PRESETS, Config, load, resolve
from mfun.mesh import Factor, Mesh
from mfun.models.gpt import gpt
from mfun.nn.layer import Ctx
from mfun.schedule import SCHEDULES, Costs, F, Sizes
from mfun.spec import Init, P, ParamSpec, init_params
from mfun.train.plan import plan
from mfun.verify.batches import global_batch
from mfun.verify.run import in_mailbox
from mfun.verify.shrink import shrink

ROOT = Path(mfun.__file__).parent


def modules() -> list[ModuleType]:
    """All of mfun."""
    names = [m.name for m in pkgutil.walk_packages(mfun.__path__, "mfun.")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


MODULES = modules()

# ---------------------------------------------------------------------------- arguments


WRITERS = {"unscale_"}
"""Functions with an example that write to what they are given, as their names say."""
WITHOUT_EXAMPLE = {"distribute", "finalize", "explain", "init_params"}
"""Of `mfun`'s own names, the functions that no example of their own shows."""


def public() -> dict[str, FunctionType]:
    """Every plain function that a package of mfun exports, by where it is from."""
    found = {}
    for module in (*MODULES, mfun):
        for name in getattr(module, "__all__", ()):
            thing = inspect.unwrap(getattr(module, name))
            if isinstance(thing, FunctionType) and thing.__module__.startswith("mfun."):
                found[f"{thing.__module__.removeprefix('mfun.')}.{name}"] = thing
    return found


PUBLIC = public()
SHOWN = [name for name, fn in PUBLIC.items() if ">>>" in (fn.__doc__ or "")]


def wrapped(x: Any) -> bool:
    """Whether a tensor belongs to a transform that is going on: it has no numbers to compare."""
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]


def snapshot(x: Any) -> Any:
    """What a value holds, copied."""
    if isinstance(x, Tensor):
        return x, x._version, None if wrapped(x) else x.detach().clone()
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, Mapping):
        return {key: snapshot(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [snapshot(value) for value in x]
    if isinstance(x, set):
        return set(x)
    if attrs.has(type(x)):
        return {f.name: snapshot(getattr(x, f.name)) for f in attrs.fields(type(x))}
    return x


def same(a: Any, b: Any) -> bool:
    """Whether two snapshots hold the same bits."""
    if isinstance(a, tuple) and len(a) == 3 and isinstance(a[0], Tensor):
        if a[2] is None or b[2] is None:
            return a[1] == b[1]
        return a[1] == b[1] and same_bits(a[2], b[2])
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or bool(a == b) or a != a


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are equal to the bit; functions and the like are not looked into."""
    if isinstance(a, Tensor):
        if wrapped(a) or a.shape != b.shape or a.dtype != b.dtype:
            return wrapped(a)
        return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, str | int | float | frozenset | None | bool):
        return a == b or a != a
    return True


class Watch:
    """A function that complains when a call changes an argument, or gives other bits twice."""

    def __init__(self, name: str, fn: FunctionType) -> None:
        self.name, self.fn, self.calls, self.problems = name, fn, 0, []

    def wrapped(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            before = snapshot((args, kwargs))
            result = self.fn(*args, **kwargs)
            if not same(before, snapshot((args, kwargs))):
                self.problems.append("changes its arguments")
            once = any(isinstance(x, Iterator) for x in (*args, *kwargs.values(), result))
            if not once and self.name not in WRITERS:
                if not same_bits(result, self.fn(*args, **kwargs)):
                    self.problems.append("gives other bits the second time")
            return result

        return call


def plant(patch: pytest.MonkeyPatch, fn: FunctionType, instead: Callable[..., Any]) -> None:
    """Put a function's stand-in wherever it was imported to."""
    for module in (*MODULES, mfun):
        for name, thing in list(vars(module).items()):
            if thing is fn or getattr(thing, "__dict__", {}).get("__wrapped__") is fn:
                patch.setattr(module, name, instead)


def run_example(name: str, fn: FunctionType, patch: pytest.MonkeyPatch) -> Watch:
    """Run the examples in a function's docstring with the function watched."""
    watch = Watch(name, fn)
    module = sys.modules[fn.__module__]
    plant(patch, fn, watch.wrapped())
    finder = doctest.DocTestFinder(recurse=False)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    for test in finder.find(fn, fn.__name__, module=module, globs=dict(vars(module))):
        said = io.StringIO()
        with redirect_stdout(said):
            result = runner.run(test)
        assert result.failed == 0, said.getvalue()
    return watch


@pytest.mark.parametrize("name", SHOWN)
def test_public_function_is_pure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own examples it leaves its arguments alone, and repeats itself to the bit."""
    short = name.rpartition(".")[2]
    watch = run_example(short, PUBLIC[name], monkeypatch)
    assert watch.calls > 0, "its example does not call it"
    assert set(watch.problems) == ({"changes its arguments"} if short in WRITERS else set())


def test_what_mfun_exports_is_shown() -> None:
    """So the test before sees every function that `mfun` itself names, and most of the rest."""
    own = {n for n in mfun.__all__ if isinstance(inspect.unwrap(getattr(mfun, n)), FunctionType)}
    assert own - {name.rpartition(".")[2] for name in SHOWN} == WITHOUT_EXAMPLE
    assert len(SHOWN) >= 150


def test_the_watch_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that writes to a tensor in a tree, and one that draws at random, are found."""

    def writes(x: Any) -> Any:
        x["a"][0].zero_()

    def draws(x: Any) -> Any:
        return torch.rand(3)

    def adds(x: Any) -> Any:
        x["b"] = 1

    for fn, problem in ((writes, "changes"), (draws, "other bits"), (adds, "changes")):
        watch = Watch("", fn)  # type: ignore[arg-type]
        watch.wrapped()({"a": [torch.ones(2)]})
        assert any(problem in said for said in watch.problems)


OPTIMIZERS = {
    "adamw": optim.adamw(0.1, weight_decay=0.1),
    "sgd": optim.sgd(0.1),
    "lion": optim.lion(0.1),
    "chain": optim.named_chain(
        clip=optim.clip_by_global_norm(0.1), adam=optim.scale_by_adam(), trace=optim.trace(0.9)
    ),
    "masters": optim.with_masters(optim.adamw(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_pure_without_donation(name: str) -> None:
    """Two updates from one state: the same bits, and everything given is as it was."""
    opt = OPTIMIZERS[name]
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    params = {"w": torch.linspace(-1, 1, 6).view(2, 3).to(dtype)}
    grads = {"w": torch.linspace(2, 3, 6).view(2, 3).to(dtype)}
    state = opt.init(params)
    for _ in range(2):
        given = (grads, state, params, torch.tensor(1.5))
        before = snapshot(given)
        one, two = (opt.update(*given[:3], norm=given[3], donate=False) for _ in range(2))
        assert same(before, snapshot(given)) and same_bits(one, two)
        state = one[1]


SMALL = ["model.layers=1", "model.hidden=8", "model.heads=2", "model.vocab=9", "model.seq_len=4"]
SMALL += ["train.global_batch=2", "train.microbatches=1", "parallel.pp=1", "model.dropout=0.3"]


@pytest.mark.parametrize("derivatives", ["any", "first"])
@pytest.mark.parametrize("model", ["bias=all", "norm=rmsnorm position=rotary activation=swiglu"])
def test_layers_are_pure(model: str, derivatives: Any) -> None:
    """Every layer, with dropout: the same bits twice; parameters, input and batch untouched."""
    keys = [*SMALL, "parallel.tp=1", *(f"model.{key}" for key in model.split())]
    config = resolve(load("tiny", keys), None)
    batch, x, before_torch = global_batch(config, 0), {}, torch.get_rng_state()
    ctx = Ctx(single_groups(), batch, rng.key(0), derivatives)
    for layer in gpt(config):
        params = init_params(layer.specs, 0, Mesh(), {"tp": 0}, torch.float32)
        given = (params, x, dict(batch))
        before = snapshot(given)
        one, two = (layer.apply(params, x, ctx) for _ in range(2))
        assert same(before, snapshot(given)), f"{layer.name} changes what it is given"
        assert same_bits(one, two), f"{layer.name} gives other bits the second time"
        x = one
    assert torch.equal(torch.get_rng_state(), before_torch)


# ---------------------------------------------------------------------------- module state

MUTATORS = {
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault",
    "add", "discard", "sort", "reverse", "move_to_end", "appendleft", "popleft",
}  # fmt: skip


def names_of_module(source: ast.Module) -> set[str]:
    """What a module binds at its top by assignment."""
    found = set()
    for node in source.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def changed_in(function: ast.AST, names: set[str]) -> Iterator[str]:
    """Module-level names that a function writes into, with the line."""
    local = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
    local |= {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    outer = names - local
    for node in ast.walk(function):
        base: Any = None
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            base = node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value if node.func.attr in MUTATORS else None
        if isinstance(base, ast.Name) and base.id in outer:
            yield f"{node.lineno}: {base.id}"  # type: ignore[attr-defined]


def changes(source: str) -> list[str]:
    """Every place where a function changes what its module holds."""
    parsed = ast.parse(source)
    names = names_of_module(parsed)
    functions = [n for n in ast.walk(parsed) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    return [place for function in functions for place in changed_in(function, names)]


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda f: str(f.relative_to(ROOT)))
def test_no_function_changes_its_module(file: Path) -> None:
    """Tables are read; nothing is kept in a module between calls."""
    assert changes(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "T = {}\ndef f(x):\n    T[x] = 1",
        "T = []\ndef f(x):\n    T.append(x)",
        "T = {}\nf = lambda x: T.setdefault(x, 1)",
        "T: dict = {}\nclass A:\n    def f(self):\n        del T['a']",
        "T = object()\ndef f(x):\n    T.x = x",
    ],
)
def test_the_search_can_fail(source: str) -> None:
    """Each way to keep something in a module is found."""
    assert len(changes(source)) == 1


IMMUTABLE = (
    str, int, float, bool, type(None), frozenset, range, FunctionType, type, ModuleType,
)  # fmt: skip


def state_of_modules() -> dict[str, str]:
    """What every module of mfun holds, as text; and no tensor among it."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            assert not isinstance(value, Tensor), f"{module.__name__}.{name} is a tensor"
            if not name.startswith("__") and not isinstance(value, IMMUTABLE):
                found[f"{module.__name__}.{name}"] = _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return str({key: _text(x) for key, x in value.items()})
    if isinstance(value, list | tuple | set):
        return str([_text(x) for x in value])
    return repr(value)


def test_training_leaves_no_trace_and_repeats_itself() -> None:
    """A run with stages, tp, dropout and sharding: modules are as before, and the bits too."""
    keys = ["parallel.tp=2", "parallel.dp=2", "parallel.sharding=optim", "model.dropout=0.1"]
    config = shrink(resolve(load("tiny", keys), None), steps=2)
    before, seeds = state_of_modules(), torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    one, two = (in_mailbox(plan(config)) for _ in range(2))
    assert state_of_modules() == before
    assert torch.equal(torch.get_rng_state(), seeds)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # type: ignore[index, arg-type]
    assert len(one) == 8
    for a, b in zip(one, two, strict=True):
        assert a.losses == b.losses and a.norms == b.norms
        assert same_bits(a.params, b.params) and same_bits(a.grads, b.grads)


def test_simulated_run_repeats_itself() -> None:
    """A gradient through a mesh, twice."""
    x = torch.linspace(-1, 1, 8).view(2, 4)
    run = map_ranks(lambda groups, x: nn.activate(mfun.reduce(x, groups.tp), "gelu"), Mesh(tp=2))
    pulls = [torch.func.grad(lambda y: run(y).square().sum())(x) for _ in range(2)]
    assert torch.equal(*pulls)


# ---------------------------------------------------------------------------- import

PROBE = """
import os, random, signal, sys, threading, warnings, importlib, pkgutil, locale, logging, time
import attrs, cattrs, click, einops, numpy, rich.console, rich.table, rich.progress, rich.text
import safetensors.torch, torch, torch.distributed, torch.func, tomllib, tomli_w
import torch.nn.functional, torch.autograd.forward_ad, torch.autograd.graph, torch.utils
import concurrent.futures, multiprocessing, json, hashlib, subprocess, tempfile, shutil

def state():
    return {
        "environment": dict(os.environ), "folder": os.getcwd(), "path": list(sys.path),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "threads": threading.active_count(), "torch threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(), "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch seed": torch.initial_seed(), "torch state": torch.get_rng_state().tolist(),
        "random": random.getstate(), "numpy": str(numpy.random.get_state()),
        "print": (torch._tensor_str.PRINT_OPTS.precision, numpy.get_printoptions()),
        "warnings": list(warnings.filters), "log level": logging.getLogger().level,
        "handlers": list(logging.getLogger().handlers), "locale": locale.setlocale(locale.LC_ALL),
        "zone": time.tzname, "hooks": (sys.excepthook, sys.displayhook, sys.settrace and None),
        "recursion": sys.getrecursionlimit(), "process group": torch.distributed.is_initialized(),
        "files": sorted(os.listdir(".")), "descriptors": len(os.listdir("/proc/self/fd"))
        if os.path.isdir("/proc/self/fd") else 0,
    }

before = state()
import mfun
for module in pkgutil.walk_packages(mfun.__path__, "mfun."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
after = state()
print([key for key in before if before[key] != after[key]])
"""


def test_import_has_no_side_effects(tmp_path: Path) -> None:
    """Importing all of mfun changes nothing of the process, writes nothing and prints nothing."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.stdout == "[]\n" and done.stderr == "", done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- values


def fixed(x: Any, path: str) -> Iterator[str]:
    """Places within a value that could be written to."""
    if attrs.has(type(x)):
        yield from () if frozen(x) else [f"{path} of {type(x).__name__}"]
        for field in attrs.fields(type(x)):
            yield from fixed(getattr(x, field.name), f"{path}.{field.name}")
    elif isinstance(x, tuple | frozenset):
        for i, each in enumerate(x):
            yield from fixed(each, f"{path}[{i}]")
    elif isinstance(x, MappingProxyType):
        for key in x:
            yield from fixed(x[key], f"{path}[{key!r}]")
    elif isinstance(x, dict):
        try:
            x["planted"] = {}
        except TypeError:
            for key in x:
                yield from fixed(x[key], f"{path}[{key!r}]")
        else:
            yield f"{path}, a dict"
    elif not isinstance(x, IMMUTABLE):
        yield f"{path}, a {type(x).__name__}"


def frozen(x: Any) -> bool:
    """Whether an attrs instance refuses to be changed."""
    for field in attrs.fields(type(x)):
        try:
            setattr(x, field.name, getattr(x, field.name))
        except attrs.exceptions.FrozenInstanceError:
            continue
        return False
    return True


TABLES = {"embed.*": {"lr": 0.1}, "*.bias": {"decay": 0}}


def configs() -> dict[str, Config]:
    """Every preset, and one with everything that holds other things."""
    full = load("tiny", ["parallel.layers_per_stage=2,2", "parallel.pp=2"])
    overridden = attrs.evolve(full, optim=attrs.evolve(full.optim, overrides=TABLES))
    return {**PRESETS, "with tables": overridden}


@pytest.mark.parametrize("name", configs())
def test_config_is_fixed_and_hashable(name: str) -> None:
    """All the way down; equal configurations have equal hashes, and copies are equal."""
    config = configs()[name]
    again = copy.deepcopy(config)
    assert list(fixed(config, "config")) == []
    assert hash(config) == hash(again) and config == again
    changed = attrs.evolve(config, model=attrs.evolve(config.model, layers=99))
    assert changed != config and hash(changed) != hash(config)


def test_config_keeps_its_own_tables() -> None:
    """What it was given may change afterwards; two with other tables have other hashes."""
    given = {"embed.*": {"lr": 0.1}}
    config = mfun.config.OptimConfig(overrides=given)  # type: ignore[attr-defined]
    given["embed.*"]["lr"] = 0.5
    assert config.overrides == {"embed.*": {"lr": 0.1}}
    other = attrs.evolve(config, overrides=given)
    assert hash(other) != hash(config) and len({config, other}) == 2
    with pytest.raises(TypeError, match="frozen"):
        config.overrides["embed.*"]["lr"] = 0.5


VALUES = [
    Mesh(tp=2, dp=2),
    Factor("tp", 2),
    P("tp", None, sums=("dp",)),
    ParamSpec(shape=(2,), grad={"tp": "partial"}),
    Init(),
    rng.key(0, "a", 1),
    rng.Grid.whole((2, 3)),
    nn.TokenLoss(vocab=3),
    F(1),
    Sizes(stages=2, microbatches=4),
    Costs(),
    SCHEDULES["1f1b"],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_fixed_and_hashable(value: Any) -> None:
    """What names a layout, a draw or a schedule may be a key, and cannot change."""
    again = attrs.evolve(value) if isinstance(value, ParamSpec) else copy.deepcopy(value)
    assert hash(value) == hash(again) and value == again
    assert list(fixed(value, type(value).__name__)) == []


def test_what_can_change_is_found() -> None:
    """A list in a frozen class, a dict, and a class that is not frozen."""

    @attrs.frozen
    class Holder:
        x: Any

    @attrs.define
    class Loose:
        x: int = 0

    for inside in ([1], {"a": 1}, Loose(), (1, [2])):
        assert len(list(fixed(Holder(inside), "holder"))) == 1
    assert list(fixed(Holder((1, "a", frozenset())), "holder")) == []


def test_trees_are_not_changed() -> None:
    """`put`, `merge` and `map` share what they do not change, and change nothing."""
    given = {"a": {"w": torch.ones(2)}, "b": torch.zeros(1)}
    before = snapshot(given)
    put = tree.put(given, "a.w", torch.zeros(2))
    tree.map(torch.neg, given)
    tree.merge(given, {"c": 1})
    assert same(before, snapshot(given)) and put["b"] is given["b"]

"""What torch does today, where mfun is built around it.

Each test states a fact of torch that a piece of mfun exists for. One that fails after an upgrade
is no fault of mfun: it says which piece may now be simpler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap

from mfun import tree
from mfun.comm import distribute, reduce, simulate
from mfun.comm.collectives import Collective, Max, Ranked
from mfun.mesh import Mesh
from mfun.spec import P

WORLD = 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_fails_under_grad(reentrant: bool) -> None:
    """Row 134: recomputation is mfun's own (`pipeline.executor`)."""
    from torch.utils.checkpoint import checkpoint

    def f(x: Tensor) -> Tensor:
        y: Any = checkpoint(torch.sin, x, use_reentrant=reentrant)
        return y.sum()

    with pytest.raises(RuntimeError, match=r"setup_context|saved tensor hooks"):
        grad(f)(torch.ones(2))


def test_saved_tensor_hooks_fail_under_grad() -> None:
    """Row 134: offloading is an op of the stream (`pipeline.offload`), not a hook."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            grad(lambda x: x.sin().sum())(torch.ones(2))


def test_old_functions_fail_under_grad() -> None:
    """Row 133: every Function of mfun has `setup_context`."""

    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0]

    with pytest.raises(RuntimeError, match="setup_context"):
        grad(lambda x: Old.apply(x).sum())(torch.ones(2))


def test_vmap_of_dropout_must_be_told_how() -> None:
    """Row 138: mfun's dropout takes a key."""
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: F.dropout(x, 0.5))(torch.ones(3, 4))


def test_functional_call_ignores_unknown_names() -> None:
    """Row 125: trees are matched by key, and a misfit is an error (`mfun.tree`)."""
    module = torch.nn.Linear(2, 1, bias=False)
    given = {"weight": torch.ones(1, 2), "wieght": torch.zeros(1, 2)}
    assert functional_call(module, given, torch.ones(2)).item() == 2
    with pytest.raises(RuntimeError, match="wieght"):
        functional_call(module, given, torch.ones(2), strict=True)
    with pytest.raises(ValueError, match="unexpected"):
        tree.map(lambda a, b: a, {"weight": 0}, {"weight": 0, "wieght": 0})


class Tied(torch.nn.Module):
    """One weight under two names, used through both: y = (a b) x, a is b."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(3.0))
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.a * self.b * x


def test_functional_call_ties_by_name() -> None:
    """A tied weight in mfun is one leaf with one path; in torch it depends on the names given."""
    module, w, x = Tied(), torch.tensor(3.0), torch.ones(())

    def by_one_name(w: Tensor, tie: bool) -> Tensor:
        return functional_call(module, {"a": w}, x, tie_weights=tie)

    assert grad(by_one_name)(w, True).item() == 6
    assert grad(by_one_name)(w, False).item() == 3
    with pytest.raises(ValueError, match="tied"):
        functional_call(module, {"a": w, "b": w * 2}, x)


def test_grad_of_what_requires_grad_requires_grad() -> None:
    """Row 132: parameters that mfun hands out do not require gradients, or memory would grow."""
    leaf = torch.ones(2, requires_grad=True)
    assert grad(lambda x: x.square().sum())(leaf).requires_grad
    assert not grad(lambda x: x.square().sum())(leaf.detach()).requires_grad


def test_pullback_without_a_graph_loses_second_order() -> None:
    """Design 4: a pullback in research code is never called with create_graph=False."""

    def slope(x: Tensor, **how: Any) -> Tensor:
        _, pull, *_ = vjp(lambda y: y.pow(3), x)
        return pull(torch.ones(()), **how)[0]

    at = torch.tensor(2.0)
    assert grad(slope)(at).item() == 12
    assert grad(lambda x: slope(x, create_graph=False))(at).item() == 0


def test_vjp_may_be_pulled_twice() -> None:
    """Row 139: eager pullbacks are functions; mfun compiles nothing."""
    _, pull, *_ = vjp(lambda x: x.exp(), torch.ones(3))
    assert torch.equal(pull(torch.ones(3))[0], pull(torch.ones(3))[0])


def _attend(x: Tensor, backend: Any) -> Tensor:
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return y.pow(2).sum()


def test_fused_attention_has_first_derivatives_only() -> None:
    """`Ctx.derivatives` chooses: the fused kernel where a step trains, the definition elsewhere."""
    from torch.nn.attention import SDPBackend

    x = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))

    def curved(backend: Any) -> Tensor:
        return grad(lambda y: grad(_attend)(y, backend).pow(2).sum())(x)

    assert curved(SDPBackend.MATH).isfinite().all()
    with pytest.raises((RuntimeError, NotImplementedError)):
        curved(SDPBackend.FLASH_ATTENTION)
    with pytest.raises((RuntimeError, NotImplementedError)):
        jvp(lambda y: _attend(y, SDPBackend.FLASH_ATTENTION), (x,), (x,))


# ---------------------------------------------------------------------------- on processes


Facts = dict[tuple[str, str], Any]


def _functional_sum(x: Tensor) -> Tensor:
    import torch.distributed._functional_collectives as functional

    world: Any = dist.group.WORLD
    return functional.wait_tensor(functional.all_reduce(x, "sum", world))


def _nn_sum(x: Tensor) -> Tensor:
    from torch.distributed import nn

    return nn.functional.all_reduce(x)


def _plain_sum(x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def _said(call: Callable[[], Any]) -> str:
    """The error of a call, "" where there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def facts_on_a_rank(rank: int) -> Facts:
    """Sums over two ranks by torch's three ways, and by mfun's."""
    tp = distribute(Mesh(tp=WORLD)).tp
    x = torch.tensor([rank + 1.0])
    sums = {"functional": _functional_sum, "nn": _nn_sum, "plain": _plain_sum}
    found: Facts = {}
    for name, total in sums.items():
        found[name, "under grad"] = _said(lambda f=total: grad(lambda y: f(y).sum())(x))
    for name in ("functional", "nn"):
        leaf = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sums[name](leaf).square().sum().backward()
        found[name, "gradient"] = leaf.grad
    leaf = x.clone()
    found["plain", "gradient"] = grad(lambda y: (3.0 * _plain_sum(y)).sum())(leaf)
    found["plain", "value"] = vjp(_plain_sum, x)[0]
    rows = torch.ones(3, 2) * (rank + 1)
    found["functional", "under vmap"] = _said(lambda: vmap(_functional_sum)(rows))
    found["plain", "under vmap"] = _said(lambda: vmap(_plain_sum)(rows))
    found["mfun", "gradient"] = grad(lambda y: reduce(y, tp).square().sum())(x)
    found["mfun", "under vmap"] = vmap(lambda y: reduce(y, tp))(rows)
    return found


@pytest.fixture(scope="module")
def facts(pool: Pool) -> Iterator[list[Facts]]:
    """Of both ranks."""
    yield pool.run(facts_on_a_rank, world=WORLD)


def test_torchs_differentiable_collectives_fail_under_grad(facts: Any) -> None:
    """Row 135; mfun's are Functions with `setup_context`."""
    for found in facts:
        assert found["functional", "under grad"] and found["nn", "under grad"]


def test_torchs_sum_counts_a_loss_once_a_rank(facts: Any) -> None:
    """Row 25: (1 + 2)^2 meant once has the gradient 6; theirs is 12, mfun's `reduce` 6."""
    for found in facts:
        assert found["functional", "gradient"].item() == found["nn", "gradient"].item() == 12
        assert found["mfun", "gradient"].item() == 6


def test_a_plain_all_reduce_is_not_recorded(facts: Any) -> None:
    """Row 135: under grad it sums forward and is the identity backward, without a word."""
    for found in facts:
        assert found["plain", "under grad"] == ""
        assert found["plain", "value"].item() == 3 and found["plain", "gradient"].item() == 3


def test_collectives_under_vmap(facts: Any) -> None:
    """Row 135: torch's functional one raises nothing (its data are whatever is there by then), the
    plain one raises; mfun's gives the sum of every row.
    """
    for found in facts:
        assert found["functional", "under vmap"] == "" and found["plain", "under vmap"]
        assert found["mfun", "under vmap"].tolist() == [[3.0, 3.0]] * 3


# ---------------------------------------------------------------------------- mfun's Functions


def functions_of_mfun() -> dict[str, type[torch.autograd.Function]]:
    """Every autograd.Function in mfun, by name."""
    import importlib
    import pkgutil

    import mfun

    for module in pkgutil.walk_packages(mfun.__path__, "mfun."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: dict[str, type[torch.autograd.Function]] = {}
    todo: list[Any] = [torch.autograd.Function]
    while todo:
        for kind in todo.pop().__subclasses__():
            todo.append(kind)
            if kind.__module__.startswith("mfun."):
                found[kind.__name__] = kind
    return found


FIRST_ORDER = {"Rows", "_StandIn"}
"""Used by the training step alone, on one rank's own tensors; elsewhere they are not there."""


def test_every_function_has_every_rule() -> None:
    """Row 133: `setup_context`, `jvp` and `vmap`; the one without is refused by name."""
    from mfun.nn.embedding import lookup
    from mfun.nn.weight_grads import WeightGrads

    found = functions_of_mfun()
    assert {"Collective", "Ranked", "Max", "ColumnLinear", "RowLinear", "HeadLoss"} <= set(found)
    for name, kind in found.items():
        own = all(rule in vars(kind) for rule in ("setup_context", "jvp", "vmap"))
        assert own != (name in FIRST_ORDER), name
    sink = WeightGrads({}, lambda path: (torch.zeros(()), 0))
    with pytest.raises(RuntimeError, match="setup_context"):
        grad(lambda w: lookup(torch.zeros(1, 1).long(), w, sink).sum())(torch.ones(2, 3))


@pytest.mark.parametrize("kind", [Collective, Ranked, Max], ids=lambda kind: kind.__name__)
def test_backwards_of_collectives_are_functions(kind: Any) -> None:
    """No backward touches the network itself: all go through `.apply`, or stop the gradient."""
    import dis

    called = {i.argval for i in dis.get_instructions(kind.backward) if isinstance(i.argval, str)}
    assert not called & {"dist", "kernels", "all_reduce", "on_group", "on_ranks"}
    assert "apply" in called or kind is Max


def test_third_derivative_through_a_mesh() -> None:
    """Backwards of backwards of backwards: the cube of a sum over ranks has third derivative 6."""
    cube = simulate(
        lambda groups, x: reduce(x.sum(), groups.tp).pow(3), Mesh(tp=WORLD), (P("tp"),), P()
    )
    slope = grad(cube)
    bent = grad(lambda x: slope(x)[0])
    third = grad(lambda x: bent(x)[0])(torch.tensor([1.0, 2.0]))
    assert third.tolist() == [6.0, 6.0]

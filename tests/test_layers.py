"""Imports only point down, integers come without torch, and nothing is kept or unpickled."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mfun

ROOT = Path(mfun.__file__).parent

LAYER = {
    "config": 0,
    "mesh": 0,
    "flat": 0,
    "schedule": 0,
    "tree": 1,
    "host": 1,
    "rng": 1,
    "spec": 1,
    "comm": 2,
    "nn": 3,
    "models": 3,
    "grads": 4,
    "optim": 4,
    "func": 5,
    "pipeline": 5,
    "inspect": 5,
    "convert": 5,
    "checkpoint": 5,
    "data": 5,
    "train": 6,
    "verify": 6,
    "plan": 6,
    "cli": 7,
    "__main__": 8,
    "__init__": 7,
}
"""Each part of the package and how high it stands; the public names beside the command line."""

UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def part_of(module: str) -> str:
    """The part of the package that a dotted name belongs to."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def names_of(file: Path) -> tuple[str, ...]:
    """Dotted name of a source file, as a tuple; a package ends in __init__."""
    return ("mfun", *file.relative_to(ROOT).with_suffix("").parts)


def imports(tree: ast.AST, name: tuple[str, ...]) -> list[tuple[str, int]]:
    """Every imported module with its line, inside functions too; relative ones made absolute.

    ``from mfun import x`` names the part ``mfun.x`` unless x is no part.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = ".".join(name[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module == "mfun":
                for alias in node.names:
                    found.append(
                        (f"mfun.{alias.name}" if alias.name in LAYER else "mfun", node.lineno)
                    )
            else:
                found.append((module, node.lineno))
    return found


def problems(source: str, name: tuple[str, ...]) -> list[str]:
    """What a source file does that the layout forbids, each with its line."""
    tree = ast.parse(source)
    part = name[1]
    found = []
    for module, line in imports(tree, name):
        top = module.split(".")[0]
        if top == "mfun" and LAYER[part_of(module)] > LAYER[part]:
            found.append(f"{line}: {part} (layer {LAYER[part]}) imports {module} above it")
        if top == "torch" and LAYER[part] == 0:
            found.append(f"{line}: {part} is layer 0 and imports {module}")
        if top in UNPICKLERS:
            found.append(f"{line}: imports {module}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            found.append(f"{node.lineno}: {ast.unparse(node)} is a pickle")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += [f"{node.lineno}: allow_pickle"] * (ast.unparse(node.value) != "False")
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [
                f"{node.lineno}: torch.load" for a in node.names if a.name in ("load", "save")
            ]
    return found


FILES = sorted(ROOT.rglob("*.py"))


def test_every_part_has_a_layer() -> None:
    """A new part of the package must be given its place."""
    parts = {names_of(file)[1] for file in FILES}
    assert parts <= set(LAYER)
    assert {"config", "mesh"} <= parts


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_file_keeps_to_the_layout(file: Path) -> None:
    """No upward import, no torch in layer 0, no global statement, no pickle."""
    assert problems(file.read_text(encoding="utf-8"), names_of(file)) == []


def test_reference_imports_nothing_of_mfun() -> None:
    """The reference is independent: it shares no code with what it judges."""
    for file in sorted((ROOT / "verify" / "reference").rglob("*.py")):
        for module, _ in imports(ast.parse(file.read_text(encoding="utf-8")), names_of(file)):
            inside = module.startswith("mfun.verify.reference")
            assert inside or module.split(".")[0] != "mfun", f"{file.name} imports {module}"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (("mfun", "mesh"), "import mfun.tree"),
        (("mfun", "mesh"), "from mfun import tree"),
        (("mfun", "mesh"), "from mfun import __version__"),
        (("mfun", "mesh"), "from .tree import map"),
        (("mfun", "config", "load"), "from ..comm.world import Groups"),
        (("mfun", "config", "load"), "def f():\n    from mfun.nn import x"),
        (("mfun", "comm", "world"), "from mfun.nn.linear import column_linear"),
        (("mfun", "flat"), "import torch"),
        (("mfun", "schedule", "check"), "def f():\n    from torch.func import vjp"),
        (("mfun", "data", "text"), "import pickle"),
        (("mfun", "data", "text"), "from pickle import loads"),
        (("mfun", "data", "text"), "import torch\nx = torch.load('a')"),
        (("mfun", "data", "text"), "from torch import load"),
        (("mfun", "data", "text"), "np.load('a', allow_pickle=True)"),
        (("mfun", "train", "loop"), "def f():\n    global x\n    x = 1"),
    ],
)
def test_the_check_can_fail(name: tuple[str, ...], source: str) -> None:
    """Each forbidden thing, planted, is found."""
    assert len(problems(source, name)) == 1


def test_downward_and_sideways_imports_are_let_through() -> None:
    """What the layout allows is not reported."""
    source = (
        "from mfun.mesh import Mesh\nfrom .fields import x\nfrom mfun import flat\nimport numpy"
    )
    assert problems(source, ("mfun", "config", "load")) == []
    assert problems("import torch\nfrom mfun.spec import P", ("mfun", "nn", "linear")) == []


def test_layer_0_loads_without_torch() -> None:
    """Importing config, mesh and the rest of layer 0 in a fresh process does not load torch."""
    parts = sorted(p for p, layer in LAYER.items() if layer == 0 and _exists(p))
    code = (
        "import sys, types; mfun = types.ModuleType('mfun'); sys.modules['mfun'] = mfun; "
        f"mfun.__path__ = [{str(ROOT)!r}]; import {', '.join(f'mfun.{p}' for p in parts)}; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _exists(part: str) -> bool:
    return (ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file()

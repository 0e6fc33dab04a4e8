"""The real reduction table and `finalize`, exactly: integer gradients on every small mesh.

A leaf replicated over some axes, declared per axis: the ranks' gradients are made as the model of
`Sync.v` has them (summands of the whole gradient where `partial`, copies where `equal`), so that
the whole gradient is known; `finalize` must give it on every rank. Numbers are integers, scaled so
that each weight 1 / size leaves integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from mfun.comm import Groups, map_ranks
from mfun.grads.finalize import finalize
from mfun.grads.table import KINDS, reductions
from mfun.mesh import Mesh
from mfun.spec import P, ParamSpec
from proofs.claims import Claim, claim
from proofs.duals import meshes

SCALE = 840  # divides by every size up to 8
CASES: Mapping[str, tuple[P, dict[str, str], str]] = {
    "replicated, equal over tp": (P(), {"tp": "equal"}, "equal"),
    "replicated, partial over tp": (P(), {"tp": "partial"}, "partial"),
    "replicated, mean over tp": (P(), {"tp": "mean"}, "mean"),
    "cut over tp": (P("tp"), {}, "cut"),
}


def summands(mesh: Mesh, kind: str) -> tuple[Tensor, Tensor]:
    """Every rank's gradient of its piece, and the whole gradient that it should see."""
    grads = torch.zeros(mesh.stage_size, 2, dtype=torch.float64)
    whole = torch.zeros(mesh.stage_size, 2, dtype=torch.float64)
    for rank in range(mesh.stage_size):
        at = mesh.coords(rank)
        seen = {**at, "tp": 0} if kind == "equal" else at
        for i in range(2):
            grads[rank, i] = SCALE * (1 + i + 2 * seen["tp"] + 3 * seen["cp"] + 5 * seen["dp"])
    for rank, other in product(range(mesh.stage_size), repeat=2):
        if kind != "cut" or mesh.coords(rank)["tp"] == mesh.coords(other)["tp"]:
            share = mesh.tp if kind in ("equal", "mean") else 1
            whole[rank] += grads[other] // share
    return grads, whole


def problems(mesh: Mesh, p: P, declared: Mapping[str, str], kind: str) -> Iterator[str]:
    """Where `finalize` gives something else than the whole gradient."""
    spec = ParamSpec(shape=(2 * (mesh.tp if kind == "cut" else 1),), p=p, grad={**declared})
    table = reductions([{"leaf": spec}], mesh)

    def local(groups: Groups, grad: Tensor) -> Tensor:
        return finalize({"leaf": grad}, groups, table)["leaf"]

    grads, whole = summands(mesh, kind)
    found = map_ranks(local, mesh)(grads)
    if not torch.equal(found, whole):
        yield f"{mesh}: finalize gives {found.tolist()}, the program's gradient is {whole.tolist()}"


def claims(world: int = 8) -> Iterator[Claim]:
    """Each way of holding a leaf, on all meshes of at most `world` ranks."""
    where = list(meshes(world))
    for name, (p, declared, kind) in CASES.items():
        found = (text for mesh in where for text in problems(mesh, p, declared, kind))
        yield claim(f"finalize gives the program's gradient: {name}, {len(where)} meshes", found)
    yield claim("the kinds of the table are those of the theorems", kinds())


def kinds() -> Iterator[str]:
    """Each kind's weight: 1 for summands, 1 / size for copies, exactly."""
    model = {"data": 0, "partial": 0, "repeated": 0, "tied": 0, "equal": 1, "mean": 1}
    if set(model) != set(KINDS):
        yield f"the table has the kinds {sorted(KINDS)}, the theorems {sorted(model)}"
    for name, divides in model.items():
        for size in range(1, 9):
            if KINDS[name].weight(size) != (1 / size if divides else 1.0):
                yield f"kind {name!r} weighs {KINDS[name].weight(size)} over {size} ranks"

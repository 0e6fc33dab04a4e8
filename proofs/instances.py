"""What the real code does, written as Rocq goals about the models of the theorems.

Each goal says that the model computes what mfun computes, on small sizes. If a row of `DUALS`, the
generator of 1F1B, its messages, the bucket planner or the mesh changes, a goal fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from mfun.comm import DUALS
from mfun.comm.collectives import dual_of
from mfun.flat import plan_buckets, round_up
from mfun.mesh import DENSE, EXPERT, FAMILIES, Mesh
from mfun.schedule import SCHEDULES, F, Sizes, plan
from proofs import buckets, meshes
from proofs.schedules import needs

Goal = tuple[str, str]
"""What it is about, and the statement."""

PRELUDE = """From mathcomp Require Import all_ssreflect all_algebra.
From Mfun Require Import {modules}.
Set Implicit Arguments. Unset Strict Implicit. Unset Printing Implicit Defensive.
"""


def rocq(value: Any) -> str:
    """A value as a Rocq term: numbers, booleans, lists as seq, tuples as pairs.

    Example:
        >>> rocq([(1, True), (2, False)])
        '[:: (1, true); (2, false)]'
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case tuple():
            return f"({', '.join(map(rocq, value))})"
        case list():
            return f"[:: {'; '.join(map(rocq, value))}]" if value else "[::]"
    raise TypeError(f"{value!r} has no Rocq term")


# The parameters of a call, as numbers to be recognised in its dual's, and their names.
PLACES = {11: "a", 12: "b", 21: "k", -21: "(- k)%R", 31: "root", 41: "own"}
PARAMS = {
    "gather": (41,),
    "reduce_scatter": (41,),
    "split": (41,),
    "unsplit": (41,),
    "all_to_all": (12, 11),  # mfun names the cut after the exchange first
    "shift": (21,),
    "broadcast": (31,),
    "collect": (31,),
}


def constructor(name: str, params: Sequence[int]) -> str:
    """A collective of mfun as one of the model: `Gather own`."""
    words = [PLACES[param] for param in params]
    if name == "all_to_all":
        words.reverse()
    return " ".join([name.title().replace("_", ""), *words])


def duals() -> Iterator[Goal]:
    """Each row of `DUALS`: the backward and both types are those of the theorem."""
    for name, rule in DUALS.items():
        params = PARAMS.get(name, ())
        call, back = constructor(name, params), constructor(*dual_of(name, params))
        before, after = rule.types.split(" -> ")
        yield (
            f"DUALS[{name}]",
            "forall n (elem : finType) (own a b : elem -> 'I_n.+1) (k root : 'I_n.+1), "
            f"let c : collective n elem := {call} in "
            f"[/\\ dual c = {back}, letter (takes c) = {before}_ & letter (gives c) = {after}_]",
        )


def one_f_one_b(stages: int = 4, microbatches: int = 5) -> Iterator[Goal]:
    """The generator's streams, and what each batch of messages waits for."""
    for p, m in product(range(1, stages + 1), range(1, microbatches + 1)):
        streams = plan("1f1b", p, m)
        ops = [
            [(not isinstance(op, F), op.mb) for op in SCHEDULES["1f1b"].ops(stage, Sizes(p, m))]
            for stage in range(p)
        ]
        yield (
            f"the ops of 1F1B, {p} stages, {m} microbatches",
            f"[seq program {p} {m} s | s <- iota 0 {p}] = {rocq(ops)}",
        )
        waits = [
            [[batch.get(peer, 0) for peer in range(p)] for batch in stage]
            for stage in needs(streams)
        ]
        yield (
            f"the messages of 1F1B, {p} stages, {m} microbatches",
            f"[seq [seq [seq need (program {p} {m}) s k q | q <- iota 0 {p}] "
            f"| k <- iota 0 (len (program {p} {m}) s)] | s <- iota 0 {p}] = {rocq(waits)}",
        )


def layouts(every: int = 23) -> Iterator[Goal]:
    """The bucket planner on some small lists of leaves."""
    table = [[round_up(k, d) for k in range(14)] for d in range(1, 6)]
    yield "round_up", f"[seq [seq round_up k d | k <- iota 0 14] | d <- iota 1 5] = {rocq(table)}"
    cases = product(buckets.lists(3), buckets.LIMITS, buckets.SHARDS)
    for leaves, limit, (shards, align, pad) in list(cases)[::every]:
        number = {leaf.path: i for i, leaf in enumerate(leaves)}
        found = [
            (
                [(number[span.path], span.stop - span.start) for span in bucket.spans],
                [(span.start, span.stop) for span in bucket.spans],
                bucket.used,
                bucket.size,
            )
            for bucket in plan_buckets(
                leaves, bucket_size=limit, shards=shards, align=align, pad=pad
            )
        ]
        forward = "; ".join(
            f"Leaf {i} {ord(str(leaf.key)) - ord('a')} {rocq(leaf.tied)} {leaf.shape[0]}"
            for i, leaf in enumerate(leaves)
        )
        most = "None" if limit is None else f"(Some {limit})"
        yield (
            f"buckets of {leaves}, limit {limit}, {shards} shards, align {align}, pad {pad}",
            f"[seq (leaves f, spans {align} 0 (sizes_of f), used_of {align} f, "
            f"padded (used_of {align} f) {shards or 1} {pad}) "
            f"| f <- plan {most} {align} [:: {forward}]] = {rocq(found)}",
        )


def groups(worlds: Sequence[int] = (1, 2, 4, 6, 8)) -> Iterator[Goal]:
    """Coordinates and groups of some small meshes, in both views."""
    for world in worlds:
        for mesh in [*list(meshes.small(world))[::3], *list(meshes.reordered(world))[::17]]:
            yield from _view(mesh, DENSE, mesh.coords)
            yield from _view(mesh, EXPERT, mesh.expert_coords)


def _view(mesh: Mesh, view: tuple[str, ...], coords: Any) -> Iterator[Goal]:
    digits = mesh.digits(*view)
    sizes, names = [d.size for d in digits], [str(d.axis) for d in digits]
    where = [[coords(rank)[name] for name in names] for rank in range(mesh.world)]
    yield (
        f"coordinates {names} of {mesh}",
        f"[seq coords {rocq(sizes)} r | r <- iota 0 {mesh.world}] = {rocq(where)}",
    )
    for family, axes in FAMILIES.items():
        if set(axes) <= set(view):
            inside = [name in axes for name in names]
            found = [list(group) for group in mesh.groups(*axes)]
            yield (
                f"groups {family} of {mesh}",
                f"groups {rocq(inside)} {rocq(sizes)} = {rocq(found)}",
            )


FILES = {
    "DUALS": ("Collectives", duals),
    "1F1B": ("Network OneFOneB", one_f_one_b),
    "buckets": ("Buckets", layouts),
    "meshes": ("Mesh", groups),
}
"""What is compared, the theorems' files, and the goals."""


def text(name: str) -> tuple[str, dict[int, str]]:
    """A file of goals, and what is on each of its lines."""
    modules, goals = FILES[name]
    lines, about = PRELUDE.format(modules=modules).splitlines(), {}
    for what, statement in goals():
        about[len(lines) + 1] = what
        proof = "by []" if name == "DUALS" else "vm_compute; reflexivity"
        lines.append(f"Goal {statement}. Proof. {proof}. Qed.")
    return "\n".join([*lines, ""]), about

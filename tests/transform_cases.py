"""Derivatives of every order on a mesh, next to the same by `torch.autograd` on one device.

`on_one` is plain torch on the independent reference: reverse mode only, one sample after another.
`on_rank` is mfun's transforms of a rank-local program, for simulated ranks and for processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun import config as cfg
from mfun import func, tree
from mfun.comm import Groups, map_ranks
from mfun.config import Config, load, resolve
from mfun.grads import reductions
from mfun.mesh import Mesh
from mfun.spec import ParamSpec, shard, unshard_leaf
from mfun.verify import reference
from mfun.verify.batches import global_batch
from mfun.verify.run import settings_of

Tree = Any
ONE = {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
MODELS = {
    "llama": "tied=false position=rotary norm=rmsnorm activation=swiglu bias=none qk_norm=true",
    "gpt2": "tied=true position=learned norm=layernorm activation=gelu bias=all "
    "train.label_smoothing=0.1 train.z_loss=0.01",
}


@attrs.frozen(eq=False)
class Case:
    """A model on a mesh.

    Args:
        name: row of `MODELS`.
        mesh: sizes of its axes.
        sp: sequence parallelism.
        kv: key and value heads.
        layers: blocks.
    """

    name: str
    mesh: Mesh
    sp: bool = False
    kv: int = 2
    layers: int = 1

    @property
    def config(self) -> Config:
        """Of 9 words (which 2 and 4 do not divide), 8 wide, 4 heads, in float64."""
        mesh = self.mesh
        sizes = {"layers": self.layers, "hidden": 8, "heads": 4, "kv_heads": self.kv, "vocab": 9}
        sizes |= {"ffn": 8, "seq_len": 4, "init_std": 0.5}
        keys = [f"model.{k}={n}" for k, n in sizes.items()]
        keys += [k if "." in k else f"model.{k}" for k in MODELS[self.name].split()]
        keys += [f"parallel.{axis}={getattr(mesh, axis)}" for axis in ("tp", "dp", "pp")]
        keys += [f"parallel.sequence_parallel={str(self.sp).lower()}", "precision.policy=fp64"]
        keys += ["train.global_batch=4", "train.microbatches=1", "parallel.schedule=gpipe"]
        return resolve(load("tiny", keys), None)

    @property
    def stage_specs(self) -> list[Tree]:
        """Specs of every stage."""
        from mfun.models.gpt import gpt
        from mfun.pipeline.stage import cut

        return [stage.specs for stage in cut(gpt(self.config), cfg.stage_layers(self.config))]


def vector(config: Config, seed: int) -> Tree:
    """A tree of whole normals; weights of norms are far from 1, biases from 0."""
    generator = torch.Generator().manual_seed(seed)

    def one(spec: ParamSpec) -> Tensor:
        return 0.5 * torch.randn(spec.shape, generator=generator, dtype=torch.float64)

    return tree.map(one, func.specs_of(config))


# ---------------------------------------------------------------------------- one device


def model_settings(config: Config) -> dict[str, dict[str, Any]]:
    """What the reference's loss reads."""
    return {name: each for name, each in settings_of(config).items() if name != "optim"}


def on_one(config: Config, params: Tree, v: Tree) -> dict[str, Any]:
    """Everything by reverse mode on the reference; trees are flat here."""
    settings, batch = model_settings(config), global_batch(config, 0)
    at, along = tree.flatten(params), tree.flatten(v)
    leaves = {path: x.clone().requires_grad_() for path, x in at.items()}

    def losses() -> Tensor:
        rows = [{k: x[i : i + 1] for k, x in batch.items()} for i in range(len(batch["sample"]))]
        return torch.stack([reference.loss(settings, leaves, [row])[1] for row in rows])

    def pull(y: Tensor, ct: Tensor, **how: Any) -> dict[str, Tensor]:
        found = torch.autograd.grad(y, list(leaves.values()), ct, **how)
        return dict(zip(leaves, found, strict=True))

    def dot(grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(grads[path] * along[path]).sum() for path in leaves]).sum()

    each = losses()
    ones = torch.ones_like(each)
    singles = [pull(each, row, retain_graph=True) for row in torch.eye(len(each)).double()]
    grads = pull(each, ones, create_graph=True)
    curved = pull(dot(grads), torch.ones(()).double(), materialize_grads=True)
    slopes = torch.stack([dot(single) for single in singles])
    return {
        "value": each.sum().detach(),
        "gradient": {path: g.detach() for path, g in grads.items()},
        "per sample": {p: torch.stack([single[p] for single in singles]) for p in leaves},
        "slopes": slopes,
        "hessian": curved,
        "curvature": dot(curved).detach(),
        "gauss newton": _gauss_newton(settings, leaves, along, batch),
        "fisher": {p: sum(s * g[p] for s, g in zip(slopes, singles, strict=True)) for p in leaves},
    }


def _gauss_newton(settings: Any, leaves: Any, along: Any, batch: Any) -> dict[str, Tensor]:
    """J^T H J v, the product with J as the derivative of that with its transpose."""
    every = list(leaves.values())
    z = reference.forward(settings, leaves, batch)
    u = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, every, u, create_graph=True)
    s = torch.stack([(g * along[p]).sum() for p, g in zip(leaves, pulled, strict=True)]).sum()
    (dz,) = torch.autograd.grad(s, u, retain_graph=True)
    at = z.detach().requires_grad_()
    loss = (reference.token_losses(settings, at, batch["labels"]) * batch["mask"]).sum()
    (slope,) = torch.autograd.grad(loss, at, create_graph=True)
    (curved,) = torch.autograd.grad((slope * dz).sum(), at)
    return dict(zip(leaves, torch.autograd.grad(z, every, curved), strict=True))


# ---------------------------------------------------------------------------- one rank


def on_rank(groups: Groups, case: Case, params: Tree, v: Tree, batch: Any) -> dict[str, Any]:
    """The same, of one rank's pieces, by mfun's transforms."""
    config, table = case.config, reductions(case.stage_specs, groups.mesh)
    space, own = (func.rank_space(groups, table, over_data=all_of) for all_of in (True, False))
    loss = func.rank_loss(config, groups, batch)
    losses = func.rank_sample_losses(config, groups, batch)
    logits, of_logits = (f(config, groups, batch) for f in (func.rank_logits, func.logits_loss))
    value, grads = func.value_and_gradient(loss, params, space)
    curved = func.hessian_vector(loss, params, v, space)

    def one(params: Tree, row: Any) -> Tensor:
        return func.rank_loss(config, groups, row)(params)

    def slope(params: Tree) -> Tensor:
        return space.dot(func.gradient(loss, params, space), v)

    return {
        "value": value,
        "gradient": grads,
        "per sample": func.per_sample_gradients(one, params, batch, own),
        "slopes": func.jacobian_vector(losses, params, v)[1],
        "hessian": curved,
        "hessian, reverse over reverse": space.whole(torch.func.grad(slope)(params)),
        "curvature": space.dot(v, curved),
        "gauss newton": func.gauss_newton_vector(logits, of_logits, params, v, space),
        "fisher": func.fisher_vector(losses, params, v, space),
        "gradient, by samples": func.vector_jacobian(
            losses, params, torch.ones_like(batch["mask"][:, 0]), space
        ),
    }


SAME = {"hessian, reverse over reverse": "hessian", "gradient, by samples": "gradient"}
"""What is one thing by two ways."""


def pieces(case: Case, rank: int, params: Tree) -> Tree:
    """One rank's pieces of a whole tree, of its stage."""
    coords = case.mesh.coords(rank)
    specs = case.stage_specs[coords["pp"]]
    return shard(tree.select(params, specs), specs, case.mesh, coords)


def rows_of(case: Case, rank: int) -> dict[str, Tensor]:
    """One data rank's part of the batch."""
    at, dp = case.mesh.coords(rank)["dp"], case.mesh.dp
    return {k: x.chunk(dp)[at] for k, x in global_batch(case.config, 0).items()}


def on_simulated_ranks(case: Case, params: Tree, v: Tree) -> list[dict[str, Any]]:
    """`on_rank` for all ranks at once, as a list over ranks."""
    ranks = range(case.mesh.world)

    def stack(of: Callable[[int], Tree]) -> Tree:
        return tree.map(lambda *each: torch.stack(each), *(of(rank) for rank in ranks))

    run = map_ranks(lambda groups, *args: on_rank(groups, case, *args), case.mesh, check=True)
    found = run(
        stack(lambda rank: pieces(case, rank, params)),
        stack(lambda rank: pieces(case, rank, v)),
        stack(lambda rank: rows_of(case, rank)),
    )
    return [tree.map(lambda x, r=rank: x[r], found) for rank in ranks]


# ---------------------------------------------------------------------------- comparison


def assembled(case: Case, name: str, found: list[Any], samples: int = 0) -> dict[str, Tensor]:
    """Whole tensors by path from every rank's tree; copies must agree.

    Args:
        case: the mesh.
        name: of what was found.
        found: a tree for each rank.
        samples: of per-sample trees, how many there are; their dim 0 is cut over dp.
    """
    whole: dict[str, Tensor] = {}
    flat = [tree.flatten(each) for each in found]
    for stage, specs in enumerate(case.stage_specs):
        specs = func.stacked(specs, samples, "dp") if samples else specs
        ranks = case.mesh.stage_ranks(stage)
        for path, spec in tree.flatten(specs).items():
            parts = [(case.mesh.coords(rank), flat[rank][path]) for rank in ranks]
            x = unshard_leaf(parts, spec, case.mesh)
            for coords, part in parts:
                near(
                    f"{name} of {path}",
                    part,
                    shard({"x": x}, {"x": spec}, case.mesh, coords)["x"],
                    x,
                    1e-12,
                )
            if path in whole:
                near(f"{name} of {path} on another stage", x, whole[path], x, 1e-12)
            whole[path] = x
    return whole


def near(what: str, have: Tensor, want: Tensor, scale: Tensor, bound: float = 1e-10) -> None:
    """Within the bound, relative to the largest value of `scale`."""
    gap = float((have - want).abs().max()) if want.numel() else 0.0
    assert have.shape == want.shape, f"{what}: shape {have.shape} for {want.shape}"
    assert gap <= bound * max(float(scale.abs().max()), 1e-3), f"{what} is off by {gap:.2e}"


def compare(case: Case, found: list[dict[str, Any]], want: dict[str, Any]) -> float:
    """Every rank's results against one device; the largest relative error."""
    worst = 0.0
    for name in found[0]:
        right = want[SAME.get(name, name)]
        each = [one[name] for one in found]
        if name in ("value", "curvature"):
            pairs = {f"{name} on rank {r}": (x, right) for r, x in enumerate(each)}
        elif name == "slopes":
            pairs = {name: (torch.cat(each[:: case.mesh.tp]), right)}
        else:
            whole = assembled(case, name, each, len(want["slopes"]) if name == "per sample" else 0)
            assert whole.keys() == right.keys()
            pairs = {f"{name} of {path}": (whole[path], right[path]) for path in right}
        floor = max(float(b.abs().max()) for _, b in pairs.values())
        for what, (a, b) in pairs.items():
            near(what, a, b, torch.tensor(max(float(b.abs().max()), 1e-4 * floor)))
            worst = max(worst, float((a - b).abs().max()) / floor)
    return worst

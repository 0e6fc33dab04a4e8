"""The GPT on simulated meshes equals the independent reference on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import randint, randn
from torch import Tensor
from torch.func import grad_and_value, jvp, vmap

from mfun import config as configs
from mfun import tree
from mfun.comm import Groups, map_ranks, simulate, single_groups
from mfun.config import Config, ModelConfig, ParallelConfig, TrainConfig
from mfun.mesh import Factor, Mesh
from mfun.models import gpt
from mfun.nn import Ctx, Layer
from mfun.rng import key
from mfun.spec import P, ParamSpec, init_params, shard, unshard_leaf
from mfun.verify import reference

Flat = Mapping[str, Tensor]
SEED, STEP, SEQ = 3, 7, 8
ROOT = key(SEED, "dropout", STEP)
# The fixture M of the bug list, with a shorter sequence.
M: dict[str, Any] = {
    "hidden": 24, "heads": 6, "kv_heads": 2, "layers": 2, "ffn": 40, "vocab": 37, "seq_len": SEQ,
    "tied": False, "init_std": 0.3,
}  # fmt: skip


def config_of(model: Mapping[str, Any], mesh: Mesh, sp: bool, **train: Any) -> Config:
    """A checked configuration."""
    parallel = ParallelConfig(tp=mesh.tp, dp=mesh.dp, sequence_parallel=sp)
    made = Config(model=ModelConfig(**model), parallel=parallel, train=TrainConfig(**train))
    return configs.resolve(made, mesh.world)


def specs_of(layers: list[Layer]) -> dict[str, Any]:
    """The whole model's specs."""
    return tree.merge(*(layer.specs for layer in layers))


def run_layers(layers: list[Layer], groups: Groups, params: Any, batch: Any, **how: Any) -> Any:
    """One layer after the other."""
    x: dict[str, Tensor] = {}
    for layer in layers:
        x = layer.apply(tree.select(params, layer.specs), x, Ctx(groups, batch, **how))
    return x


def batch_of(vocab: int, rows: int, packed: bool = False) -> dict[str, Tensor]:
    """Random tokens with a loss mask; two documents a row if packed."""
    mask = (randn(rows, SEQ) < 0.5).double()
    batch = {
        "tokens": randint(vocab, rows, SEQ),
        "labels": randint(vocab, rows, SEQ, seed=1),
        "mask": mask,
        "sample": torch.arange(rows) + 5,
    }
    if packed:
        batch["documents"] = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * rows)
        batch["positions"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * rows)
    return batch


def error(found: Flat, right: Flat) -> tuple[float, str]:
    """Largest relative error of a leaf, and its path."""
    assert found.keys() == right.keys()
    floor = 1e-4 * max(float(r.abs().max()) for r in right.values())
    errors = {
        path: float((found[path] - r).abs().max()) / max(float(r.abs().max()), floor)
        for path, r in right.items()
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def simulated(config: Config, mesh: Mesh, batch: Any, dropout: bool = True) -> Any:
    """params -> loss sum on the whole mesh."""
    layers = gpt(config)

    def local(groups: Groups, params: Any, batch: Any) -> Tensor:
        return run_layers(layers, groups, params, batch, key=ROOT if dropout else None)["loss"]

    specs = specs_of(layers)
    run = simulate(local, mesh, (specs, P("dp")), P(sums=("dp",)))
    return lambda params: run(params, batch)


def check_against_reference(model: Any, train: Any, mesh: Mesh, sp: bool, batch: Any) -> None:
    """Loss and every gradient, of whole parameters, to 1e-10."""
    settings = {"model": model, "train": train}
    params = reference.init(settings, SEED)
    right = reference.loss_and_grads(settings, params, batch, SEED, STEP)
    run = simulated(config_of(model, mesh, sp, **train), mesh, batch)
    grads, loss = grad_and_value(run)(tree.unflatten(params))
    assert float(loss) == pytest.approx(float(right.loss_sum), rel=1e-12)
    means = {path: g / right.tokens for path, g in tree.flatten(grads).items()}
    assert error(means, right.grads) < (1e-10, "")


MESHES = [Mesh(tp=tp, dp=dp) for tp in (1, 2, 4) for dp in (1, 2)]


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A small model with any features."""
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    heads, position = pick(4, 8), pick("learned", "rotary", "none")
    scaling = pick("none", "linear", "llama3", "yarn") if position == "rotary" else "none"
    return {
        "layers": pick(1, 2), "heads": heads, "hidden": 2 * heads, "head_dim": pick(0, 4),
        "kv_heads": pick(*(g for g in (0, 1, 2, 4, 8) if g <= heads)), "ffn": pick(0, 12),
        "vocab": pick(8, 13, 5), "seq_len": pick(SEQ, SEQ + 3), "dropout": pick(0.0, 0.3),
        "tied": pick(True, False), "position": position,
        "rope_scaling": scaling, "rope_factor": 1.0 if scaling == "none" else 2.5,
        "norm": pick("layernorm", "rmsnorm"), "activation": pick("gelu", "gelu_tanh", "swiglu"),
        "bias": pick("none", "qkv", "all"), "qk_norm": pick(True, False),
        "sliding_window": pick(0, 3), "init_std": 0.3,
    }  # fmt: skip


@settings(max_examples=30)
@given(
    model=models(),
    mesh=st.sampled_from(MESHES),
    sp=st.booleans(),
    packed=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    zeta=st.sampled_from([0.0, 0.01]),
)
def test_any_model_on_any_mesh(
    model: Any, mesh: Mesh, sp: bool, packed: bool, smoothing: float, zeta: float
) -> None:
    """Every feature with every layout: loss and all gradients are the reference's."""
    if sp and model["seq_len"] % mesh.tp:
        model["seq_len"] = SEQ
    train = {"label_smoothing": smoothing, "z_loss": zeta}
    batch = batch_of(model["vocab"], 2 * mesh.dp, packed)
    check_against_reference(model, train, mesh, sp, batch)


@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fixture_m(position: str, sp: bool, tied: bool) -> None:
    """37 words, 6 heads with 2 key-value heads, tp 2 x dp 2 (bugs rows 16, 38, 123)."""
    style = {"norm": "rmsnorm", "activation": "swiglu", "bias": "all", "qk_norm": True}
    model = {**M, "position": position, "tied": tied, "dropout": 0.1, **style}
    check_against_reference(model, {}, Mesh(tp=2, dp=2), sp, batch_of(37, 4))


def test_one_kv_head_on_every_rank() -> None:
    """Multi-query attention: the one head is held by all four ranks (bugs row 18)."""
    model = {**M, "heads": 4, "kv_heads": 1, "bias": "qkv"}
    check_against_reference(model, {}, Mesh(tp=4), False, batch_of(37, 2))


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_positions_are_the_batchs(position: str) -> None:
    """Given positions are used, whatever they are (rotary would not notice a mere restart)."""
    batch = {**batch_of(37, 2), "positions": randint(SEQ, 2, SEQ, seed=3)}
    check_against_reference({**M, "position": position}, {}, Mesh(tp=2), True, batch)


def test_a_masked_microbatch_has_no_gradient() -> None:
    """All tokens masked: loss and gradients are exactly zero, not NaN."""
    mesh, batch = Mesh(tp=2), batch_of(37, 2)
    batch["mask"] = torch.zeros(2, SEQ, dtype=torch.float64)
    params = tree.unflatten(reference.init({"model": M}, SEED))
    grads, loss = grad_and_value(simulated(config_of(M, mesh, True), mesh, batch))(params)
    assert float(loss) == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in tree.flatten(grads).values())


# ---------------------------------------------------------------------------- declarations


@settings(max_examples=40)
@given(model=models(), tp=st.sampled_from([1, 2, 4]))
def test_leaves_are_the_references(model: Any, tp: int) -> None:
    """Paths, whole shapes and decay flags; and a tied table is one leaf (bugs row 41)."""
    specs = tree.flatten(specs_of(gpt(config_of(model, Mesh(tp=tp), False))))
    assert {p: s.shape for p, s in specs.items()} == reference.shapes({"model": model})
    assert {p: s.decay for p, s in specs.items()} == {p: reference.decayed(p) for p in specs}
    assert ("head.weight" in specs) != model["tied"]


@settings(max_examples=10)
@given(model=models(), mesh=st.sampled_from(MESHES))
def test_initial_weights_in_every_layout(model: Any, mesh: Mesh) -> None:
    """Each rank draws its own piece; together they are bitwise one device's, the reference's."""
    specs = specs_of(gpt(config_of(model, mesh, False)))
    one_specs = specs_of(gpt(config_of(model, Mesh(), False)))
    one = tree.flatten(init_params(one_specs, SEED, Mesh(), Mesh().coords(0), torch.float64))
    parts = [
        (mesh.coords(rank), init_params(specs, SEED, mesh, mesh.coords(rank), torch.float64))
        for rank in range(mesh.world)
    ]
    right = reference.init({"model": model}, SEED)
    for path, spec in tree.flatten(specs).items():
        whole = unshard_leaf([(c, tree.flatten(part)[path]) for c, part in parts], spec, mesh)
        assert torch.equal(whole, one[path]), path
        np.testing.assert_allclose(whole, right[path], rtol=1e-14)


def rank_gradients(model: Any, mesh: Mesh, sp: bool) -> tuple[dict[str, ParamSpec], Flat]:
    """Specs, and every rank's own gradients stacked."""
    layers, batch = gpt(config_of(model, mesh, sp)), batch_of(37, 2)
    specs = specs_of(layers)
    params = tree.unflatten(reference.init({"model": model}, SEED))
    pieces = [shard(params, specs, mesh, mesh.coords(rank)) for rank in range(mesh.world)]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *pieces)

    def local(groups: Groups, params: Any) -> Any:
        def loss(params: Any) -> Tensor:
            return run_layers(layers, groups, params, batch)["loss"]

        return grad_and_value(loss)(params)[0]

    return tree.flatten(specs), tree.flatten(map_ranks(local, mesh)(stacked))


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_declared_gradient_types_are_the_measured_ones(sp: bool, kv_heads: int) -> None:
    """Replicas' gradients over tp: copies of the whole where `equal`, summands where `partial`."""
    style = {"bias": "all", "qk_norm": True, "heads": 4, "kv_heads": kv_heads}
    model, mesh = {**M, **style}, Mesh(tp=4)
    settings = {"model": model}
    params = reference.init(settings, SEED)
    right = reference.loss_and_grads(settings, params, batch_of(37, 2))
    specs, grads = rank_gradients(model, mesh, sp)
    for path, spec in specs.items():
        whole = right.grads[path] * right.tokens
        replicas = Factor("tp", kv_heads).inner if ".kv" in path else "tp"
        cut = "tp" in spec.p.axes or mesh.size(replicas) == 1
        mine = torch.stack(
            [shard({"x": whole}, {"x": spec}, mesh, mesh.coords(r))["x"] for r in range(4)]
        )
        scale = float(mine.abs().max())
        if cut or spec.grad[replicas] == "equal":
            assert float((grads[path] - mine).abs().max()) < 1e-10 * scale, path
        else:
            assert spec.grad[replicas] == "partial", path
            copies = mesh.size(replicas)
            summed = grads[path].unflatten(0, (-1, copies)).sum(1).repeat_interleave(copies, 0)
            assert float((summed - mine).abs().max()) < 1e-10 * scale, path
            assert float((grads[path] - mine).abs().max()) > 1e-3 * scale, path


# ---------------------------------------------------------------------------- heads and kernels


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_logits_are_whole_and_unpadded(tp: int, sp: bool) -> None:
    """Every rank has all 37 columns, equal to the reference's."""
    model, mesh, batch = {**M, "heads": 4, "kv_heads": 4}, Mesh(tp=tp), batch_of(37, 2)
    layers = gpt(config_of(model, mesh, sp), head="logits")
    run = simulate(
        lambda groups, params: run_layers(layers, groups, params, batch)["logits"],
        mesh,
        (specs_of(layers),),
        P(),
    )
    params = reference.init({"model": model}, SEED)
    right = reference.forward({"model": model}, params, batch)
    np.testing.assert_allclose(run(tree.unflatten(params)), right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("packed", [False, True])
def test_first_order_kernels_have_the_same_value(dropout: float, packed: bool) -> None:
    """derivatives="first" and "any" agree in loss and gradients, also without torch.func."""
    model, batch = {**M, "dropout": dropout}, batch_of(37, 2, packed)
    layers = gpt(config_of(model, Mesh(), False))
    params = tree.unflatten(reference.init({"model": model}, SEED))

    def loss(how: Any) -> Any:
        def run(params: Any) -> Tensor:
            groups = single_groups()
            return run_layers(layers, groups, params, batch, key=ROOT, derivatives=how)["loss"]

        return run

    fast, plain = (grad_and_value(loss(how))(params) for how in ("first", "any"))
    leaves = tree.map(lambda x: x.clone().requires_grad_(), params)
    flat = tree.flatten(leaves)
    eager = torch.autograd.grad(loss("first")(leaves), list(flat.values()))
    right = tree.flatten(plain[0])
    assert float(fast[1]) == pytest.approx(float(plain[1]), rel=1e-12)
    assert error(tree.flatten(fast[0]), right) < (1e-10, "")
    assert error(dict(zip(flat, eager, strict=True)), right) < (1e-10, "")


def test_hessian_vector_product() -> None:
    """Forward over reverse through the whole GPT at tp 2 x dp 2 with sequence shards."""
    mesh, batch = Mesh(tp=2, dp=2), batch_of(37, 4)
    settings = {"model": M}
    flat = reference.init(settings, SEED)
    direction = {path: randn(*x.shape, seed=9) for path, x in flat.items()}

    def product(run: Any, point: Any, along: Any) -> dict[str, Tensor]:
        out = jvp(lambda p: grad_and_value(run)(p)[0], (point,), (along,))[1]
        return tree.flatten(out)

    run = simulated(config_of(M, mesh, True), mesh, batch, dropout=False)
    found = product(run, tree.unflatten(flat), tree.unflatten(direction))
    dense = lambda p: reference.loss(settings, tree.flatten(p), batch)[1]  # noqa: E731
    right = product(dense, tree.unflatten(flat), tree.unflatten(direction))
    assert error(found, right) < (1e-10, "")


def test_per_sample_gradients() -> None:
    """One gradient for each row, by vmap inside the mesh: each is that row's alone."""
    mesh, batch = Mesh(tp=2), batch_of(37, 3)
    layers = gpt(config_of(M, mesh, False))
    specs = specs_of(layers)
    params = tree.unflatten(reference.init({"model": M}, SEED))

    def local(groups: Groups, params: Any, batch: Any) -> Any:
        def one(row: dict[str, Tensor]) -> Any:
            row = {name: x.unsqueeze(0) for name, x in row.items()}
            return grad_and_value(lambda p: run_layers(layers, groups, p, row)["loss"])(params)[0]

        return vmap(one)(batch)

    stacked = tree.map(lambda s: P(None, *s.p.entries), specs)
    table = {"tokens": P(None, "tp"), "weight": P(None, "tp")}
    stacked["embed"]["tokens"], stacked["head"]["weight"] = table["tokens"], table["weight"]
    found = simulate(local, mesh, (specs, P()), stacked)(params, batch)
    for i in range(3):
        row = {name: x[i : i + 1] for name, x in batch.items()}
        right = reference.loss_and_grads({"model": M}, tree.flatten(params), row)
        mine = {
            path: g[i][: right.grads[path].shape[0]] / right.tokens
            for path, g in tree.flatten(found).items()
        }
        assert error(mine, right.grads) < (1e-10, "")

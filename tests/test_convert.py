"""Hugging Face folders in and out: values by transformers in a parallel layout, bits, refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf import HIDDEN, LAYERS, VOCAB, HFCase, hf_case, in_double, leaves_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from mfun import tree
from mfun.checkpoint import CheckpointError, latest
from mfun.config import Config, from_file, override, resolve
from mfun.convert import FAMILIES, HFError, from_hf, to_hf
from mfun.convert.families import sizes_of
from mfun.convert.matching import specs_of
from mfun.convert.read_config import read_model
from mfun.inspect import open_source
from mfun.mesh import Mesh
from mfun.pipeline import mailbox
from mfun.spec import shard, unshard_leaf
from mfun.train.plan import Plan, plan
from mfun.train.step import Trainer

LAYOUT = ("parallel.tp=2", "parallel.pp=2", "train.microbatches=2", "train.global_batch=2")
FAMILY_CASES = (
    *("gpt2_gelu_new", "gpt2_gelu", "gpt2_untied", "gpt2_eps"),
    *("llama", "llama_eps", "llama_tied", "llama_mha", "llama_biases", "llama_theta"),
    *("llama_linear", "llama_llama3_wide", "llama_yarn_betas", "qwen2", "qwen3", "mistral"),
)


def saved(case: HFCase, folder: Path, **how: Any) -> Path:
    """The case's model as `transformers` saves it."""
    case.model.save_pretrained(folder, **how)
    return folder


def params_at(folder: Path) -> dict[str, Tensor]:
    """The parameters in an mfun folder."""
    tensors = open_source(folder).tensors
    return {name.removeprefix("params."): one.read() for name, one in tensors.items()}


Batch = dict[str, Tensor]


def in_mailbox(
    layout: Plan, params: Batch, batches: list[Batch], ask: Callable[..., Any]
) -> list[Any]:
    """`ask(trainer, state, batches)` on every stage of a layout in this process."""
    office = mailbox.Office()
    worlds = mailbox.worlds(layout.mesh, office, check=True)

    def program(world: Any) -> Any:
        trainer = Trainer(layout, world)
        specs = trainer.stage.specs
        whole = tree.select(tree.unflatten(params), specs)
        local = world.build(lambda coords: shard(whole, specs, layout.mesh, coords))
        same = [world.build(lambda coords, batch=batch: batch) for batch in batches]
        return (yield from ask(trainer, trainer.fresh(local), same))

    return mailbox.run([program(world) for world in worlds], office)


def logits_in(config: Config, params: dict[str, Tensor], tokens_bs: Tensor) -> Tensor:
    """Logits (b, s, v) of a layout, the same on every rank of the last stage."""
    batches = [batch_of(row, row) for row in tokens_bs.split(1)]
    layout = plan(config, head="logits")
    *_, last = in_mailbox(layout, params, batches, lambda t, *given: t.logits(*given))
    for whole in last:
        assert all(torch.equal(whole[0], other) for other in whole)
    return torch.cat([whole[0] for whole in last])


def batch_of(tokens_bs: Tensor, labels_bs: Tensor) -> Batch:
    return {
        "tokens": tokens_bs,
        "labels": labels_bs.clamp(min=0),
        "mask": (labels_bs >= 0).double(),
        "sample": torch.zeros(len(tokens_bs), dtype=torch.int64),
    }


def grads_in(
    config: Config, params: dict[str, Tensor], tokens_bs: Tensor, labels_bs: Tensor
) -> dict[str, Tensor]:
    """Gradients of whole parameters in a layout."""
    rows = zip(tokens_bs.split(1), labels_bs.split(1), strict=True)
    batches, layout = [batch_of(*row) for row in rows], plan(config)

    def ask(trainer: Trainer, *given: Any) -> Any:
        found = yield from trainer.gradients(*given)
        return {path: x.clone() for path, x in found.leaves.items()}

    found: dict[str, list[Any]] = {}
    for stage, leaves in enumerate(in_mailbox(layout, params, batches, ask)):
        for path, x in leaves.items():
            ranks = layout.mesh.stage_ranks(stage)
            pieces = [(layout.mesh.coords(rank), x[i]) for i, rank in enumerate(ranks)]
            found.setdefault(path, []).extend(pieces)
    return {p: unshard_leaf(parts, layout.specs[p], layout.mesh) for p, parts in found.items()}


def laid_out(out: Path, *words: str) -> Config:
    """The configuration of a converted folder, in the layout of these tests."""
    asked = override(from_file(out / "config.toml"), [*LAYOUT, "parallel.dp=1", *words])
    return resolve(asked, Mesh(tp=2, pp=2).world)


def error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest max|a-b| / max(max|right leaf|, 1e-4 max|right over all leaves|)."""
    assert found.keys() == right.keys()
    floor = 1e-4 * max(float(r.abs().max()) for r in right.values())
    return max(
        float((found[p] - right[p]).abs().max()) / max(float(right[p].abs().max()), floor)
        for p in right
    )


# ---------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_a_converted_model_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """Logits at every position and every gradient, at tp 2 x pp 2 in float64, ignored labels
    present; the configuration is as written by hand; and out again, every bit is as it was
    (rows 114, 116-119)."""
    case = hf_case(name)
    folder = saved(case, tmp_path / "theirs")
    done = from_hf(folder, tmp_path / "ours")
    config = laid_out(tmp_path / "ours")
    assert config.model == done.model
    assert {k: getattr(config.model, k) for k in case.settings["model"]} == case.settings["model"]
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(VOCAB, (2, 2, config.model.seq_len), generator=generator)
    labels = labels.masked_fill(labels % 5 == 0, -100)
    params = params_at(tmp_path / "ours")
    right = case.logits(tokens).detach()
    found = logits_in(config, params, tokens)
    assert float((found - right).abs().max() / right.abs().max()) < 1e-10
    assert float(right.std()) > 0.5  # a model whose logits say something
    assert error(grads_in(config, params, tokens, labels), case.grads(tokens, labels)) < 1e-10
    to_hf(tmp_path / "ours", tmp_path / "back")
    same_model(case, folder, tmp_path / "back")


def same_model(case: HFCase, folder: Path, back: Path, *but: str) -> None:
    """Every bit of every file, and what `transformers` makes of it."""
    theirs, ours = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[n], ours[n]) and theirs[n].dtype == ours[n].dtype for n in theirs)
    kind: Any = type(case.model)
    loaded, told = kind.from_pretrained(
        back, output_loading_info=True, dtype=torch.float64, attn_implementation="eager"
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, value in case.model.config.to_dict().items():
        if key not in ("_name_or_path", "architectures", "dtype", "transformers_version", *but):
            assert loaded.config.to_dict()[key] == value, key
    head, tokens = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head is tokens) == bool(case.settings["model"]["tied"])


def test_mixtral_has_its_dense_parts_and_says_what_it_lacks(tmp_path: Path) -> None:
    """With experts that give 0, Mixtral's attention, norms and tables are all there is: the logits
    are those of mfun with an MLP of zeros. The folder itself is refused, by the experts' name."""
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=LAYERS,
        num_attention_heads=6, num_key_value_heads=2, head_dim=4, max_position_embeddings=16,
        rms_norm_eps=1e-2, num_local_experts=4, sliding_window=5,
    )  # fmt: skip
    config._attn_implementation = config._experts_implementation = "eager"
    with in_double("mixtral"), torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.zeros_like(p) if "down_proj" in name else torch.randn_like(p) * 0.25)
    dense = read_model(FAMILIES["mixtral"], config.to_dict())
    assert (dense.norm_eps, dense.sliding_window, dense.rope_theta) == (1e-2, 5, 1e6)
    params = leaves_of("mixtral", dense, dict(model.state_dict()))
    missing = {p: torch.zeros(spec.shape).double() for p, spec in specs_of(dense).items()}
    assert {p for p in missing if p not in params} == {
        f"blocks.{i}.mlp.{x}" for i in range(LAYERS) for x in ("up", "down")
    }
    config64 = override(Config(model=dense), ["precision.policy=fp64", *LAYOUT])
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with in_double("mixtral"):
        right = model(input_ids=tokens, use_cache=False).logits.detach()
    found = logits_in(resolve(config64, 4), {**missing, **params}, tokens)
    assert float((found - right).abs().max() / right.abs().max()) < 1e-10
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(HFError, match=r"experts and their router.*num_local_experts = 4"):
        from_hf(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


# ---------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as `transformers` saves it."""
    return saved(hf_case("llama"), tmp_path_factory.mktemp("llama") / "theirs")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tied GPT-2 as `transformers` saves it."""
    return saved(hf_case("gpt2_gelu"), tmp_path_factory.mktemp("gpt2") / "theirs")


def copied(
    folder: Path, to: Path, tensors: Callable[[dict[str, Tensor]], Any] | None = None, **config: Any
) -> Path:
    """A copy of a folder with other tensors or options; an option None is taken out."""
    shutil.copytree(folder, to)
    if tensors is not None:
        held = load_file(to / "model.safetensors")
        held = tensors(held) or held
        save_file({name: x.contiguous() for name, x in held.items()}, to / "model.safetensors")
    options = json.loads((to / "config.json").read_text()) | config
    kept = {key: value for key, value in options.items() if value is not None}
    (to / "config.json").write_text(json.dumps(kept))
    return to


def same_params(a: Path, b: Path) -> bool:
    x, y = params_at(a), params_at(b)
    return x.keys() == y.keys() and all(torch.equal(x[p], y[p]) for p in x)


def test_many_files_in_and_out(llama: Path, tmp_path: Path) -> None:
    """Sharded folders are the same model, in both directions; every file is within its size."""
    saved(hf_case("llama"), tmp_path / "many", max_shard_size="8KB")
    assert len([*(tmp_path / "many").glob("model-*-of-*.safetensors")]) > 3
    from_hf(llama, tmp_path / "one")
    from_hf(tmp_path / "many", tmp_path / "ours")
    assert same_params(tmp_path / "one", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "out", shard=20_000)
    listed = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {
        n: x
        for f in {*listed["weight_map"].values()}
        for n, x in load_file(tmp_path / "out" / f).items()
    }
    right = load_file(llama / "model.safetensors")
    assert held.keys() == right.keys() and all(torch.equal(held[n], right[n]) for n in right)
    assert listed["metadata"]["total_size"] == sum(x.nbytes for x in right.values())
    sizes = {
        f: sum(x.nbytes for x in load_file(tmp_path / "out" / f).values())
        for f in {*listed["weight_map"].values()}
    }
    assert len(sizes) > 2 and max(sizes.values()) <= 20_000
    kind: Any = transformers.LlamaForCausalLM
    _, told = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits_of_narrow_types_and_the_tokenizer_go_through(
    dtype: str, llama: Path, tmp_path: Path
) -> None:
    """16-bit weights come back with every bit, NaN included; the precision fits; what stood beside
    the weights stands beside them again, but no code."""
    kind = getattr(torch, dtype)

    def narrowed(held: dict[str, Tensor]) -> dict[str, Tensor]:
        held = {name: x.to(kind) for name, x in held.items()}
        held["model.norm.weight"][3] = float("nan")
        return held

    theirs = copied(llama, tmp_path / "theirs", narrowed, dtype=dtype)
    (theirs / "tokenizer.json").write_text("{}")
    (theirs / "modeling.py").write_text("raise SystemExit")
    from_hf(theirs, tmp_path / "ours")
    policy = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
    assert from_file(tmp_path / "ours" / "config.toml").precision.policy == policy
    to_hf(tmp_path / "ours", tmp_path / "back")
    a, b = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)
    assert {f.name for f in (tmp_path / "back").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip
    to_hf(tmp_path / "ours", tmp_path / "wide", dtype="float32")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[n].nan_to_num(7), a[n].float().nan_to_num(7)) for n in a)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"


def test_older_names_of_gpt2(gpt2: Path, tmp_path: Path) -> None:
    """A folder without the prefix, with masks among its tensors, and with a second table that is
    the first, is the same model (rows 116, 117)."""

    def older(held: dict[str, Tensor]) -> dict[str, Tensor]:
        bare = {name.removeprefix("transformer."): x for name, x in held.items()}
        for i in range(LAYERS):
            bare[f"h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16)
            bare[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return {**bare, "lm_head.weight": bare["wte.weight"].clone()}

    old = copied(gpt2, tmp_path / "old", older, architectures=["GPT2Model"], n_ctx=16)
    from_hf(gpt2, tmp_path / "new_out")
    from_hf(old, tmp_path / "old_out")
    assert same_params(tmp_path / "new_out", tmp_path / "old_out")


def test_equal_tables_stay_two(tmp_path: Path) -> None:
    """Row 117: an untied model whose two tables are equal is not tied by it."""
    case = hf_case("llama")
    with torch.no_grad():
        case.model.lm_head.weight.copy_(case.model.model.embed_tokens.weight)
    folder = saved(case, tmp_path / "theirs")
    done = from_hf(folder, tmp_path / "ours")
    assert not done.model.tied and "head.weight" in params_at(tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    same_model(case, folder, tmp_path / "back")


def test_a_conversion_that_fails_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    """Neither a half-written folder nor a temporary one; what is there is not written over."""

    def stop(name: str, size: int) -> None:
        if name == "blocks.1.mlp.up":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        from_hf(llama, tmp_path / "ours", told=stop)
    assert not [*tmp_path.iterdir()]
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").write_text("x")
    with pytest.raises(HFError, match="exists already"):
        from_hf(llama, tmp_path / "ours")
    assert latest(tmp_path / "ours") is None and (tmp_path / "ours" / "mine").is_file()


MLP, ATTN = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn."
K, MORE = f"{ATTN}k_proj.weight", "model.layers.2.mlp.up_proj.weight"
BAD_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(MLP), f"{MLP} is missing"),
    "unexpected": (lambda t: t.update(more=torch.ones(2)), "more is not expected"),
    "misshapen": (
        lambda t: t.update({"model.norm.weight": torch.ones(5).double()}),
        r"model.norm.weight has shape \[5\] and the model needs \[24\]",
    ),
    "transposed": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}),
        r"lm_head.weight has shape \[24, 37\]",
    ),
    "two types": (
        lambda t: t.update({K: t[K].float()}),
        "k_proj.weight and .*v_proj.weight are of type float32 and float64",
    ),
    "integers": (
        lambda t: t.update({"model.norm.weight": torch.ones(24, dtype=torch.int64)}),
        "model.norm.weight are of type int64",
    ),
    "a layer too many": (
        lambda t: t.update({MORE: torch.ones(40, 24).double()}),
        f"{MORE} is not expected",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(name: str, llama: Path, tmp_path: Path) -> None:
    """Missing, unexpected, misshapen, mistyped; nothing is written."""
    change, says = BAD_TENSORS[name]
    bad = copied(llama, tmp_path / "bad", lambda t: [change(t)] and None)
    with pytest.raises(HFError, match=says):
        from_hf(bad, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_second_table_that_differs_is_refused(gpt2: Path, tmp_path: Path) -> None:
    """The configuration says tied and the tables say not: one of them is wrong."""
    apart = copied(
        gpt2, tmp_path / "apart", lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"] + 1}
    )
    with pytest.raises(HFError, match=r"lm_head\.weight is not the embedding"):
        from_hf(apart, tmp_path / "ours")


def test_lists_of_files_are_checked(llama: Path, tmp_path: Path) -> None:
    """A list that leads out of the folder, names a wrong file, or forgets a tensor (row 121)."""
    saved(hf_case("llama"), tmp_path / "many", max_shard_size="8KB")
    file = tmp_path / "many" / "model.safetensors.index.json"
    listed = json.loads(file.read_text())["weight_map"]
    shutil.copy(llama / "model.safetensors", tmp_path / "outside.safetensors")
    names, files = [*listed], sorted({*listed.values()})
    for changed, says in (
        ({**listed, names[0]: "../outside.safetensors"}, "no file of the folder"),
        ({**listed, names[0]: str(tmp_path / "outside.safetensors")}, "no file of the folder"),
        ({**listed, names[0]: "absent.safetensors"}, "no file of the folder"),
        ({**listed, names[0]: next(f for f in files if f != listed[names[0]])}, names[0]),
        ({n: f for n, f in listed.items() if n != names[0]}, names[0]),
        ({**listed, "more": files[0]}, "more"),
        ([], "no weight_map"),
    ):
        file.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(CheckpointError, match=says):
            from_hf(tmp_path / "many", tmp_path / "ours")
    file.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        from_hf(tmp_path / "many", tmp_path / "ours")


def test_weights_that_can_run_code_are_not_read(llama: Path, tmp_path: Path) -> None:
    """A folder of pickles is refused with the way out; nothing of it is opened."""
    folder = copied(llama, tmp_path / "old")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match=r"can run code and are not read.*safe_serialization"):
        from_hf(folder, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="cannot be read"):
        from_hf(tmp_path, tmp_path / "ours")


# ---------------------------------------------------------------------------- export


def test_a_run_that_changed_its_model_is_not_exported_as_the_old_one(
    llama: Path, tmp_path: Path
) -> None:
    """--like of another model is refused by field; without one, a family is found."""
    from_hf(llama, tmp_path / "ours")
    other = copied(llama, tmp_path / "other", rms_norm_eps=1e-3, vocab_size=38)
    with pytest.raises(
        HFError, match=r"vocab is 37, and there 38; norm_eps is 1e-06, and there 0.001"
    ):
        to_hf(tmp_path / "ours", tmp_path / "out", like=other)
    longer = copied(llama, tmp_path / "longer", max_position_embeddings=4096)
    done = to_hf(tmp_path / "ours", tmp_path / "out", like=longer)
    assert done.family == "llama"
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["max_position_embeddings"] == 4096
    shutil.rmtree(tmp_path / "ours" / "hf")
    to_hf(tmp_path / "ours", tmp_path / "bare")
    same_model(hf_case("llama"), llama, tmp_path / "bare", "bos_token_id", "eos_token_id")


def test_what_is_no_checkpoint_is_not_exported(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint of mfun"):
        to_hf(llama, tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        to_hf(tmp_path, tmp_path / "out")


# ---------------------------------------------------------------------------- memory

STREAMED = """
import json, re, sys, torch
from pathlib import Path
from mfun.checkpoint.format import header
from mfun.convert import from_hf, to_hf
folder = Path(sys.argv[1])
shapes = json.loads((folder / "shapes.json").read_text())
start, order = header({name: ("float32", shape) for name, shape in shapes.items()})
with (folder / "theirs" / "model.safetensors").open("wb") as file:
    file.write(start)
    for name in order:
        file.write(torch.ones(shapes[name]).numpy().tobytes())
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
from_hf(folder / "theirs", folder / "ours")
to_hf(folder / "ours", folder / "back")
print(peak() - before)
"""


def test_memory_is_bounded_by_a_parameter(tmp_path: Path) -> None:
    """100 MB of tensors of at most 8.4 MB go in and out in less than 40 MB more than there was."""
    options = {
        "model_type": "llama", "vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
        "max_position_embeddings": 16,
    }  # fmt: skip
    family = FAMILIES["llama"]
    model = read_model(family, options)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in specs_of(model):
        row = family.row(path)
        assert row is not None
        shapes |= dict.fromkeys(family.names(path), row.their_shape(sizes_of(model)))
    assert sum(4 * torch.Size(s).numel() for s in shapes.values()) > 95e6
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(options))
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    words = [sys.executable, "-c", STREAMED, str(tmp_path)]
    # Large memory goes back at once, else up to 25 MB that glibc keeps for later are counted.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert 8_000 < int(done.stdout) < 40_000, done.stdout  # kB

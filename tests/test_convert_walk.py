"""From a Hugging Face folder to a trained run and back, as a user goes; starting in any layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from hf import in_double
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from mfun import optim
from mfun.checkpoint import CheckpointError, Order, save
from mfun.cli import main
from mfun.comm import ProcessWorld, finish
from mfun.config import Config, from_file, load, resolve, to_toml
from mfun.convert import from_hf
from mfun.data import train_bpe
from mfun.grads import needed_groups
from mfun.mesh import Mesh
from mfun.spec import init_params
from mfun.train import starting
from mfun.train.feed import feed
from mfun.train.plan import plan
from mfun.train.replicas import state_leaves
from mfun.train.shards import by_path
from mfun.train.step import Trainer
from tests.test_checkpoint_layouts import SHARDING, Run, ThreadPeers, gathered
from tests.threads import on_threads

TEXT = "to be or not to be, that is the question. " * 40


def mfun(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)


def llama(vocab: int = 257) -> Any:
    """A Llama over bytes and one token more, with stretched rotary angles, in float64."""
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        rms_norm_eps=1e-3, bos_token_id=0, eos_token_id=0, rope_parameters={
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    with in_double("llama"), torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).double().eval()
    for p in model.parameters():
        p.data *= 5 if p.ndim > 1 else 1  # so that it says something
    return model


def loss_of(model: Any, config: Config, step: int) -> float:
    """The mean loss of a run's batch, by transformers."""
    batches = feed(config, Mesh().coords(0)).step(step)
    tokens, labels = (torch.cat([b[key] for b in batches]) for key in ("tokens", "labels"))
    with in_double("llama"), torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def continued(model: Any, prompt: str, count: int) -> str:
    """The likeliest bytes after a prompt, by transformers."""
    ids = torch.tensor([[*prompt.encode()]])
    with in_double("llama"), torch.no_grad():
        for _ in range(count):
            last = model(input_ids=ids, use_cache=False).logits[0, -1, :256]
            ids = torch.cat([ids, last.argmax().view(1, 1)], 1)
    return bytes(ids[0].tolist()).decode("utf-8", "replace")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_the_whole_walk(folder: Path) -> None:
    """Convert, inspect, sample, train on at tp 2 x pp 2 in four processes, resume, export, load:
    the first loss, the text and the last loss are those of transformers."""
    model = llama()
    model.save_pretrained("theirs")
    done = mfun("convert", "from-hf", "theirs", "ours")
    assert done.exit_code == 0, done.output
    assert "ours: llama, 2 blocks of 32, vocabulary 257; 17 tensors" in done.output
    told = mfun("inspect", "ours").output
    assert "mfun checkpoint of step 0" in told and "params.blocks.0-1.attn.kv" in told
    told = mfun("sample", "ours", "--prompt", "to be", "--temperature", 0, "--tokens", 40).output
    assert told.rstrip("\n") == continued(model, "to be", 40).rstrip("\n")

    words = [
        "train", "ours/config.toml", "parallel.tp=2", "parallel.pp=2", "parallel.dp=0",
        "model.seq_len=32", "train.steps=3", "train.global_batch=4", "train.microbatches=2",
        "data.path=text.txt", "optim.lr=0.01", "train.eval_every=0", "--run-dir", "tuned",
    ]  # fmt: skip
    ran = subprocess.run([sys.executable, "-m", "mfun", *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in Path("tuned/metrics.jsonl").read_text().splitlines()]
    config = from_file(Path("tuned/config.toml"))
    alone = resolve(load("tuned/config.toml", ["parallel.tp=1", "parallel.pp=1"]), 1)
    assert config.precision.policy == "fp64" and len(rows) == 3
    assert rows[0]["loss"] == pytest.approx(loss_of(model, alone, 0), rel=1e-12)

    done = mfun("convert", "to-hf", "tuned", "back")
    assert done.exit_code == 0, done.output
    kind: Any = transformers.LlamaForCausalLM
    tuned, info = kind.from_pretrained(
        "back", output_loading_info=True, dtype=torch.float64, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert tuned.config.max_position_embeddings == 64  # as it came, whatever it was trained on
    with in_double("llama"):
        fresh = transformers.LlamaForCausalLM(tuned.config).double().eval()
        fresh.load_state_dict(tuned.state_dict())
    layout = ("parallel.tp=1", "parallel.pp=1")
    done = mfun("train", "--run-dir", "tuned", "--resume", "train.steps=4", *layout)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in Path("tuned/metrics.jsonl").read_text().splitlines()]
    assert rows[3]["loss"] == pytest.approx(loss_of(fresh, alone, 3), rel=1e-12)
    assert rows[3]["loss"] < rows[0]["loss"]
    text = continued(fresh, "to be", 20)
    assert mfun("convert", "from-hf", "back", "again").exit_code == 0
    told = mfun("sample", "again", "--prompt", "to be", "--temperature", 0, "--tokens", 20).output
    assert told.rstrip("\n") == text.rstrip("\n")


def test_a_tokenizer_goes_along(folder: Path) -> None:
    """Samples are of the model's own tokens, as `tokenizers` decodes them; training on bytes is
    refused with the way out, and that way works."""
    train_bpe([TEXT], 300, Path("vocabulary.json"))
    model = llama(300)
    model.save_pretrained("theirs")
    tokenizer = Tokenizer.from_file("vocabulary.json")
    tokenizer.save("theirs/tokenizer.json")
    from_hf(Path("theirs"), Path("ours"))
    ids = tokenizer.encode("to be").ids
    with in_double("llama"), torch.no_grad():
        for _ in range(12):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits[: tokenizer.get_vocab_size()].argmax()))
    told = mfun("sample", "ours", "--prompt", "to be", "--temperature", 0, "--tokens", 12).output
    assert told == tokenizer.decode(ids, skip_special_tokens=False) + "\n"
    words = [
        "train", "ours/config.toml", "model.seq_len=8", "train.steps=1", "train.global_batch=2",
        "train.microbatches=1", "train.eval_every=0", "train.malloc_tuning=false",
    ]  # fmt: skip
    done = mfun(*words, "data.path=text.txt", "--run-dir", "bytes")
    assert done.exit_code == 1
    assert "mfun data build TEXT X --tokenizer" in " ".join(done.output.split())
    file = "ours/hf/tokenizer.json"
    done = mfun("data", "build", "text.txt", "data/mine", "--tokenizer", file)
    assert done.exit_code == 0, done.output
    done = mfun(*words, "data.path=data/mine", "--run-dir", "tuned")
    assert done.exit_code == 0, done.output
    alone = from_file(Path("tuned/config.toml"))
    (row,) = map(json.loads, Path("tuned/metrics.jsonl").read_text().splitlines())
    assert row["loss"] == pytest.approx(loss_of(model, alone, 0), rel=1e-12)
    assert mfun("sample", "tuned", "--prompt", "to be", "--tokens", 3).exit_code == 0


SMALL = (
    "model.layers=4 model.hidden=16 model.heads=4 model.kv_heads=2 model.ffn=24 model.vocab=37 "
    "model.seq_len=8 parallel.tp=1 parallel.pp=1 parallel.dp=1 train.global_batch=12 "
)


def config_of(text: str) -> Config:
    return resolve(load("tiny", [*SMALL.split(), *text.split()]), None)


def written(run: Path, dtype: torch.dtype = torch.float64, **more: str) -> dict[str, Tensor]:
    """A checkpoint of one rank with parameters only, as a conversion writes it."""
    config = config_of(" ".join(f"{k}={v}" for k, v in more.items()))
    params = init_params(plan(config).specs, 5, Mesh(), Mesh().coords(0), torch.float64)
    params = {path: x.to(dtype) for path, x in params.items()}
    tensors = {f"params.{path}": x for path, x in params.items()}
    save(Order(run_dir=run, step=0, tensors=tensors, config=to_toml(config)))
    return params


def started(config: Config) -> list[Run]:
    """Every rank's state, whole by path."""
    layout = plan(config)
    peers = ThreadPeers(layout.mesh.world)

    def main(groups: Any) -> Run:
        trainer = Trainer(layout, ProcessWorld(groups))
        state = starting.start(trainer, peers.of(int(groups.rank)))
        assert state.step == 0
        leaves = state_leaves(finish(by_path(layout, trainer.world, state)))
        return Run([], {n: x.clone() for n, x in leaves.items()}, optim.state_scalars(state.opt))

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


@pytest.mark.parametrize(
    ("precision", "sharding"),
    [
        ("fp64", "no_shard"),
        ("fp32", "optim"),
        ("bf16", "optim parallel.gather_ahead=true"),
        *(("bf16", sharding) for sharding in SHARDING),
    ],
)
def test_weights_start_a_run_in_any_layout(sharding: str, precision: str, tmp_path: Path) -> None:
    """At tp 2 x pp 2 x dp 2, whatever is sharded and however wide numbers are: the parameters are
    those of the folder, rounded once; masters are of these, and moments are zero."""
    params = written(tmp_path / "from")
    config = config_of(
        f"parallel.tp=2 parallel.pp=2 parallel.dp=2 parallel.sharding={sharding} "
        f"precision.policy={precision} train.init_from={tmp_path / 'from'}"
    )
    found = gathered(plan(config), started(config))
    kind = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    for name, x in found.items():
        path = next((p for p in params if name.endswith(f".{p}")), None)
        if name.startswith("params."):
            assert x.dtype == kind and torch.equal(x, params[name[7:]].to(kind)), name
        elif path is not None and "master" in name:
            assert torch.equal(x, params[path].to(kind).float()), name
        elif path is not None:
            assert not x.any(), name
    assert {f"params.{path}" for path in params} <= found.keys()
    assert (precision == "bf16") == any("master" in name for name in found)


def test_another_model_is_not_started_from(tmp_path: Path) -> None:
    """Each field that gives the weights another meaning is named, whether shapes tell or not; what
    does not is free."""
    written(tmp_path / "from")
    start = f"train.init_from={tmp_path / 'from'} precision.policy=fp64"
    with pytest.raises(CheckpointError, match=r"rope_theta is 77.0, and there 10000.0.*norm_eps"):
        started(config_of(f"{start} model.rope_theta=77 model.norm_eps=0.1"))
    with pytest.raises(CheckpointError, match=r"vocab is 38, and there 37"):
        started(config_of(f"{start} model.vocab=38"))
    with pytest.raises(CheckpointError, match=r"absent, which holds no checkpoint.*mfun convert"):
        started(config_of(f"train.init_from={tmp_path / 'absent'}"))
    assert started(config_of(f"{start} model.seq_len=4 model.dropout=0.1 train.seed=9"))
    one = tmp_path / "from" / "checkpoints" / "step-00000000"
    assert started(config_of(f"precision.policy=fp64 train.init_from={one}"))


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    """Nothing is left at what it happened to be (row 96)."""
    config = config_of("")
    params = written(tmp_path / "whole")
    tensors = {f"params.{path}": x for path, x in params.items() if path != "blocks.2.mlp.up"}
    save(Order(run_dir=tmp_path / "part", step=0, tensors=tensors, config=to_toml(config)))
    with pytest.raises(CheckpointError, match=r"params\.blocks\.2\.mlp\.up is missing"):
        started(config_of(f"train.init_from={tmp_path / 'part'}"))

"""The loop and its folder: resumable to the bit, equal in every layout, the same on every rank."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from mfun import checkpoint, tree
from mfun.comm import ProcessWorld, finish
from mfun.config import Config, ConfigError, from_toml, load, resolve, to_toml
from mfun.data import DataError
from mfun.mesh import Mesh
from mfun.pipeline.flight import Flight
from mfun.plan.memory import account
from mfun.train import loop, metrics
from mfun.train.feed import feed
from mfun.train.lifecycle import (
    FREE,
    Request,
    RunError,
    changes,
    configure,
    find_run,
    held,
    open_run,
)
from mfun.train.memory import kept_bytes
from mfun.train.plan import plan
from mfun.train.replicas import ReplicaError, check_replicas, fingerprint
from mfun.train.step import State, Trainer
from mfun.train.stop import SAVING_S
from mfun.verify import reference

WORKER = str(Path(__file__).with_name("train_worker.py"))
SMALL = (
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.seq_len=8",
    "parallel.tp=1",
    "parallel.pp=1",
    "train.global_batch=4",
    "train.microbatches=2",
    "train.steps=6",
    "train.eval_every=3",
    "train.eval_batches=2",
    "train.checkpoint_every=2",
    "optim.warmup=2",
)
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_ms")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small text to learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(120)))
    return path


def small(text: Path, *overrides: str, world: int | None = None) -> Config:
    """A small configuration on that text."""
    return resolve(load("tiny", [*SMALL, f"data.path={text}", *overrides]), world)


def run(folder: Path, config: Config, steps: int | None = None) -> list[loop.Record]:
    """Train in a folder, on one rank, resuming what is there; at most so many steps."""
    opened, where = open_run(Request(run_dir=folder, resume=True), config)
    training = loop.train(loop.job(opened, folder=where))
    records = []
    for record in training:
        records.append(record)
        if steps is not None and len(records) == steps:
            training.close()
    return records


def tensors(folder: Path, step: int) -> dict[str, str]:
    """Hash of each file of a checkpoint."""
    files = checkpoint.step_folder(folder, step).glob("*.safetensors")
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


# what a run leaves


def test_a_run_leaves_what_is_promised(text, tmp_path):
    """Metrics with exactly the promised keys, validation beside, checkpoints, the configuration."""
    config = small(text)
    records = run(tmp_path / "run", config)
    rows = metrics.read(tmp_path / "run")
    assert [tuple(row) for row in rows] == [KEYS] * 6
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in rows] == [32] * 6
    assert [row["lr"] for row in rows][:2] == [config.optim.lr / 2, config.optim.lr]
    assert all(row["step_ms"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert [record.row() for record in records] == rows
    checked = metrics.read(tmp_path / "run", metrics.VALIDATION)
    assert [row["step"] for row in checked] == [3, 6]
    assert [records[2].val_loss, records[5].val_loss] == [row["val_loss"] for row in checked]
    assert list(checkpoint.saved(tmp_path / "run")) == [2, 4, 6]
    written = from_toml((tmp_path / "run/config.toml").read_text())
    assert set(changes(config, written)) == {"data.hash"} and written.data.hash


def test_nothing_is_written_without_a_folder(text, tmp_path, monkeypatch):
    """The loop is a generator of metrics, usable in a script; its value is the last state."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    training = loop.train(loop.job(small(text, "train.steps=2")))
    assert [next(training).step for _ in range(2)] == [1, 2]
    with pytest.raises(StopIteration) as end:
        next(training)
    assert end.value.value.step == 2
    assert sorted(tmp_path.iterdir()) == before


def test_intervals_of_zero(text, tmp_path):
    """eval_every 0 never evaluates; checkpoint_every 0 saves the last step only."""
    records = run(tmp_path / "run", small(text, "train.eval_every=0", "train.checkpoint_every=0"))
    assert all(record.val_loss is None for record in records)
    assert [record.step for record in records if record.saved] == [6]


def test_only_so_many_checkpoints_are_kept(text, tmp_path):
    """train.keep."""
    run(tmp_path / "run", small(text, "train.keep=1", "train.checkpoint_every=1"))
    assert list(checkpoint.saved(tmp_path / "run")) == [6]


def test_errors_tell_the_step(text):
    """A failure inside a step carries a note."""
    job = loop.job(small(text))
    training = loop.train(job)
    next(training)
    broken = attrs.evolve(job, feed=None)
    with pytest.raises(AttributeError) as caught:
        next(loop.train(broken, State(4, {}, {})))
    assert caught.value.__notes__ == ["at step 5"]


def test_a_step_that_is_not_finite_ends_the_run(text, tmp_path):
    """Its line is written, its weights are not: the checkpoint before it stays."""
    config = small(text, "optim.lr=1e30", "optim.warmup=0", "train.checkpoint_every=1")
    config = attrs.evolve(config, train=attrs.evolve(config.train, keep=1))
    with pytest.raises(RunError, match=r"loss is nan .* lower optim.lr") as caught:
        run(tmp_path, config)
    steps = [row["step"] for row in metrics.read(tmp_path)]
    assert caught.value.__notes__ == [f"at step {steps[-1]}"]
    assert list(checkpoint.saved(tmp_path)) == [steps[-1] - 1]


def test_validating_and_saving_have_their_time_after_a_signal(text, tmp_path, monkeypatch):
    """Patience for as many steps as batches, and for a save as much as the launcher has."""
    seen: list[float] = []
    training = loop.job(small(text, "train.eval_batches=9"), folder=tmp_path)
    for owner, name in ((Trainer, "evaluate"), (loop.saving, "save")):
        real = getattr(owner, name)

        def noted(*args: Any, real: Any = real) -> Any:
            seen.append(training.stop.patience)
            return real(*args)

        monkeypatch.setattr(owner, name, noted)
    monkeypatch.setattr("mfun.train.stop.PATIENCE_S", 0.0)
    last = [record.step_ms / 1000 for record in loop.train(training)][-1]
    assert seen[-2:] == [pytest.approx(27 * last), SAVING_S]
    assert training.stop.patience == pytest.approx(3 * last)


# resuming


def test_resume_is_bitwise(text, tmp_path):
    """Stopped after step 3, with the last checkpoint at 2: the same losses, files and weights."""
    config = small(text, "model.dropout=0.1")
    whole = run(tmp_path / "a", config)
    run(tmp_path / "b", config, steps=3)
    assert [row["step"] for row in metrics.read(tmp_path / "b")] == [1, 2, 3]
    rest = run(tmp_path / "b", config)
    assert [record.step for record in rest] == [3, 4, 5, 6]
    for kept in ("loss", "grad_norm", "lr", "tokens", "val_loss"):
        assert [getattr(r, kept) for r in rest] == [getattr(r, kept) for r in whole[2:]]
    assert tensors(tmp_path / "a", 6) == tensors(tmp_path / "b", 6)
    same = [{k: row[k] for k in KEYS[:5]} for row in metrics.read(tmp_path / "b")]
    assert same == [{k: row[k] for k in KEYS[:5]} for row in metrics.read(tmp_path / "a")]


def test_resume_of_a_finished_run_can_go_further(text, tmp_path):
    """train.steps may be raised, and what was computed stays."""
    config = small(text)
    run(tmp_path / "run", config)
    assert run(tmp_path / "run", config) == []
    request = Request(run_dir=tmp_path / "run", resume=True, overrides=("train.steps=8",))
    more = run(tmp_path / "run", configure(request, None))
    assert [record.step for record in more] == [7, 8]
    assert from_toml((tmp_path / "run/config.toml").read_text()).train.steps == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden=32", r"model.hidden is 16 there and 32 now"),
        ("train.global_batch=8", r"train.global_batch is 4 there and 8 now"),
        ("train.seed=1", r"train.seed is 0 there and 1 now"),
        ("precision.policy=fp64", r"precision.policy is 'fp32' there and 'fp64' now"),
    ],
)
def test_resume_refuses_another_run(override, message, text, tmp_path):
    """Another model, batch, seed or format is named, both values and what to do."""
    open_run(Request(run_dir=tmp_path / "run"), small(text))
    with pytest.raises(RunError, match=message):
        configure(Request(run_dir=tmp_path / "run", resume=True, overrides=(override,)), None)


def test_resume_refuses_other_data(text, tmp_path):
    """The text changed after the run began; the hash in config.toml notices."""
    run(tmp_path / "run", small(text), steps=2)
    text.write_text(text.read_text() + "one line more\n")
    request = Request(run_dir=tmp_path / "run", resume=True)
    with pytest.raises(DataError, match=r"started on data .*\(bytes \d+ -> \d+\)"):
        loop.job(configure(request, None))
    text.with_name("other.txt").write_text(text.read_text().removesuffix("one line more\n"))
    moved = attrs.evolve(request, overrides=(f"data.path={text.with_name('other.txt')}",))
    with pytest.raises(DataError, match="names or contents differ"):
        loop.job(configure(moved, None))


def test_a_refused_resume_changes_nothing(text, tmp_path):
    """Other data named on the way: config.toml stays, and the next --resume goes on."""
    run(tmp_path / "run", small(text), steps=2)
    before = (tmp_path / "run/config.toml").read_text()
    text.with_name("other.txt").write_text("something else " * 100)
    other = (f"data.path={text.with_name('other.txt')}", "train.steps=9")
    request = Request(run_dir=tmp_path / "run", resume=True, overrides=other)
    with pytest.raises(DataError, match="started on data"):
        open_run(request, configure(request, None))
    assert (tmp_path / "run/config.toml").read_text() == before


def test_damaged_checkpoints_are_not_taken_for_none(text, tmp_path):
    """An older whole one is taken; with none left the run does not start again over its metrics."""
    run(tmp_path, small(text), steps=4)
    (checkpoint.step_folder(tmp_path, 4) / "index.json").unlink()
    assert [record.step for record in run(tmp_path, small(text), steps=1)] == [3]
    (checkpoint.step_folder(tmp_path, 2) / "index.json").write_text("{")
    before = metrics.read(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="step-00000004 is damaged, and no"):
        run(tmp_path, small(text))
    assert metrics.read(tmp_path) == before


def test_a_damaged_configuration_is_named(text, tmp_path):
    """Bytes that are no text, and a byte order mark that an editor added."""
    open_run(Request(run_dir=tmp_path / "run"), small(text))
    file = tmp_path / "run/config.toml"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert find_run(tmp_path / "run").train.steps == 6
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"config\.toml is not a text file in UTF-8"):
        configure(Request(run_dir=tmp_path / "run", resume=True), None)


def test_resume_refuses_a_checkpoint_of_another_model(text, tmp_path):
    """Even if config.toml was edited by hand."""
    config = small(text)
    run(tmp_path / "run", config)
    other = attrs.evolve(config, model=attrs.evolve(config.model, hidden=8))
    with pytest.raises(checkpoint.CheckpointError, match=r"embed.tokens has shape \(256, 16\)"):
        loop.begin(loop.job(other, folder=tmp_path / "run"))


def test_keys_that_may_change_exist():
    """Every name in FREE is a field of the configuration."""
    fields = {f"{s}.{k}" for s, values in attrs.asdict(load("tiny")).items() for k in values}
    assert fields > FREE


# folders


def test_a_new_run_gets_a_folder_of_its_own(text, tmp_path, monkeypatch):
    """runs/<name>-<date>-<time>; two in one second do not share one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20250131-120000")
    config = small(text)
    folders = [open_run(Request(source=s), config)[1] for s in (None, "x/my.toml", None)]
    names = ["tiny-20250131-120000", "my-20250131-120000", "tiny-20250131-120000-1"]
    assert folders == [Path("runs") / name for name in names]


def test_a_used_folder_is_refused_without_resume(text, tmp_path):
    """With the way on: --resume for a run, another folder otherwise."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        configure(Request(run_dir=tmp_path / "file"), None)
    with pytest.raises(RunError, match="is not empty; name another folder"):
        configure(Request(run_dir=tmp_path), None)
    with pytest.raises(RunError, match="is not empty; name another folder"):
        configure(Request(run_dir=tmp_path, resume=True), None)
    open_run(Request(run_dir=tmp_path / "run"), small(text))
    with pytest.raises(RunError, match="add --resume to go on with that run"):
        configure(Request(run_dir=tmp_path / "run"), None)


def test_two_runs_do_not_share_a_folder(text, tmp_path):
    """The second is refused while the first writes, and if it began at the same moment."""
    folder = tmp_path / "run"
    with pytest.raises(RunError, match=r"another run is writing in .*run; wait for its end"):
        folder.mkdir()
        with held(folder):
            open_run(Request(run_dir=folder), small(text))
    open_run(Request(run_dir=folder), small(text))
    with pytest.raises(RunError, match="add --resume to go on with that run"):
        open_run(Request(run_dir=folder), small(text, "train.steps=7"))
    with held(folder), pytest.raises(RunError, match="another run"), held(folder):
        pass


def test_a_folder_that_cannot_be_made_is_refused(text, tmp_path):
    """Below a file: named, with the way on."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=r"file/run cannot be written \(Not a directory\)"):
        open_run(Request(run_dir=tmp_path / "file/run"), small(text))
    with (
        pytest.raises(RunError, match=r"gone cannot be written \(No such"),
        held(tmp_path / "gone"),
    ):
        pass


def test_a_folder_inside_the_data_is_refused(text, tmp_path, monkeypatch):
    """What a run writes would be data; hidden folders are not read, so they are free."""
    monkeypatch.chdir(tmp_path)
    config = small(Path())
    for request in (Request(), Request(run_dir=Path("a/b"))):
        with pytest.raises(RunError, match=r"is inside data\.path \., so that what it writes"):
            open_run(request, config)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    open_run(Request(run_dir=Path(".runs/b")), config)


def test_data_is_checked_before_a_folder_is_made(text, tmp_path):
    """Tokens of either part beyond the vocabulary, and too little text."""
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"texts/{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"texts/{name}.txt").write_text("plain " * 40)
    config = small(tmp_path / "texts", "model.vocab=128", "data.val_fraction=0.1")
    validation: Any = feed(config, {"dp": 0}).validation  # here of text files
    (tmp_path / "texts" / validation.names[0]).write_text("\u00e9 " * 40)
    wrong = {
        "the validation part has token id 195": config,
        "tokens and one window needs": small(text, "model.seq_len=4000"),
    }
    for message, refused in wrong.items():
        with pytest.raises(DataError, match=message):
            open_run(Request(run_dir=tmp_path / "run"), refused)
    assert not (tmp_path / "run").exists()


def test_resume_needs_a_folder_and_tells_the_newest(text, tmp_path, monkeypatch):
    """--resume alone names the newest run; an empty folder starts from nothing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"--resume needs --run-dir with the run's folder$"):
        configure(Request(resume=True), None)
    open_run(Request(run_dir=Path("runs/one")), small(text))
    with pytest.raises(RunError, match="the newest is runs/one"):
        configure(Request(resume=True), None)
    (tmp_path / "empty").mkdir()
    assert configure(Request(run_dir=tmp_path / "empty", resume=True), None) == resolve(
        load("tiny"), None
    )


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        (["parallel.tp=3", "model.heads=3", "model.hidden=96"], 4, r"4 ranks cannot hold .* = 6"),
        (["parallel.tp=2", "parallel.pp=2", "parallel.dp=2"], 4, r"is 8, but there are 4 ranks"),
        (["parallel.dp=4", "train.global_batch=6"], None, r"global_batch is 6.*dp = 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_starts(overrides, world, message):
    """Row 126: each refusal names the sizes."""
    with pytest.raises(ConfigError, match=message):
        configure(Request(overrides=tuple(overrides)), world)


# values


def test_evaluation_does_not_depend_on_microbatches(text):
    """Row 11: one, two and four microbatches give the reference's mean loss of the same samples."""
    losses = []
    for count in (1, 2, 4):
        config = small(text, f"train.microbatches={count}", "precision.policy=fp64")
        job = loop.job(config)
        losses.append(finish(job.trainer.evaluate(job.trainer.init(), job.feed.evaluation())))
    settings = {name: attrs.asdict(getattr(config, name)) for name in ("model", "train", "optim")}
    expected = reference.train(settings, [job.feed.evaluation()]).losses[0]
    assert losses == pytest.approx([expected] * 3, rel=1e-12)


def test_validation_takes_the_same_samples_in_every_layout(text):
    """The rows of all dp ranks are eval_batches global batches of the fixed order."""
    seen = []
    for dp, count in ((1, 2), (2, 1), (4, 1)):
        config = small(text, f"parallel.dp={dp}", f"train.microbatches={count}")
        ranks = [feed(config, {"dp": i}) for i in range(dp)]
        rows = torch.cat([b["sample"] for rank in ranks for b in rank.evaluation()])
        seen.append(sorted(rows.tolist()))
    assert seen == [list(range(8))] * 3


def live_tensors() -> tuple[int, int]:
    """How many tensors this process holds, and their bytes."""
    gc.collect()
    alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return len(alive), sum(x.nbytes for x in alive)


def test_the_memory_of_a_step_does_not_grow(text):
    """Row 132: 20 steps, live tensors and bytes constant from step 3; parameters are plain."""
    config = small(text, "train.steps=20", "train.eval_every=5", "model.dropout=0.1")
    counts = []
    for record in loop.train(loop.job(config)):
        assert not any(x.requires_grad for x in tree.flatten(record.state.params).values())
        if record.step in (3, 4, 12, 20):
            counts.append(live_tensors())
    assert counts == [counts[0]] * 4


def test_the_state_before_a_step_can_be_kept(text):
    """donate=False leaves the old state as it was, and gives the same new one."""
    job = loop.job(small(text))
    old = job.trainer.init()
    before = {p: x.clone() for p, x in tree.flatten(old.params).items()}
    new, _ = finish(job.trainer.step(old, job.feed.step(0), donate=False))
    assert all(torch.equal(x, before[p]) for p, x in tree.flatten(old.params).items())
    again, _ = finish(job.trainer.step(old, job.feed.step(0), donate=True))
    for path, x in tree.flatten(new.params).items():
        assert torch.equal(x, tree.get(again.params, path))


# replicas


def meet(*ranks: Generator[Any, Any, None]) -> list[ReplicaError | None]:
    """Run ranks that sum over each other: each yields its summand and gets the sum."""
    ended: dict[int, ReplicaError | None] = {}
    total: Any = None
    while len(ended) < len(ranks):
        summands = []
        for number, rank in enumerate(ranks):
            try:
                summands.append(rank.send(total))
            except StopIteration:
                ended[number] = None
            except ReplicaError as error:
                ended[number] = error
        total = sum(summands)
    return [ended[number] for number in range(len(ranks))]


class Two(ProcessWorld):
    """One of two ranks whose sums the test carries over."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.device = mesh, rank, torch.device("cpu")
        self.coords = mesh.coords(rank)
        self.stage = self.coords["pp"]

    def all_reduce(self, x: Any, axes: Any, stages: Any = None, op: Any = "sum") -> Any:
        """Hand the summand over."""
        assert self.mesh.group_of(self.rank, *axes, stages=stages) == (0, 1)
        return (yield x)


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_replicas_are_compared_to_the_bit(axis, text):
    """Row 85: equal states pass; one flipped bit in one tensor is named, with its rank."""
    config = small(text, f"parallel.{axis}=2")
    layout = plan(config)
    states = []
    for rank in range(2):
        job = loop.job(small(text))
        trainer = loop.Trainer(layout, Two(layout.mesh, rank))
        del job
        states.append(trainer.init())
    worlds = [Two(layout.mesh, rank) for rank in range(2)]
    check = [check_replicas(w, layout.table, s) for w, s in zip(worlds, states, strict=True)]
    assert meet(*check) == [None, None]
    states[1].opt["adamw"]["nu"]["final_norm.weight"][3] = -0.0
    check = [check_replicas(w, layout.table, s) for w, s in zip(worlds, states, strict=True)]
    for error in meet(*check):
        assert isinstance(error, ReplicaError)
        assert "opt.adamw.nu.final_norm.weight (rank" in str(error)
        assert "params." not in str(error)


def test_fingerprints_tell_bits_shapes_and_types():
    """Equal bits of another shape or type are another tensor; strides do not matter."""
    x = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    seen = {fingerprint(y) for y in (x, x.reshape(3, 2), x.view(torch.float32), x + 1, x[:, :0])}
    assert len(seen) == 5
    assert fingerprint(x.T.contiguous().T) == fingerprint(x)


# the memory estimate


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.activation=swiglu", "model.norm=rmsnorm", "model.position=rotary"],
        ["model.dropout=0.1"],
        ["model.kv_heads=1", "model.bias=all"],
    ],
)
def test_the_activation_formula_is_near_what_is_kept(overrides, text):
    """Bytes that autograd keeps between forward and backward, within a quarter of the formula."""
    config = small(text, "model.hidden=64", "model.heads=4", "model.seq_len=64", *overrides)
    job = loop.job(config)
    state, batch = job.trainer.init(), job.feed.step(0)[0]
    params = {x.data_ptr() for x in tree.flatten(state.params).values()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    from mfun import rng

    program = job.trainer.params.program(state.params)
    key = rng.key(0, "dropout", 0) if config.model.dropout else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        layers = program.stage.layers
        flight = Flight(job.trainer.buffers(), program.paths(), len(layers))
        for i, layer in enumerate(layers):
            flight.forward(i, program, layer, batch, key)
    assert sum(kept.values()) == pytest.approx(kept_bytes(job.plan, 0), rel=0.25)


def test_the_estimate_is_exact_for_parameters_and_optimizer(text):
    """Against the tensors themselves, tied and padded ones included."""
    config = small(text, "model.vocab=257")
    job = loop.job(config)
    state = job.trainer.init()
    params = sum(x.nbytes for x in tree.flatten(state.params).values())
    estimate = account(job.plan, 0)
    assert (estimate.params, estimate.opt) == (params, 2 * params)
    assert estimate.grads == sum(b.nbytes for b in job.trainer.buffers().buffers)


# processes

FOUR = (
    "parallel.tp=2",
    "parallel.pp=2",
    "precision.policy=fp64",
    "train.steps=20",
    "train.checkpoint_every=7",
)


def start(command: list[str], folder: Path, **environ: str) -> subprocess.Popen[str]:
    """A program in the background."""
    more = {"OMP_NUM_THREADS": "1", **environ}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | more,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def settings(text: Path, *overrides: str) -> list[str]:
    """Arguments of `mfun train` for a small run."""
    return [*SMALL, f"data.path={text}", *overrides]


def test_four_ranks_equal_one_device_and_resume_after_a_signal(text, tmp_path):
    """tp2 pp2 in float64, 20 steps.

    Under torchrun: losses equal one device's to 1e-10; every rank has every number (row 58) and
    constant memory (row 132). Started alone and interrupted: saves, ends with 0, and a resume ends
    in the same bits.
    """
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    watched = tmp_path / "watched"
    watched.mkdir()
    command = [*torchrun, WORKER, "train", *settings(text, *FOUR), "--run-dir", "a"]
    whole = start(command, tmp_path, WATCH=str(watched))
    alone = ["-m", "mfun", "train", "--run-dir", "b"]
    broken = start([*alone, *settings(text, *FOUR)], tmp_path)
    rows = tmp_path / "b/metrics.jsonl"
    while broken.poll() is None and (not rows.exists() or rows.read_text().count("\n") < 4):
        time.sleep(0.02)
    broken.send_signal(signal.SIGINT)
    said, _ = broken.communicate(timeout=120)
    assert broken.returncode == 0, said
    stopped = max(checkpoint.saved(tmp_path / "b"))
    assert f"stopped by SIGTERM after step {stopped}; go on with: mfun train --run-dir b" in said
    assert 4 <= stopped < 20
    resumed = start([*alone, "--resume"], tmp_path)
    said, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    assert f"resumed after step {stopped}" in said
    said, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, said
    assert tensors(tmp_path / "a", 20) == tensors(tmp_path / "b", 20)
    assert (tmp_path / "b/loss.png").is_file()
    check_ranks(watched, metrics.read(tmp_path / "a"))
    single = small(text, *FOUR, "parallel.tp=1", "parallel.pp=1")
    one = [record.loss for record in loop.train(loop.job(single))]
    for folder in ("a", "b"):
        losses = [row["loss"] for row in metrics.read(tmp_path / folder)]
        assert losses == pytest.approx(one, rel=1e-10)


def check_ranks(watched: Path, rows: list[dict[str, Any]]) -> None:
    """All ranks have the file's numbers; tensors and bytes stand from step 3 on."""
    ranks = [json.loads((watched / f"rank-{rank}.json").read_text()) for rank in range(4)]
    for kept in (*KEYS[:5], "val_loss"):
        columns = [[row[kept] for row in rank] for rank in ranks]
        assert columns[1:] == columns[:1] * 3, kept
    assert [row["loss"] for row in ranks[3]] == [row["loss"] for row in rows]
    for rank in ranks:
        live = [(row["tensors"], row["bytes"]) for row in rank if "tensors" in row]
        assert live == [live[0]] * 4
        assert not any(row.get("wants") for row in rank)


def test_the_configuration_survives_its_text():
    """What ranks are told as TOML is what was resolved."""
    config = resolve(load("tiny"), 4)
    assert from_toml(to_toml(config)) == config

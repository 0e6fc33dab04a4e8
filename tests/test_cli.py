"""The command line: help, refusals, what --dry shows, training and sampling on one rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

from mfun import checkpoint, tree
from mfun import config as cfg
from mfun.cli import COMMANDS, main
from mfun.cli.progress import Pace, notes, step_text
from mfun.cli.text import count, duration, numbers, size
from mfun.comm import ProcessWorld
from mfun.config import PRESETS, load, resolve
from mfun.mesh import Mesh
from mfun.train import saving
from mfun.train.loop import Record
from mfun.train.plan import plan
from mfun.train.ranks import Peers, Place
from mfun.train.sampling import draw, generate, open_model
from mfun.train.step import State, Trainer

SMALL = [
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.seq_len=8",
    "parallel.tp=1",
    "parallel.pp=1",
    "train.global_batch=4",
    "train.microbatches=2",
    "train.steps=4",
    "train.eval_every=2",
    "train.malloc_tuning=false",
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of its own, one thread, and no launcher around."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "MFUN_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 30)


def mfun(*words: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, words, catch_exceptions=False)


def train(*words: str) -> Result:
    """`mfun train` of a small model."""
    return mfun("train", *SMALL, "data.path=text.txt", *words)


# help


def test_help_teaches_the_tool():
    """Commands with a line each; every preset, every most used key and examples in train's help."""
    told = mfun("--help").output
    assert all(f"\n  {name} " in told for name in COMMANDS)
    told = mfun("train", "--help").output
    assert all(re.search(rf"^ +{re.escape(name)} ", told, re.MULTILINE) for name in PRESETS)
    for word in ("--resume", "--dry", "--run-dir", "torchrun", "srun", "metrics.jsonl", "EXAMPLES"):
        assert word in told
    assert max(map(len, told.splitlines())) <= 82
    assert "--prompt" in mfun("sample", "--help").output


def test_keys_and_examples_of_the_help_are_real():
    """Each setting that the help names is one, and its examples are accepted."""
    told = mfun("train", "--help").output
    examples = re.findall(r"^ +mfun train (.*)$", told, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        words = [w for w in example.split() if "=" in w]
        source = next((w for w in example.split() if w in PRESETS), None)
        load(source, words)
    for section, keys in re.findall(r"^ +(model|parallel|train|optim)\.(.*)$", told, re.MULTILINE):
        for key in re.findall(r"\b([a-z_0-9]+)=", keys):
            assert key in cfg.SECTIONS[section].__annotations__, key


def test_commands_import_nothing_heavy_for_help():
    """Help comes at once: it does not wait for torch."""
    code = (
        "import sys; from mfun.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no command 'trian': did you mean 'train'?"),
        (["train", "lama3-8b"], "did you mean 'llama3-8b'?"),
        (["train", "model.layer=2"], "did you mean 'layers'?"),
        (["train", "modle.layers=2"], "did you mean 'model'?"),
        (["train", "parallel.tp=two"], "parallel.tp is 'two'; give a whole number of at least 1"),
        (["train", "tiny", "stps"], "'stps' is not of the form section.key=value"),
        (["train", "optim.lr=1e-3", "gpt2"], "'gpt2' is no setting: name the preset or file first"),
        (["train", "optim.lr", "1e-3"], "'optim.lr' is a setting: write optim.lr=VALUE"),
        (["train", "tiny", "steps"], "'steps' is a setting: write train.steps=VALUE"),
        (["train", "none.toml"], "none.toml does not exist: name a TOML file or a preset: tiny"),
        (["train", "--steps", "9"], "no option '--steps': write train.steps=VALUE"),
        (["train", "--optim.lr=1e-3"], "no option '--optim.lr': write optim.lr=VALUE"),
        (["train", "--global-batch=8"], "'--global-batch': write train.global_batch=VALUE"),
        (["verify", "--schedule", "1f1b"], "parallel.schedule=VALUE or optim.schedule=VALUE"),
        (["train", "--optim.lrr=1"], "no option '--optim.lrr': settings are section.key=VALUE"),
        (["train", "--resum"], "No such option '--resum'. Did you mean '--resume'"),
        (["train", "--stepz=3"], "'--help'? Settings are section.key=VALUE, without dashes."),
        (["train", "--resume"], "--resume needs --run-dir"),
        (["train", "parallel.cp=2"], "context parallelism is not built yet"),
        (["train", "precision.grads=bf16"], "precision.grads is bf16 and precision.compute is"),
        (["sample", "."], "is not a run's folder: it has no config.toml"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(words, message):
    """Refused with what was meant, exit code not 0, no traceback."""
    done = mfun(*words)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_sizes_are_refused_before_process_groups(monkeypatch):
    """Row 126: under torchrun with 4 ranks, tp 3; nothing is initialised."""
    places = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: pytest.fail("made groups"))
    done = mfun("train", "parallel.tp=3", "parallel.pp=1", "model.heads=3", "model.hidden=96")
    assert done.exit_code == 1
    assert "4 ranks cannot hold parallel.tp * cp * pp = 3 * 1 * 1 = 3 ranks" in done.output


# --dry


def test_dry_shows_everything_and_makes_nothing(tmp_path):
    """Configuration, mesh with groups, specs and reductions, buckets, timeline, memory."""
    before = sorted(tmp_path.iterdir())
    done = mfun("train", "parallel.dp=2", "model.tied=false", "--dry")
    assert done.exit_code == 0
    told = done.output
    parts = re.findall(r"^(\S[a-z ]+)$", told, re.MULTILINE)
    assert parts == ["configuration", "mesh", "parameters", "gradients", "op stream", "memory"]
    shown = told.split("\nmesh\n")[0].removeprefix("configuration\n")
    text = "\n".join(line.removeprefix("  ") for line in shown.splitlines())
    assert cfg.from_toml(text) == resolve(load("tiny", ["parallel.dp=2", "model.tied=false"]), None)
    assert "tp 2 x dp 2 x pp 2 = 8 ranks, numbered tp-cp-ep-dp-pp" in told
    assert "group dp: {0,2} {1,3} {4,6} {5,7}" in told
    assert re.search(r"blocks\.0-3\.mlp\.up +\[512, 128\] P\('tp'\) +local \[256, 128\]", told)
    assert re.search(r"head\.weight +sum over dp:2 data \(x1, each rank saw other samples\)", told)
    assert "stage 1 |  . F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3" in told
    assert re.search(r"stage 0: .* = parameters .* \+ activations .* \(2 in flight\)", told)
    assert sorted(tmp_path.iterdir()) == before


def test_dry_is_quick_for_large_layouts():
    """8 billion parameters on 64 ranks: nothing is allocated, equal blocks share a line."""
    layout = ["parallel.tp=8", "parallel.pp=4", "parallel.dp=2"]
    mfun("train", "--dry")
    started = time.process_time()
    done = mfun("train", "llama3-8b", *layout, "--dry")
    assert done.exit_code == 0
    assert time.process_time() - started < 5
    assert "8.03 G in all (8030261248)" in done.output
    assert "stage 3: ranks 48-63: blocks 24-31, head" in done.output
    assert len(re.findall(r"attn\.out ", done.output)) == 2


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_can_be_shown(name):
    """Each preset is a configuration that plans."""
    done = mfun("train", name, "--dry")
    assert done.exit_code == 0, done.output
    world = cfg.mesh(resolve(load(name), None)).world
    assert re.search(rf"\b{world} ranks?, numbered", done.output)


# training and sampling


def test_training_shows_progress_and_the_way_on(tmp_path):
    """A line a step, validation, checkpoints, the plot; the folder that it names holds the run."""
    done = train("train.log_every=2")
    assert done.exit_code == 0, done.output
    told = done.output
    assert re.search(r"^GPT of [\d.]+ k parameters, 1 rank on cpu, 4 steps, in runs/", told)
    assert re.findall(r"^step (\d)/4  loss \d", told, re.MULTILINE) == ["2", "4"]
    assert "step 2  validation loss" in told and "step 4  saved step-00000004" in told
    (folder,) = re.findall(r"mfun sample (\S+) --prompt", told)
    assert re.fullmatch(r"runs/tiny-\d{8}-\d{6}", folder)
    names = {path.name for path in Path(folder).iterdir()}
    assert names == {
        ".lock",
        "config.toml",
        "metrics.jsonl",
        "validation.jsonl",
        "loss.png",
        "checkpoints",
    }
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_a_run_goes_on_when_nobody_reads_what_it_says(tmp_path):
    """As in `mfun train | head`: all steps are done and saved."""
    words = [sys.executable, "-m", "mfun", "train", *SMALL, f"data.path={tmp_path / 'text.txt'}"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*words, "--run-dir", "run"], stdout=writer, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 0
    assert list(checkpoint.saved(Path("run")))[-1] == 4


def test_a_toml_file_is_a_configuration(tmp_path):
    """Its name is the run's; settings behind it win."""
    config = load("tiny", [*SMALL, "data.path=text.txt"])
    (tmp_path / "mine.toml").write_text(cfg.to_toml(config))
    done = mfun("train", "mine.toml", "train.steps=1", "--run-dir", "here")
    assert done.exit_code == 0, done.output
    assert "step 1/1" in done.output and Path("here/config.toml").exists()


def test_resume_and_refusals(tmp_path):
    """A finished run is left alone, a used folder is refused, --resume goes on."""
    assert train("--run-dir", "run").exit_code == 0
    done = train("--run-dir", "run")
    assert done.exit_code == 1 and "add --resume to go on with that run" in done.output
    done = mfun("train", "--run-dir", "run", "--resume")
    assert done.exit_code == 0 and "has done 4 of train.steps = 4 steps already" in done.output
    done = mfun("train", "--run-dir", "run", "--resume", "train.steps=5")
    assert done.exit_code == 0 and "resumed after step 4" in done.output
    assert re.search(r"^5 steps, 1 of them now, \d:\d\d of training", done.output, re.MULTILINE)
    os.truncate("run/checkpoints/step-00000005/rank-00000.safetensors", 999)
    done = mfun("train", "--run-dir", "run", "--resume", "train.steps=5")
    assert done.exit_code == 0 and "after step 4, since step-00000005 is damaged" in done.output
    done = mfun("train", "--run-dir", "run", "--resume", "model.layers=3")
    assert done.exit_code == 1 and "model.layers is 2 there and 3 now" in done.output
    (tmp_path / "text.txt").write_text("other text " * 100)
    done = mfun("train", "--run-dir", "run", "--resume", "train.steps=6")
    assert done.exit_code == 1 and "mfun: rank 0" in done.output and "data.hash" in done.output


def test_devices_that_are_missing_are_told_before_a_folder_is_made(monkeypatch):
    """Without a rank's name: no rank was started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = train("parallel.tp=2", "--device", "cuda")
    assert done.exit_code == 1 and not Path("runs").exists()
    assert done.output.startswith("mfun: --device cuda: 2 ranks on this machine but 1 CUDA devices")


def test_a_failure_on_one_rank_is_one_block(monkeypatch):
    """The step, the error, the last frames."""

    def broken(*args: object, **rest: object) -> None:
        raise FloatingPointError("planted")

    monkeypatch.setattr("mfun.train.step.global_norm", broken)
    done = train()
    assert done.exit_code == 1
    lines = done.output[done.output.index("mfun: rank 0") :].splitlines()
    assert (
        lines[0] == "mfun: rank 0 (tp 0, dp 0, pp 0) failed at step 1: FloatingPointError: planted"
    )
    assert 'raise FloatingPointError("planted")' in lines[4]
    assert lines[5:] == ["  (MFUN_TRACEBACK=1 shows all of the traceback)"]


def test_samples_come_from_the_newest_checkpoint():
    """Same seed, same text; it goes on from the prompt; a run without a checkpoint says so."""
    train("--run-dir", "run", "train.checkpoint_every=2")
    said = mfun("sample", "run", "--prompt", "to be", "--tokens", "12").output
    assert said.startswith("to be") and len(said) >= len("to be\n")
    assert mfun("sample", "run", "--prompt", "to be", "--tokens", "12").output == said
    other = mfun("sample", "run", "--prompt", "to be", "--tokens", "12", "--seed", "1").output
    assert other != said
    file = checkpoint.step_folder(Path("run"), 4) / "rank-00000.safetensors"
    contents = bytearray(file.read_bytes())
    contents[20] ^= 1
    file.write_bytes(contents)
    done = mfun("sample", "run")
    assert done.exit_code == 1 and "was altered after it was written" in done.output
    for folder in Path("run/checkpoints").glob("step-*"):
        (folder / "index.json").unlink()
    done = mfun("sample", "run")
    assert done.exit_code == 1 and "has no whole checkpoint yet" in done.output


class Rank(ProcessWorld):
    """The coordinates of one rank, without its processes."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.device = mesh, rank, torch.device("cpu")
        self.coords = mesh.coords(rank)
        self.stage = self.coords["pp"]


class Together(Peers):
    """Ranks that are threads of this process."""

    def __init__(self, place: Place, meeting: threading.Barrier) -> None:
        super().__init__(place)
        self.meeting = meeting

    def any(self, flag: bool) -> bool:
        """Wait for the other threads, none of which is to have failed."""
        assert not flag
        self.meeting.wait(30)
        return False


@pytest.mark.parametrize("tied", ["true", "false"])
def test_samples_do_not_depend_on_the_layout(tied, tmp_path):
    """What 8 ranks of tp4 pp2 saved is put together to what one rank has, without padding."""
    small = ["model.vocab=257", "model.heads=4", "model.kv_heads=2", "parallel.pp=2"]
    config = load("tiny", [*SMALL, *small, "parallel.tp=4", f"model.tied={tied}"])
    layout = plan(resolve(config, None))
    (tmp_path / "config.toml").write_text(cfg.to_toml(layout.config))
    meeting = threading.Barrier(layout.mesh.world)

    def save(rank: int) -> None:
        trainer = Trainer(layout, Rank(layout.mesh, rank))
        peers = Together(Place(rank=rank, world=layout.mesh.world), meeting)
        saving.save(trainer, trainer.init(), tmp_path, peers)

    with ThreadPoolExecutor(layout.mesh.world) as pool:
        list(pool.map(save, range(layout.mesh.world)))
    model = open_model(tmp_path)
    expected = Trainer(model.trainer.plan, model.trainer.world).init()
    assert tree.flatten(expected.params).keys() == tree.flatten(model.state.params).keys()
    for path, x in tree.flatten(expected.params).items():
        assert torch.equal(x, tree.get(model.state.params, path)), path
    assert len(list(generate(model, "ab", 3))) == 3


def test_drawing_follows_the_probabilities():
    """Shares of the unit interval are the softmax's; temperature and top_k act as they say."""
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0], dtype=torch.float64)
    points = (torch.arange(2000) + 0.5) / 2000
    for temperature in (0.5, 1.0, 2.0):
        drawn = torch.tensor([draw(logits, temperature, 0, float(u)) for u in points])
        shares = torch.bincount(drawn, minlength=4) / 2000
        assert torch.allclose(shares.double(), (logits / temperature).softmax(-1), atol=1e-3)
    assert {draw(logits, 1.0, 2, float(u)) for u in points} == {1, 2}
    assert {draw(logits, 0.0, 0, float(u)) for u in points} == {1}
    assert draw(logits, 1.0, 0, 0.9999999999999999) == 3


# words


def record(step: int, ms: float) -> Record:
    """A record for the display's tests."""
    return Record(step, 2.5, 1.0, 1e-3, 64, 64e3 / ms, ms, None, None, None, State(step, {}, {}))


def test_the_time_to_come_is_the_median_steps():
    """A slow first step does not frighten; the rest counts down."""
    pace = Pace(100)
    for step, ms in enumerate([9000.0, 100.0, 100.0, 110.0, 90.0], 1):
        pace.add(record(step, ms))
    assert pace.left_s == pytest.approx(9.5)
    assert pace.spent_s == pytest.approx(9.4)
    text = step_text(record(5, 100.0), 105, pace.left_s)
    assert text == "step 5/105  loss 2.5000  grad_norm 1.000  lr 1.00e-03  640 tokens/s  eta 0:10"


def test_a_skipped_step_is_shown():
    """With the loss scale it had, in the line and in a lasting note."""
    skipped = record(5, 100.0)._replace(loss_scale=65536.0, skipped=True)
    assert "  lr 1.00e-03  loss_scale 65536  640 tokens/s" in step_text(skipped, 105, 1.0)
    assert list(notes(skipped)) == ["step 5  skipped: gradients overflow at loss scale 65536"]
    assert list(notes(record(5, 100.0))) == []


def test_numbers_are_written_shortly():
    """Three digits and a suffix; bytes by 1024; ranges joined."""
    assert [count(n) for n in (0, 7, 1.5, 999, 1000, 12345, 999_500, 2e12)] == [
        *("0", "7", "1.50", "999", "1.00 k", "12.3 k", "1.00 M", "2.00 T")
    ]
    assert [size(n) for n in (0, 1023, 2**20, 1.5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 MiB",
        "1.50 TiB",
    ]
    assert [duration(s) for s in (0, 59.4, 60, 3600)] == ["0:00", "0:59", "1:00", "1:00:00"]
    assert numbers([5]) == "5" and numbers([3, 1, 2, 9]) == "1-3,9"

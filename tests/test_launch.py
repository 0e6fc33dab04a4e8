"""Starting ranks: whatever happens to one ends all, in time, with the first error shown."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
import uuid
from pathlib import Path

import attrs
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mfun.checkpoint import CheckpointError
from mfun.config import Config, ConfigError, load, mesh, resolve
from mfun.mesh import Mesh
from mfun.train import launch, ranks
from mfun.train.failure import (
    REPORTS,
    WHOLE,
    Failure,
    describe,
    first_failure,
    place_text,
    read_reports,
    report,
    report_end,
)
from mfun.train.launch import RanksFailed
from mfun.train.lifecycle import Request, open_run
from mfun.train.stop import SIGNALS, Stop

WORKER = str(Path(__file__).with_name("train_worker.py"))
SMALL = (
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.seq_len=8",
    "train.global_batch=4",
    "train.microbatches=2",
    "train.eval_every=0",
    "train.checkpoint_every=3",
    "train.steps=5",
)


def processes_with(mark: str) -> list[int]:
    """Living processes that have a mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            inside = folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if inside and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def small(folder: Path, *overrides: str) -> tuple[Config, list[str]]:
    """A small run's folder, and the arguments with which its ranks go on in it."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    config = resolve(load("tiny", [*SMALL, f"data.path={text}", *overrides]), None)
    config, run = open_run(Request(run_dir=folder / "run"), config)
    return config, ["train", "--run-dir", str(run), "--resume", "--device", "cpu"]


def fails(monkeypatch: pytest.MonkeyPatch, config: Config, arguments: list[str]) -> str:
    """Start the ranks of a run with what the environment plants; the error, all being over."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MFUN_TEST_MARK", mark)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(RanksFailed) as caught:
        launch.start(mesh(config), arguments, program=(WORKER,))
    assert processes_with(mark) == []
    return str(caught.value)


FAULTS = [
    ("forward:2", "rank 2 (tp 0, dp 0, pp 1) failed at step 3: ValueError: planted in forward"),
    ("save:2", "rank 2 (tp 0, dp 0, pp 1) failed at step 3: ValueError: planted in save"),
    ("kill:3", "rank 3 (tp 0, dp 1, pp 1) failed: killed by SIGKILL (out of memory?)"),
    *(
        pytest.param(
            f"{kind}:{rank}",
            f"rank {rank} ({where}) failed at step 3: ValueError: planted in {kind}",
            marks=pytest.mark.full,
        )
        for kind, rank, where in [
            ("loader", 1, "tp 0, dp 1, pp 0"),
            ("backward", 2, "tp 0, dp 0, pp 1"),
            ("optimizer", 3, "tp 0, dp 1, pp 1"),
            ("loader", 2, "tp 0, dp 0, pp 1"),
        ]
    ),
    pytest.param(
        "hang:3,forward:0",
        "rank 0 (tp 0, dp 0, pp 0) failed at step 3: ValueError: planted in forward",
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("fault", "first_line"), FAULTS)
def test_a_rank_that_fails_ends_all(fault, first_line, tmp_path, monkeypatch):
    """On dp2 pp2, wherever it fails at step 3: the first error with its rank, in 30 s, no child."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("STRUCK", str(tmp_path / "struck"))
    config, arguments = small(tmp_path, "parallel.tp=1", "parallel.pp=2", "parallel.dp=2")
    message = fails(monkeypatch, config, arguments)
    assert time.time() - float((tmp_path / "struck").read_text()) < 30
    assert message.splitlines()[0] == first_line
    assert ("train_worker.py" in message) == ("kill" not in fault)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3][: 2 + ("save" in fault)]


def test_replicas_that_start_apart_are_refused(tmp_path, monkeypatch):
    """dp2 with other initial weights on rank 1: the leaf and the ranks are named."""
    monkeypatch.setenv("SKEW", "1")
    config, arguments = small(tmp_path, "parallel.tp=1", "parallel.pp=1", "parallel.dp=2")
    message = fails(monkeypatch, config, arguments)
    assert "ranks that hold the same tensors hold different bits" in message
    assert "params.embed.tokens" in message and "of (0, 1)" in message


def launch_twice_over(script: str, out: Path, number: int) -> None:
    """One of several launches at the same time."""
    os.environ["OUT"] = str(out / f"{number}-")
    launch.start(Mesh(dp=2), [], program=(script,))


def test_eight_launches_at_once(tmp_path):
    """No port is given and none collides: all succeed, each with its own."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, socket\n"
        "address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "socket.create_connection(address, timeout=20).close()\n"
        "open(os.environ['OUT'] + os.environ['RANK'], 'w').write(str(address[1]))\n"
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mfun.train.launch"])
    running = [
        context.Process(target=launch_twice_over, args=(str(script), tmp_path, n)) for n in range(8)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0] * 8
    ports = [
        {(tmp_path / f"{number}-{rank}").read_text() for rank in range(2)} for number in range(8)
    ]
    assert all(len(pair) == 1 for pair in ports) and len(set.union(*ports)) == 8


@pytest.mark.parametrize("port", ["x", "-1", "65536"])
def test_a_port_that_is_none_is_refused(port, monkeypatch):
    """Named, with what to do."""
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_PORT is '{port}'; give a number below 65536"):
        launch.start(Mesh(dp=2), ["train"])


def test_a_given_port_in_use_is_an_error_at_once(monkeypatch):
    """MASTER_PORT that another program listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        started = time.monotonic()
        with pytest.raises(ConfigError, match=r"MASTER_PORT is \d+ and that port is in use"):
            launch.start(Mesh(dp=2), [], program=("-c", "pass"))
        assert time.monotonic() - started < 5


def test_a_program_that_ends_without_a_word_is_reported():
    """An exit code other than 0 is an error even when nothing was reported."""
    with pytest.raises(RanksFailed, match=r"rank \d .* ended with exit code 7 before it could say"):
        launch.start(Mesh(dp=2), [], program=("-c", "raise SystemExit(7)"))


def test_a_rank_that_had_to_be_killed_hung(tmp_path, monkeypatch):
    """Long after the others lost it; at once it would be the cause, and out of memory perhaps."""
    monkeypatch.setenv(REPORTS, str(tmp_path))
    ended = {1: ProcessFailure(1, 123, -signal.SIGKILL, "none")}
    for ago, told in ((30, "rank 1 (tp 0, dp 1, pp 0) failed: hung:"), (1, "killed by SIGKILL (")):
        lost = attrs.evolve(describe(RuntimeError("gloo"), 0, ""), time=time.time() - ago)
        report(lost)
        assert told in launch._explain(tmp_path, ended, Mesh(dp=2))


def test_every_signal_that_ranks_heed_is_passed_on():
    """Whatever SLURM, a session or a person sends to the launcher."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with launch._signals():
            for count, number in enumerate(SIGNALS, 1):
                os.kill(os.getpid(), number)
                assert wait_for(lambda count=count: heard == [signal.SIGTERM] * count)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_and_environment_are_as_before():
    """Starting ranks leaves this process's handlers and variables alone."""
    numbers = SIGNALS
    handlers, environment = [signal.getsignal(n) for n in numbers], dict(os.environ)
    launch.start(Mesh(dp=2), [], program=("-c", "pass"))
    assert [signal.getsignal(n) for n in numbers] == handlers
    assert dict(os.environ) == environment


# places


def test_place_under_torchrun():
    """torchrun's variables; several machines have local ranks of their own."""
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    here = ranks.place(environ)
    assert here == ranks.Place(rank=5, world=8, local_rank=1, local_world=4, by="torchrun")
    del environ["MASTER_PORT"]
    with pytest.raises(ConfigError, match="MASTER_PORT is not"):
        ranks.place(environ)


def test_place_under_slurm():
    """srun's variables: the first node hosts, the job's number gives the port."""
    environ = {
        "SLURM_PROCID": "6",
        "SLURM_NTASKS": "7",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "1",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "gpu[03-04],big1",
        "SLURM_TASKS_PER_NODE": "4,3",
    }
    here = ranks.place(environ)
    assert here == ranks.Place(
        rank=6,
        world=7,
        local_rank=2,
        local_world=3,
        by="slurm",
        address=("gpu03", 20000 + 123456 % 20000),
    )
    here = ranks.place(environ | {"MASTER_ADDR": "login", "MASTER_PORT": "29500"})
    assert here is not None and here.address == ("login", 29500)
    assert ranks.place(environ | {"SLURM_NTASKS": "1"}) is None
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        ranks.place({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})


def test_alone_is_no_place():
    """Without variables mfun starts its own ranks; torchrun's win over SLURM's."""
    assert ranks.place({}) is None
    both = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    here = ranks.place(both | {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"})
    assert here is not None and (here.by, here.world) == ("torchrun", 2)


def test_tasks_per_node_are_expanded():
    """`2(x3),1` is four nodes."""
    base = {"SLURM_PROCID": "0", "SLURM_NTASKS": "7", "MASTER_ADDR": "h"}
    counts = []
    for node in range(4):
        more = {"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": str(node)}
        here = ranks.place(base | more)
        assert here is not None
        counts.append(here.local_world)
    assert counts == [2, 2, 2, 1]


def test_cuda_that_is_not_there_is_refused(monkeypatch):
    """--device cuda needs a device a local rank; auto falls back to the CPU."""
    monkeypatch.setattr(ranks.torch.cuda, "device_count", lambda: 1)
    two = ranks.Place(world=2, local_world=2)
    assert ranks.device_of(two).type == "cpu"
    assert str(ranks.device_of(ranks.Place())) == "cuda:0"
    with pytest.raises(ConfigError, match="2 ranks on this machine but 1 CUDA devices"):
        ranks.device_of(two, "cuda")


def test_threads_share_the_machine(monkeypatch):
    """Cores over ranks, at least one; what the user set stands."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(ranks, "cores", lambda: 8)
    assert [ranks.threads(n) for n in (1, 3, 8, 9)] == [8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert ranks.threads(8) == 5


def test_malloc_is_tuned_on_glibc():
    """Both settings are taken; elsewhere it says so."""
    assert ranks.tune_malloc() is (os.confstr("CS_GNU_LIBC_VERSION") is not None)


# failures


def failure(rank: int, time: float, *, consequence: bool = False) -> Failure:
    """A failure for the ordering tests."""
    return Failure(
        rank=rank, where="", moment="", error="E", trace="", consequence=consequence, time=time
    )


def test_the_first_error_is_the_cause():
    """An own error before a killed rank before a rank that lost its peers; then the earliest."""
    own, later = failure(1, 5.0), failure(2, 6.0)
    lost, killed = failure(3, 1.0, consequence=True), failure(4, 2.0)
    assert first_failure([later, lost, own], [killed]) is own
    assert first_failure([lost], [killed]) is killed
    assert first_failure([lost, failure(0, 3.0, consequence=True)], []) is lost
    assert first_failure([], []) is None


def raised(error: Exception, note: str = "") -> Exception:
    """An exception with a traceback."""
    try:
        raise error
    except Exception as caught:
        if note:
            caught.add_note(note)
        return caught


def test_errors_are_described_shortly(monkeypatch):
    """Kind, message, step and last frames; a refusal is its message; all of it on demand."""
    text = describe(raised(KeyError("x"), "at step 7"), 2, "tp 0, dp 0, pp 1").block()
    assert text.startswith("rank 2 (tp 0, dp 0, pp 1) failed at step 7: KeyError: 'x'\n")
    assert "test_launch.py" in text and "raise error" in text
    assert describe(raised(ConfigError("no")), 0, "").block() == "rank 0 failed: no"
    monkeypatch.setenv(WHOLE, "1")
    assert "Traceback (most recent call last)" in describe(raised(ConfigError("no")), 0, "").block()


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (CheckpointError("x was not saved because another rank failed: see its error"), True),
        (CheckpointError("rank(s) 2 did not write their part into x"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("gloo"), False),
    ],
)
def test_lost_peers_are_told_from_causes(error, consequence):
    """What a rank says when another is gone is not the first error."""
    assert describe(raised(error), 0, "").consequence is consequence


def test_reports_come_back(tmp_path, monkeypatch):
    """What ranks leave is what the launcher reads."""
    monkeypatch.setenv(REPORTS, str(tmp_path))
    first = describe(raised(ValueError("x"), "at step 1"), 3, "tp 1")
    report(first)
    report_end(0)
    assert read_reports(tmp_path) == ([first], {0})


def test_without_a_launcher_a_rank_prints(monkeypatch, capsys, tmp_path):
    """The cause in full, a consequence in one line; torchrun gets the message too."""
    monkeypatch.delenv(REPORTS, raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report(describe(raised(ValueError("x")), 3, "tp 1"))
    report(describe(raised(RuntimeError("gloo: gone")), 4, "tp 1"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "rank 3 (tp 1) failed: ValueError: x"
    assert lines[-1].startswith("rank 4 ended because another rank did (RuntimeError: gloo")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["timestamp"]


def test_places_are_named_by_their_axes():
    """tp, dp and pp always, others where they matter."""
    assert place_text({"tp": 0, "cp": 2, "dp": 1, "pp": 0}) == "tp 0, cp 2, dp 1, pp 0"


# signals


def wait_for(condition, seconds: float = 10.0) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_signal_asks_and_a_second_one_ends():
    """The first is remembered by name; the second ends the process with its number."""
    ended: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with Stop(end=ended.append, patience=60.0) as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(lambda: stop.requested == "SIGTERM")
        stop.settle()
        os.kill(os.getpid(), signal.SIGINT)
        assert wait_for(lambda: ended == [128 + signal.SIGINT])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loop_that_does_not_come_is_not_waited_for():
    """Before it runs, and when its time is over, a signal ends the process."""
    for patience in (0.0, 0.1):
        ended: list[int] = []
        with Stop(end=ended.append, patience=patience):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert wait_for(lambda ended=ended: bool(ended))
        assert set(ended) == {128 + signal.SIGUSR1}


def test_a_slow_step_is_waited_for_longer():
    """Three steps' time, at least ten seconds; without an end once the ranks have agreed."""
    ended: list[int] = []
    with Stop(end=ended.append) as stop:
        stop.pace(0.5)
        assert stop.patience == 10.0
        stop.pace(100.0)
        assert stop.patience == 300.0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not wait_for(lambda: bool(ended), 1.0)
    with Stop(end=ended.append) as stop:
        stop.settle()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not wait_for(lambda: bool(ended), 1.0)


def test_a_signal_while_saving_waits_for_the_save_and_the_step_after_it(monkeypatch):
    """The time to come to a step's end counts from the last sign of the loop, not the signal."""
    ended: list[int] = []
    monkeypatch.setattr("mfun.train.stop.PATIENCE_S", 1.0)
    with Stop(end=ended.append) as stop:
        stop.pace(0.0)
        stop.saving()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not wait_for(lambda: bool(ended), 2.0)
        stop.pace(0.0)
        assert not wait_for(lambda: bool(ended), 0.5)
        assert wait_for(lambda: bool(ended))


def test_a_rank_ends_with_its_parent(monkeypatch):
    """When the process that started it is gone, so is the rank."""
    ended: list[int] = []
    with Stop(parent=True, end=ended.append):
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert wait_for(lambda: bool(ended))
    assert set(ended) == {1}

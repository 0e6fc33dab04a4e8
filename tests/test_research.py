"""Every research script states what it expects; here it is held to that at tiny size."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.image
import pytest
import torch
import toys
from click.testing import CliRunner
from test_pipeline import VALUES, two_tensor_model

from mfun.mesh import Mesh
from mfun.schedule import plan, simulate_time
from research import hessian_through_tp, layout_matrix, own_schedule, zero_memory
from research.bench import peers

ROOT = Path(__file__).parent.parent


def test_layout_matrix_is_rounding_only(tmp_path, monkeypatch):
    """All layouts of 2 ranks, three precisions, within the stated bounds; the figure is drawn."""
    shallow = [x.replace("layers=8", "layers=2") for x in layout_matrix.MODEL]
    monkeypatch.setattr(layout_matrix, "MODEL", shallow)
    layout_matrix.reference.cache_clear()
    rows = layout_matrix.run(2)
    layout_matrix.reference.cache_clear()
    assert [r["layout"] for r in rows[::3]] == [
        "tp1 dp1 pp2",
        "tp1 dp2 pp1",
        "tp2 dp1 pp1",
        "tp2+sp dp1 pp1",
    ]
    assert layout_matrix.as_expected(rows), rows
    for row in rows:
        u = layout_matrix.ROUNDOFF[row["policy"]]
        assert row["grads"] >= u, "no rounding seen: the reference is not independent"
    layout_matrix.plot(rows).savefig(tmp_path / "figure.png")
    assert matplotlib.image.imread(tmp_path / "figure.png").std() > 0.05


def test_layout_matrix_can_fail():
    """An error above 160 u, or one layout apart from the others, is not as expected."""
    names, policies = ("a", "b"), layout_matrix.ROUNDOFF.items()
    rows = [
        {"layout": n, "policy": p, "loss": u, "grads": 9 * u} for n in names for p, u in policies
    ]
    assert layout_matrix.as_expected(rows)
    for kind, times in (("grads", 161), ("loss", 161), ("grads", 37)):
        for i, row in enumerate(rows):
            wrong = {**row, kind: times * layout_matrix.ROUNDOFF[row["policy"]]}
            assert not layout_matrix.as_expected([*rows[:i], wrong, *rows[i + 1 :]])


def test_layouts_multiply_to_the_ranks():
    """Every layout of 8 ranks once, with and without sequence parallelism where tp > 1."""
    found = layout_matrix.layouts(8)
    assert len(found) == len(set(found)) == 16
    assert all(tp * dp * pp == 8 for tp, dp, pp, _ in found)


def test_second_derivatives_through_the_mesh():
    """Hessian-vector product and per-sample gradients equal one device."""
    errors = hessian_through_tp.run(tp=2, dp=1)
    assert set(errors) == {"hvp", "per_sample"}
    assert max(errors.values()) <= hessian_through_tp.EXPECTED, errors


def test_own_schedule_hides_latency():
    """The script's expectation holds: 63 = 3 (16 + 4 - 1) + 2 (4 - 1), and the picture is drawn."""
    out = CliRunner().invoke(own_schedule.main)
    assert out.exit_code == 0, out.output
    assert "stage 0 | F0 F1 F2 F3 F4 F5 F6 B0 F7 B1" in out.output
    assert "latency 1.0  eager  63.0" in out.output
    for latency in (0.0, 0.5, 1.0):
        assert own_schedule.run(4, 16, latency)[0] == 57 + 6 * latency


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7])
def test_own_schedule_is_checked_and_run_like_the_rest(microbatches):
    """Its stated memory is what it keeps, and its gradients are bitwise GPipe's."""
    for stages in range(1, 6):
        kept = simulate_time(plan(own_schedule.EAGER, stages, microbatches)).peak_in_flight
        assert kept == tuple(
            min(2 * (stages - stage - 1) + 1, microbatches) for stage in range(stages)
        )
    data = [[((m + 1.5, 2.0), (1, 1)) for m in range(microbatches)]]
    eager, gpipe = (
        toys.run(two_tensor_model(), [1, 1, 1], data, mesh=Mesh(pp=3), schedule=s, params=VALUES)
        for s in (own_schedule.EAGER, "gpipe")
    )
    assert eager.losses == gpipe.losses and len(eager.losses) == microbatches
    for path in ("a", "b"):
        assert torch.equal(eager.grad(path), gpipe.grad(path))


@pytest.mark.parametrize(("bound", "status"), [(zero_memory.EXPECTED, 0), (-1.0, 1)])
def test_memory_is_what_the_formula_says(bound, status, monkeypatch, tmp_path):
    """Two strategies on one and two ranks: 16 and 4 + 12/2 bytes a parameter; and it can fail."""
    monkeypatch.setattr(zero_memory, "RANKS", (1, 2))
    monkeypatch.setattr(zero_memory, "STRATEGIES", ("no_shard", "optim"))
    monkeypatch.setattr(zero_memory, "EXPECTED", bound)
    out = CliRunner().invoke(zero_memory.main, ["--out", str(tmp_path / "figure.png")])
    assert out.exit_code == status, out.output
    figures = [float(row.split()[2]) for row in out.output.splitlines()[1:5]]
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)
    assert figures[3] / figures[0] == pytest.approx(10 / 16, rel=1e-5)
    assert matplotlib.image.imread(tmp_path / "figure.png").std() > 0.05


@pytest.mark.parametrize("who", ["mfun", "peer"])
def test_bench_runs_one_device(who):
    """The benchmark's worker runs both sides of a case and reports times, memory and a loss."""
    side = peers.Side("one", who, tiny=True)
    for _ in range(peers.WARM + 1):
        side.turn()
    row = side.result()
    assert len(row["ms"]) == 1 and row["rss"] > 0 and 2 < row["loss"] < 6


@pytest.mark.parametrize(
    ("time", "memory", "status"), [(0.9, 1.0, 0), (1.01, 1.0, 1), (0.9, 1.2, 1)]
)
def test_bench_exits_by_its_expectation(time, memory, status, monkeypatch):
    """A ratio above the stated one, of time or memory, is a failure."""
    row = {"mfun_ms": 1.0, "peer_ms": 1.0, "min_ratio": 1.0, "peer": "", "expected": 1.0}
    row |= {"rounds": [time], "time_ratio": time, "cpu_ratio": 1.0, "memory_ratio": memory}
    monkeypatch.setattr(peers, "compare", lambda *_: row)
    assert CliRunner().invoke(peers.main, ["--cases", "one"]).exit_code == status


@pytest.mark.full
@pytest.mark.parametrize("case", ["dp2", "tp2", "pp2"])
def test_bench_runs_every_case(case):
    """Both sides of every parallel case run and give a ratio."""
    row = peers.compare(case, rounds=1, steps=1, tiny=True)
    assert row["time_ratio"] > 0 and row["memory_ratio"] > 0


def test_readme_python_runs():
    """Examples of README run; one prints the timeline that is shown, one trains, one is planned."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 5
    shown = []
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"print": lambda x: shown.append(str(x))})
    assert float(shown.pop(0).removeprefix("largest eigenvalue of the Hessian: ")) > 0
    grid = [line for line in text.splitlines() if line.startswith("stage ")]
    assert shown[0].splitlines() == grid
    assert all(line in shown[1] for line in text.splitlines() if "tied (x1" in line)
    losses = [float(line.partition("loss ")[2]) for line in shown[2:]]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_readme_names_every_collective():
    """README's table of collectives agrees with DUALS."""
    from mfun import DUALS

    text = (ROOT / "README.md").read_text()
    for name, rule in DUALS.items():
        row = next(x for x in text.splitlines() if f"`{name}`" in x.partition(" |")[0])
        assert rule.types in row, (name, row)

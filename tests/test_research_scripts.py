"""Every research script's stated expectation, met at tiny size, and its figure drawn."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from click.testing import CliRunner, Result

from mfun import func
from research import common, frontier, influence, mup, own_optimizer, reduction_order

FOLDER = Path(__file__).parent.parent / "research"
TINY: dict[str, str] = {
    "sharpness": "--steps 64 --every 8",
    "noise_scale": "--samples 32",
    "influence": "--examples 64",
    "own_optimizer": "--steps 6",
    "frontier": "--stages 4 --microbatches 8",
    "reduction_order": "--samples 16",
    "ensemble": "--seeds 6 --steps 6",
    "mup": "--widths 16,64 --steps 24 --batch 8",
    "meta": "--steps 10 --tests 2",
}
"""Scripts with the size that a test runs them at."""
OTHERS = {"hessian_through_tp", "layout_matrix", "own_schedule", "zero_memory"}
"""Those that tests/test_research.py runs."""


def started(name: str, tmp_path: Path) -> Result:
    """Run a script as the command line would."""
    module = importlib.import_module(f"research.{name}")
    out = tmp_path / "figure.png"
    return CliRunner().invoke(module.main, [*TINY[name].split(), "--out", str(out)])


@pytest.mark.parametrize("name", TINY)
def test_expectation_is_met(name: str, tmp_path: Path) -> None:
    """The script ends with 0 and says so, and its figure is not blank."""
    done = started(name, tmp_path)
    assert done.exit_code == 0 and "expectation held" in done.output, done.output
    assert matplotlib.image.imread(tmp_path / "figure.png").std() > 0.05


def test_expectation_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a result is not as stated the script ends with 1."""
    monkeypatch.setattr(frontier, "WHOLE", ("zbv",))
    done = started("frontier", tmp_path)
    assert done.exit_code == 1 and "expectation FAILED" in done.output


@pytest.mark.full
@pytest.mark.parametrize("name", TINY)
def test_expectation_is_met_at_full_size(name: str, tmp_path: Path) -> None:
    """As the README's figures were made."""
    module: Any = importlib.import_module(f"research.{name}")
    done = CliRunner().invoke(module.main, ["--out", str(tmp_path / "figure.png")])
    assert done.exit_code == 0, done.output


def test_readme_lists_every_script() -> None:
    """Each with its question; each picture is there, and small."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    scripts = {f.stem for f in FOLDER.glob("*.py")} - {"__init__", "common"}
    assert scripts == set(TINY) | OTHERS
    for name in scripts:
        assert f"`research/{name}.py`" in text, name
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert {Path(p).stem for p in pictures} >= set(TINY)
    for picture in pictures:
        assert (FOLDER / picture).stat().st_size < 72 * 1024, picture


@pytest.mark.parametrize("name", sorted(TINY.keys() | OTHERS))
def test_script_is_short_and_says_what_to_expect(name: str) -> None:
    """One question at its head, how to run it, what should come out; under 160 lines."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    head = source.split('"""')[1]
    assert "?" in head.splitlines()[0] and f"python -m research.{name}" in head
    assert "\nExpect: " in head and len(source.splitlines()) < 160


# ---------------------------------------------------------------------------- their parts


def test_orders_of_a_sum() -> None:
    """In bfloat16, by hand: 256 + 1 + 1 + 1 + 1 is 256 one by one, 260 where pairs come first."""
    x = torch.tensor([256.0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bfloat16).unsqueeze(1)
    assert reduction_order.in_order(x).item() == 256
    assert reduction_order.by_tree(x).item() == 262  # 256 + 6: the pair 256 + 1 is 256
    assert reduction_order.wide_sum(x).item() == 264  # 263, rounded once
    both = torch.stack([torch.arange(8.0), torch.ones(8)])
    assert torch.equal(reduction_order.ring(both), torch.arange(8.0) + 1)
    turned = torch.tensor([[256.0, 256.0], [1.0, 1.0], [1.0, 1.0]], dtype=torch.bfloat16)
    assert reduction_order.ring(turned).tolist() == [256.0, 258.0]  # the last: 1 + 1 + 256


def test_scales_of_mup() -> None:
    """Four times the width: table 8 of Yang et al., Adam."""
    assert mup.mup("blocks.0.attn.qkv", 4.0) == (0.5, 0.25)
    assert mup.mup("head.weight", 4.0) == (0.25, 0.25)
    assert mup.mup("embed.tokens", 4.0) == mup.mup("blocks.0.norm1.weight", 4.0) == (1, 1)
    assert mup.standard("head.weight", 4.0) == (0.5, 1.0)


def test_adopt_by_hand() -> None:
    """Gradients 2, 4 and 1: the first fills v; 4 / 2 is cut to 1; then 1 / sqrt(4.12)."""
    opt = own_optimizer.adopt(lr=0.1, b1=0.9, b2=0.99)
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    state, seen = opt.init(params), []
    for g in (2.0, 4.0, 1.0):
        params, state = opt.update({"w": torch.full((1,), g).double()}, state, params)
        seen.append(params["w"].item())
    assert state["v"]["w"].item() == pytest.approx(0.99 * (0.99 * 4 + 0.16) + 0.01, rel=1e-14)
    second = 0.9 * 0.1 + 0.1 / 4.12**0.5
    assert seen == pytest.approx([0.0, -0.01, -0.01 - 0.1 * second], rel=1e-12)


def test_gradients_of_samples_are_those_of_batches_of_one() -> None:
    """Each through the mesh on one data rank, against one device given the sample alone."""
    config = common.tiny({"train.global_batch": 4})
    alone = common.tiny({"parallel.tp": 1, "parallel.dp": 1, "parallel.sequence_parallel": False})
    params, batch, mean = common.start(config), common.text(config), common.mean_loss(alone)
    have = common.rows(common.sample_gradients(config, params, batch))
    for i in range(4):
        row = {name: x[i : i + 1] for name, x in batch.items()}
        want = common.flat(func.gradient(lambda p, row=row: mean(p, row), params))
        assert (have[i] - want).abs().max() <= 1e-10 * want.abs().max()
        assert torch.equal(common.flat(common.unflat(have[i], params)), have[i])


def test_solver_of_influence_is_the_inverse() -> None:
    """Of a quadratic by hand: H = diag(1, 3), so (H + decay)^-1 and tr (H + decay)^-1 H."""
    h = torch.tensor([1.0, 3.0], dtype=torch.float64)
    value = lambda p, weights: 0.5 * weights[0] * (h * p["weight"] ** 2).sum()  # noqa: E731
    head = {"weight": torch.ones(2, dtype=torch.float64)}
    solve, known = influence.solver(value, head, torch.ones(1, dtype=torch.float64))
    have = solve({"weight": torch.tensor([2.0, 2.0], dtype=torch.float64)})["weight"]
    assert have.tolist() == pytest.approx([2 / (1 + influence.DECAY), 2 / (3 + influence.DECAY)])
    assert known == pytest.approx(1 / (1 + influence.DECAY) + 3 / (3 + influence.DECAY))

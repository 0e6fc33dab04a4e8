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

from research import frontier, mup, reduction_order

FOLDER = Path(__file__).parent.parent / "research"
TINY: dict[str, str] = {
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

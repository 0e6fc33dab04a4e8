"""The theorems and the code belong together, and `python -m proofs` can fail."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mfun
from mfun.comm import DUALS
from mfun.comm.collectives import dual_of
from mfun.schedule import plan
from proofs import buckets, duals, instances, meshes, rocq, schedules, sync
from proofs.__main__ import main
from proofs.claims import Claim
from tests.faults import rule
from tests.planting import Plant, edit

ROOT = Path(mfun.__file__).parent
THEOREMS = {name: file for file, names in rocq.theorems().items() for name in names}


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of mfun, with its place."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'name', 'module')}", text


PROOFS = {
    where: re.findall(r"^Proof: (.*?)(?:\n\n|\Z)", text, re.M | re.S)
    for where, text in docstrings()
    if re.search(r"^Proof\b.*:", text, re.M)
}


@pytest.mark.parametrize("where", PROOFS)
def test_each_proof_of_a_docstring_is_a_theorem(where: str) -> None:
    """`Proof: proofs/File.v, theorem.` names what is there."""
    for text in PROOFS[where]:
        named = re.findall(r"proofs/(\w+)\.v, (\w+(?:, \w+)*)", text)
        assert named, f"{where}: {text!r} names no theorem; write proofs/File.v, theorem"
        for file, names in named:
            for name in names.split(", "):
                assert THEOREMS.get(name) == file, f"{where}: no theorem {name} in {file}.v"


@pytest.mark.parametrize("name", DUALS)
def test_each_row_of_duals_has_its_theorem(name: str) -> None:
    """The row's theorem exists, says the row, and is what the docstring names."""
    theorem = f"{name}_transpose"
    assert THEOREMS[theorem] == "Collectives"
    params = instances.PARAMS.get(name, ())
    back = instances.constructor(*dual_of(name, params))
    said = re.search(
        rf"^Theorem {theorem}\b.*?: transpose (.*)\.$", rocq.source("Collectives"), re.M
    )
    assert said
    call = instances.constructor(name, params)
    # The theorem's spelling: `transpose (Shift k) (Shift (- k))`.
    expected = [text if " " not in text else f"({text})" for text in (call, back)]
    assert said[1] == " ".join(expected).replace("%R", "")
    assert f"proofs/Collectives.v, {theorem}" in "".join(PROOFS[f"comm/collectives.py:{name}"])


def test_no_axiom_and_nothing_left_out() -> None:
    """Of all that lets Coq accept what is not proved, nothing occurs in the files."""
    for name in rocq.FILES:
        text = re.sub(r"\(\*.*?\*\)", "", rocq.source(name), flags=re.S)
        found = re.findall(
            r"\b(Admitted|admit|Axiom|Axioms|Parameter|Parameters|Conjecture|Abort|give_up"
            r"|bypass_check|Unset Guard Checking|Unset Universe Checking)\b",
            text,
        )
        assert not found, f"{name}.v: {found}"
        outside = re.split(r"^(?:Section|End) \w+\.$", text, flags=re.M)[::2]
        assert not re.search(r"^(Hypothesis|Variables?)\b", outside[0], re.M)


def test_the_readme_names_every_theorem() -> None:
    """And no other."""
    text = (Path(rocq.__file__).parent / "README.md").read_text()
    named = {name for name in re.findall(r"`(\w+)`", text) if name in THEOREMS}
    assert set(THEOREMS) == named
    assert set(re.findall(r"`(\w+)\.v`", text)) == set(rocq.FILES)
    files = {path.stem for path in Path(rocq.__file__).parent.glob("*.v")}
    assert files == set(rocq.FILES)


QUICK = {
    "duals": lambda: duals.claims(3),
    "sync": lambda: sync.claims(4),
    "buckets": lambda: buckets.claims(2),
    "meshes": lambda: meshes.claims(4),
    "schedules": lambda: schedules.claims(2, 3),
}


def failing(tier: str) -> list[Claim]:
    """The claims of a tier that do not hold."""
    plan.cache_clear()
    try:
        return [found for found in QUICK[tier]() if found.problem]
    finally:
        plan.cache_clear()


@pytest.mark.parametrize("tier", QUICK)
def test_the_real_code_is_as_claimed(tier: str) -> None:
    """On the small sizes of each tier."""
    assert not failing(tier)


PLANTED: dict[str, tuple[Plant, str]] = {
    "copy's backward is the identity": (rule("copy", "copy"), "duals"),
    "gather's backward takes its piece": (rule("gather", "split"), "duals"),
    "all_to_all's backward does not swap": (
        edit("comm.collectives:dual_of", ("(params[1], params[0])", "params")),
        "duals",
    ),
    "one warm-up forward more": (
        edit(
            "schedule.generators:one_f_one_b",
            ("sizes.stages - stage - 1", "sizes.stages - stage"),
        ),
        "schedules",
    ),
    "a backward before its forward": (
        edit(
            "schedule.generators:one_f_one_b",
            (
                "yield F(warmup + mb)\n        yield B(mb)",
                "yield B(mb)\n        yield F(warmup + mb)",
            ),
        ),
        "schedules",
    ),
    "round_up rounds down": (
        edit("flat:round_up", ("-(-n // multiple) * multiple", "n // multiple * multiple")),
        "buckets",
    ),
    "a bucket's size divides by shards times pad": (
        edit("flat:plan_buckets", ("math.lcm(shards, pad)", "shards * pad")),
        "buckets",
    ),
    "a stride that skips no axis": (
        edit("mesh:Mesh.digits", ("stride *= digits[-1].size", "stride *= 2")),
        "meshes",
    ),
    "what is averaged is added up": (
        edit("grads.finalize:finalize", ("grad if weight == 1.0 else grad * weight", "grad")),
        "sync",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_fails_its_tier(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing an entry of `DUALS`, a line of 1F1B or a formula of a bucket makes proofs fail."""
    plant, tier = PLANTED[name]
    plant(monkeypatch)
    assert failing(tier)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("copy's backward is the identity", "DUALS"),
        ("one warm-up forward more", "1F1B"),
        ("a bucket's size divides by shards times pad", "buckets"),
    ],
)
def test_the_goals_for_rocq_come_from_the_code(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The goals about the code change when it does; their model does not."""
    plan.cache_clear()
    before, _ = instances.text(what)
    PLANTED[name][0](monkeypatch)
    plan.cache_clear()
    try:
        after, _ = instances.text(what)
    except ValueError as error:  # `plan` may refuse the stream
        after = str(error)
    plan.cache_clear()
    assert after != before


def run(*tiers: str) -> tuple[int, str]:
    """`python -m proofs` from outside."""
    command = [sys.executable, "-m", "proofs", *tiers]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_command_ends_with_its_count() -> None:
    """`N passed, N failed`, and says no to a tier that is not there."""
    status, said = run("sync")
    assert status == 0 and re.search(r"^5 passed, 0 failed in \d+ s$", said, re.M)
    with pytest.raises(SystemExit, match="the tiers are rocq, duals"):
        main(["rocqs"])


def test_without_rocq_the_command_fails_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is passed over in silence."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    (found,) = rocq.claims()
    assert found.problem and "NOTHING IS PROVED" in found.problem
    assert rocq.PACKAGES in found.problem


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_rocq_accepts_every_theorem_without_an_axiom() -> None:
    """Compiled, `Print Assumptions` empty, checked by coqchk; without Rocq, a loud failure."""
    status, said = run("rocq")
    if rocq.missing():
        assert status == 1 and rocq.PACKAGES in said
        return
    count = len(rocq.FILES) + 2 + len(instances.FILES)
    assert status == 0, said
    assert f"{count} passed, 0 failed" in said
    assert f"no axioms: {len(THEOREMS)} theorems closed" in said


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_exact_checks_on_all_their_sizes() -> None:
    """As `python -m proofs` runs them."""
    status, said = run("duals", "sync", "buckets", "meshes", "schedules")
    assert status == 0, said

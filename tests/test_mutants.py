"""Generic mutants: killed ones are told from survivors, and those of layers 0-4 are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mfun import flat
from tests.forks import Job, Result, forked
from tests.mutation import ROOT, Mutant, functions_by_file, mutants, mutants_of, plant, sample
from tests.mutation_run import files_of_layers
from tests.survivors import SURVIVORS

SOURCE = '''
"""A docstring with 1 + 1."""
LIMIT: Literal[1, 2] = 3

@cached(maxsize=4)
def f(x: Array[5], y=0) -> Array[6]:
    if x > y and not on:
        raise ValueError(f"{x + 1} is more than {y}, by {x - 8}")
    if x.is_cuda:
        x = x * 2
    assert x < 9
    for _ in x:
        break
    return x - LIMIT
'''
EXPECTED = {
    "module: 3 -> 4",
    "module: 3 -> 2",
    "f: 0 -> 1",
    "f: x > y and (not on) -> x >= y and (not on)",
    "f: x > y and (not on) -> x > y or not on",
    "f: x > y and (not on) -> not (x > y and (not on))",
    "f: x > y and (not on) -> x > y and on",
    "f: break -> continue",
    "f: return x - LIMIT -> return x + LIMIT",
    "f: return x - LIMIT -> return",
}


def named(end: str) -> Mutant:
    """The mutant of flat.py whose name ends so."""
    (found,) = [one for one in mutants(ROOT / "flat.py") if one.name.endswith(end)]
    return found


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """mfun with it."""
    changed = plant(mutant, functions_by_file()[mutant.file])
    assert changed
    yield
    for fn, code in changed:
        fn.__code__ = code


def test_what_is_mutated_and_what_is_left_alone() -> None:
    """Every operator, and nothing in texts, types, decorators, assertions, errors, CUDA's part."""
    names = [one.name for one in mutants_of(SOURCE, "a.py")]
    assert {name.removeprefix("a.py ") for name in names} == EXPECTED
    assert len(names) == len(EXPECTED)


def test_a_mutant_is_planted_in_process_and_undone() -> None:
    """A known wrong one changes what is computed; undone, all is as it was."""
    (bucket,) = flat.plan_buckets([flat.Leaf("a", (100,))], shards=2)

    def halves() -> list[tuple[int, int]]:
        return [flat.shard_range(bucket, 2, i) for i in range(2)]

    with planted(named("shard_range: (i + 1) * size -> (i - 1) * size")):
        assert halves() != [(0, 64), (64, 128)]
    assert halves() == [(0, 64), (64, 128)]


def test_the_sample_is_fixed_and_survives_an_edit_elsewhere() -> None:
    """Each file with something to change has some; a mutant's name holds no line."""
    assert all(len(sample(file)) >= min(4, len(mutants(file))) for file in files_of_layers()[::12])
    before = {one.name for one in mutants_of(SOURCE, "a.py")}
    assert {one.name for one in mutants_of("import x\n\n" + SOURCE, "a.py")} == before


def test_forked_jobs_end_whatever_they_do() -> None:
    """One that says something, one that never ends, one that is wrong itself, one that dies."""
    jobs = [Job(lambda: {"a": 1}, 5), Job(lambda: _for_ever(), 1), Job(lambda: 1 // 0, 5)]
    jobs.append(Job(lambda: os.kill(os.getpid(), signal.SIGTERM), 5))
    expected = [Result("done", {"a": 1}), Result("timeout"), Result("error"), Result("died")]
    assert dict(forked(jobs)) == dict(enumerate(expected))


def _for_ever() -> None:
    while True:
        pass


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_mutants_of_layers_0_to_4_are_killed_or_judged(tmp_path: Path) -> None:
    """Survivors are those of the list, whose reasons stand there: no more, and no fewer."""
    command = [sys.executable, "-m", "tests.mutation_run", "--survivors", str(tmp_path / "left")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT.parent, env=env, capture_output=True, text=True)
    print(done.stdout[done.stdout.rfind("file     ") :])
    assert done.returncode == 0, done.stderr
    survivors = set(json.loads((tmp_path / "left").read_text()))
    assert survivors == set(SURVIVORS)

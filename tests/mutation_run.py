"""Runs mutants of layers 0 to 4 against the quick tests that reach them, and counts survivors.

    python -m tests.mutation_run                    # a sample of all files
    python -m tests.mutation_run mesh.py nn/mlp.py  # of some; every mutant of them with --every 1
    make test-full ARGS="-k mutants"                # of all, compared with tests/survivors.py

On two cores with nothing beside it, measuring 2,234 tests takes 8 minutes and 452 mutants 4 more:
426 are killed, 94 %. Survivors are judged in tests/survivors.py, or made tests/test_details.py and
tests/test_config_values.py. mutmut leaves decorated functions and modules' tables as they are, and
cosmic-ray starts an interpreter, which imports torch, for each mutant.

The tests are collected once, in a process that runs none of them; each runs in a fork. First every
test by itself, for its time and the lines that it reaches; then every mutant against the tests that
reach its statement, its module's own first, quick ones first, `BUDGET` seconds at most, up to the
first failure. A change of what runs on import is tried after importing everything again.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import coverage
import pytest
from hypothesis import Phase, settings

from tests.faults import FAULTS
from tests.forks import Job, forked
from tests.mutation import (
    APART,
    EXCLUDED,
    ROOT,
    Mutant,
    functions_by_file,
    plant,
    reload_with,
    sample,
)
from tests.properties import Property
from tests.test_layers import LAYER, names_of

BUDGET, TEST_LIMIT = 12.0, 6.0  # seconds of the tests of a mutant, and of one test
AGAIN = 3  # times as many where all is imported again: they were measured with coverage
CASES = 8  # of a test with parameters
LONGEST = 10.0  # seconds that a mutant may take more than twice what its tests take
PATIENCE = 5.0  # seconds of further cases for a mutant that survived
FILES = 6  # of tests that are collected again for a change of what runs on import
HIGHEST = 4
# Test files of the layers above, or of real processes, which a change in this one does not reach.
OTHERS = (
    "checkpoint cli convert data executor faults inspect launch layers metrics mutants pool "
    "plan_memory process_world proofs public purity research torch_facts train verify"
).split()
OPTIONS = ["-s", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
OPTIONS += ["--assert=plain", "-o", "timeout=0", "-W", "ignore:Module already imported"]
PROPERTIES = {fault.property.name: fault.property for fault in FAULTS}


@pytest.mark.parametrize("prop", PROPERTIES.values(), ids=list(PROPERTIES))
def test_property(prop: Property) -> None:
    """What the planted faults are held against (tests/faults.py)."""
    prop.check()


class Reach(NamedTuple):
    """A test, the seconds it takes and the lines of each file that it reaches."""

    item: pytest.Item
    seconds: float
    lines: dict[str, set[int]]


class Verdict(NamedTuple):
    """What became of a mutant: killed, timeout, survived, unreached by any test, or an error."""

    mutant: Mutant
    how: str


class Runner:
    """A pytest plugin that runs mutants where pytest would run the tests.

    Args:
      chosen: mutants.
      workers: processes at once.
      folder: for the tests' files.
      reach: a file with what tests reach, test -> (seconds, lines by file); made if it is not
        there, and completed.
    """

    def __init__(
        self, chosen: Sequence[Mutant], workers: int, folder: Path, reach: Path | None = None
    ) -> None:
        self.chosen, self.workers, self.folder, self.reach = chosen, workers, folder, reach
        kept = reach is not None and reach.exists()
        self.known: dict[str, Any] = json.loads(reach.read_text()) if reach and kept else {}
        self.verdicts: list[Verdict] = []
        self.failed = ""
        self.end = math.inf
        self.functions: dict[str, list[FunctionType]] = {}
        self.cases: dict[str, list[pytest.Item]] = {}

    def pytest_sessionstart(self) -> None:
        """A failing example is enough: it need not be the smallest."""
        phases = (Phase.explicit, Phase.generate)
        base = settings.get_profile("ci")
        settings.register_profile("mutants", base, phases=phases, report_multiple_bugs=False)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a test that failed."""
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtest_protocol(self) -> bool | None:
        """Past the end, a test is left out."""
        return True if time.process_time() > self.end else None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember a file that cannot be imported, or whose cases have no names."""
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} (collected)"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """First each test, then each mutant."""
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
        self.functions = functions_by_file()
        gc.freeze()  # so that forks share what there is
        started = time.monotonic()
        self.cases = _cases(item for item in session.items if _quick(item))
        items = [item for each in self.cases.values() for item in each[:CASES]]
        self.measured([item for item in items if item.nodeid not in self.known])
        _say(f"{time.monotonic() - started:5.0f} s  {len(items)} tests measured")
        if self.reach:
            self.reach.write_text(json.dumps(self.known))
        start = min(took for took, _ in self.known.values() if took)  # coverage's, alike for all
        tests = [_reach(item, start, *self.known[item.nodeid]) for item in items]
        chosen = [(one, *reaching(one, tests)) for one in self.chosen]
        jobs = [Job(lambda job=job: self.tried(*job), _limit(job[1])) for job in chosen]
        for index, result in forked(jobs, self.workers):
            mutant, reached, _ = chosen[index]
            how = {"timeout": "timeout", "died": "killed", "error": "error"}.get(result.how)
            how = how or ("killed" if result.value else "survived" if reached else "unreached")
            self.verdicts.append(Verdict(mutant, how))
            spent = f"{time.monotonic() - started:5.0f} s  {len(self.verdicts):>4}/{len(jobs)}"
            _say(f"{spent}  {how:<9} {mutant.line:>4}  {mutant.name}  {result.value or ''}")
        return True

    def measured(self, items: Sequence[pytest.Item]) -> None:
        """What each test reaches: nothing if it fails in a fork, or takes too long."""
        jobs = [Job(lambda item=item: self.measure(item), TEST_LIMIT) for item in items]
        for number, (index, result) in enumerate(forked(jobs, self.workers)):
            failed, seconds, lines = result.value or (result.how, 0.0, {})
            name = items[index].nodeid
            self.known[name] = (seconds, {} if failed else lines)
            if failed:
                _say(f"left out: {name}: {result.how}")
            if number % 200 == 0:
                _say(f"{number} tests measured of {len(items)}")

    def measure(self, item: pytest.Item) -> tuple[str, float, dict[str, list[int]]]:
        """Run one test: what failed, its time, the lines it reached."""
        reached = coverage.Coverage(data_file=None, include=[f"{ROOT}/*"], config_file=False)
        started = time.process_time()
        reached.start()
        failed = self.run([item])
        reached.stop()
        with warnings.catch_warnings(action="ignore"):  # that it reached nothing
            data = reached.get_data()
        names = {name: Path(name).relative_to(ROOT).as_posix() for name in data.measured_files()}
        lines = {short: data.lines(name) or [] for name, short in names.items()}
        return failed, time.process_time() - started, lines

    def tried(self, mutant: Mutant, tests: Sequence[Reach], reload: bool) -> str:
        """The first of the tests that fails with the mutant planted."""
        functions = self.functions.get(mutant.file, [])
        if not reload and plant(mutant, functions):
            first = [test.item for test in tests]
            return self.run(first) or self.run(self.others(first), time.process_time() + PATIENCE)
        reload_with(mutant)
        again = Runner((), 1, self.folder)
        again.end = time.process_time() + PATIENCE + sum(test.seconds for test in tests)
        items = [test.item for test in tests]
        names = list(dict.fromkeys(item.nodeid for item in [*items, *self.others(items)]))
        base = f"--basetemp={self.folder}/{os.getpid()}"
        plugins = [_Watch(again)]
        code = pytest.main([*OPTIONS, "-x", base, *names], plugins=plugins) if names else 0
        gone = code == pytest.ExitCode.USAGE_ERROR  # the name of a case has what was changed in it
        if gone and not again.failed and (names := [name for name in names if "[" not in name]):
            code = pytest.main([*OPTIONS, "-x", base, *names], plugins=plugins)
            gone = False
        return again.failed or (f"pytest ended with {int(code)}" if code and not gone else "")

    def others(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """The cases of these tests that were not measured."""
        tests = dict.fromkeys(_test(item) for item in items)
        return [item for test in tests for item in self.cases.get(test, [])[CASES:]]

    def run(self, items: Sequence[pytest.Item], end: float = math.inf) -> str:
        """Run tests up to the first that fails, and name it; or up to a time of this process."""
        for item, following in zip(items, [*items[1:], None], strict=False):
            if time.process_time() > end:
                break
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                break
        return self.failed


class _Watch:
    """The part of a runner that an ordinary run of pytest takes."""

    def __init__(self, runner: Runner) -> None:
        self.pytest_sessionstart = runner.pytest_sessionstart
        self.pytest_runtest_logreport = runner.pytest_runtest_logreport
        self.pytest_collectreport = runner.pytest_collectreport
        self.pytest_runtest_protocol = runner.pytest_runtest_protocol


def _reach(item: pytest.Item, start: float, seconds: float, lines: dict[str, list[int]]) -> Reach:
    return Reach(item, seconds - start, {file: set(numbers) for file, numbers in lines.items()})


def reaching(mutant: Mutant, tests: Sequence[Reach]) -> tuple[list[Reach], bool]:
    """The tests that reach a mutant, best first, and whether to import everything again.

    What runs on import only is reached by the tests that use its file.
    """
    here = range(mutant.lines[0], mutant.lines[1] + 1)
    reach = [test for test in tests if mutant.file in test.lines]
    exact = [test for test in reach if not test.lines[mutant.file].isdisjoint(here)]
    reload = not mutant.inside or not exact
    best = sorted(reach if reload else exact, key=lambda test: (_distance(mutant, test), test[1]))
    if reload:  # every file of tests is collected again
        best += [t for t in tests if mutant.file not in t.lines and _distance(mutant, t) < 2]
        best.sort(key=lambda test: (_distance(mutant, test), test.seconds))
        near = list(dict.fromkeys(test.item.path for test in best))[:FILES]
        best = [test for test in best if test.item.path in near]
    so_far, most = accumulate(test.seconds for test in best), BUDGET * (AGAIN if reload else 1)
    return [t for t, spent in zip(best, so_far, strict=True) if spent < most], reload


def _distance(mutant: Mutant, test: Reach) -> int:
    """How far a test's file is by its name: 0 has all of the module's, 2 nothing of it."""
    parts, named = Path(mutant.file).with_suffix("").parts, f"_{test.item.path.stem}"
    has = [f"_{part}" in named for part in parts]
    return 0 if all(has) or "_details" in named else 1 if any(has) else 2


def _limit(tests: Sequence[Reach]) -> float:
    return PATIENCE + LONGEST + 2 * sum(test.seconds for test in tests)


def _quick(item: pytest.Item) -> bool:
    """In this process, and not of a long grid."""
    ranks = "pool" in getattr(item, "fixturenames", ())
    return not ranks and item.get_closest_marker("full") is None


def _cases(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test with parameters, in an order of their own; a property is a test."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=_hash):
        cases.setdefault(_test(item), []).append(item)
    return cases


def _test(item: pytest.Item) -> str:
    name = item.nodeid.split("[")[0]
    return item.nodeid if name.endswith("::test_property") else name


def _hash(item: pytest.Item) -> bytes:
    return hashlib.blake2b(item.nodeid.encode()).digest()


def _say(line: str) -> None:
    print(line, flush=True)


def files_of_layers() -> list[Path]:
    """Every file of layers 0 to 4, but for those apart."""
    files = [file for file in sorted(ROOT.rglob("*.py")) if LAYER[names_of(file)[1]] <= HIGHEST]
    return [file for file in files if file.relative_to(ROOT).as_posix() not in APART]


def collected(files: Sequence[Path]) -> list[str]:
    """What to collect: tests that are not of other layers, the files' doctests, the properties."""
    here = Path(__file__)
    tests = [
        file
        for file in sorted(here.parent.glob("test_*.py"))
        if not any(file.stem.startswith(f"test_{other}") for other in OTHERS)
    ]
    return [str(file) for file in (*tests, *files, here)]


def report(verdicts: Sequence[Verdict]) -> str:
    """A line for each file, the score, and each survivor with its line and change."""
    counts: dict[str, Counter[str]] = {}
    for mutant, how in verdicts:
        counts.setdefault(mutant.file, Counter())[how] += 1
    total = sum(counts.values(), Counter[str]())
    kinds = ("killed", "timeout", "survived", "unreached", "error")
    rows = [
        f"{file:<32}" + "".join(f"{count[kind]:>10}" for kind in kinds)
        for file, count in (*sorted(counts.items()), ("in all", total))
    ]
    score = (total["killed"] + total["timeout"]) / max(total.total(), 1)
    left = sorted((m.file, m.line, m.name, how) for m, how in verdicts if _lives(how))
    return "\n".join(
        [
            f"{'file':<32}" + "".join(f"{kind:>10}" for kind in kinds),
            *rows,
            f"score {score:.1%}: {total['killed']} killed and {total['timeout']} timeouts of "
            f"{total.total()}; not mutated: {EXCLUDED}",
            *(f"{how} {file}:{line}  {name}" for file, line, name, how in left),
        ]
    )


def _lives(how: str) -> bool:
    return how in ("survived", "unreached", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants of the files named, or of layers 0 to 4."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.mutation_run")
    parser.add_argument("files", nargs="*", help="such as mesh.py or nn/mlp.py")
    parser.add_argument("--every", type=int, default=40, help="lines of a file for one mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--survivors", type=Path, help="a file to write their names to, as JSON")
    parser.add_argument("--only", help="mutants in whose name this pattern is")
    parser.add_argument("--reach", type=Path, help="keeps what tests reach, for another run")
    options = parser.parse_args(arguments)
    files = [ROOT / name for name in options.files] or files_of_layers()
    sizes = {"every": options.every} | ({"least": 1, "most": 10_000} if options.files else {})
    in_turn = zip_longest(*(sample(file, **sizes) for file in files))
    chosen = [mutant for each in in_turn for mutant in each if mutant]
    chosen = [mutant for mutant in chosen if re.search(options.only or "", mutant.name)]
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(chosen, options.workers, Path(folder), options.reach)
        base = f"--basetemp={folder}/tests"
        pytest.main([*OPTIONS, base, *collected(files)], plugins=[runner])
    _say(report(runner.verdicts))
    if options.survivors:
        left = [m.name for m, how in runner.verdicts if _lives(how)]
        options.survivors.write_text(json.dumps(left))
    return 0 if len(runner.verdicts) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Settings shared by every test: reproducible Hypothesis examples and one thread per process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from pool import Pool

collect_ignore = ["megatron_peer.py"]  # imports what is optional, and has no doctests

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)
    # A background job (`nohup make test &`) ignores these, and every process it starts inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real ranks over gloo, started by the first test that runs something on them."""
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that grows holds NaN: whoever reads it before writing it shows in every number."""
    import torch

    plain = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        had = self.size()
        plain(self, size)
        if size > had:
            self[had:].fill_(255)  # NaN as float64, float32, bfloat16 and float16
        return self

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The score of the planted faults (tests/faults.py), where any were run."""
    caught: dict[str, list[bool]] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for key, value in report.user_properties if report.when == "call" else ():
            if key == "planted fault":
                caught.setdefault(value[0], []).append(bool(value[2]))
    for area, each in caught.items():
        terminalreporter.write_line(
            f"planted faults, {area + ':':<16} {sum(each)}/{len(each)} caught"
        )
    if caught:
        everything = [one for each in caught.values() for one in each]
        terminalreporter.write_line(
            f"planted faults, in all:          {sum(everything)}/{len(everything)} caught"
        )

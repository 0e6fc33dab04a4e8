"""Settings shared by every test: reproducible Hypothesis examples and one thread per process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from pool import Pool

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


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real ranks over gloo, started by the first test that runs something on them."""
    ranks = Pool()
    yield ranks
    ranks.close()

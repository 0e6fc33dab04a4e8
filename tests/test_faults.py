"""The suite can fail: every planted fault is caught by a property that holds without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

from mfun.comm import DUALS
from mfun.grads import KINDS
from tests.faults import AREAS, FAULTS, ONE, Fault
from tests.planting import Stale, edit
from tests.properties import Property

ROWS = [(area, fault) for area, faults in AREAS.items() for fault in faults]


def failure(prop: Property) -> str | None:
    """What a property says when it fails, with the error's kind; None if it holds."""
    try:
        prop.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


clean = cache(failure)


@pytest.mark.parametrize(("area", "fault"), ROWS, ids=[fault.name for fault in FAULTS])
def test_planted_fault_is_caught(
    area: str,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """The property holds, fails with the fault, and says what leads to it."""
    assert clean(fault.property) is None, "the property does not hold of mfun as it is"
    fault.plant(monkeypatch)
    said = failure(fault.property)
    monkeypatch.undo()
    record_property("planted fault", (area, fault.name, said is not None))
    assert said is not None, f"SURVIVOR: {fault.name}: {fault.property.name!r} still holds"
    assert re.search(fault.says, said), f"caught, but it does not say {fault.says!r}:\n{said}"


def test_the_table_names_every_reduction_and_collective() -> None:
    """Names differ, every fault must say something, and each row of both tables has a fault."""
    assert len(FAULTS) >= 36 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.says and fault.why for fault in FAULTS)
    places = {fault.plant.where for fault in FAULTS}
    assert {f"grads.table:KINDS[{kind}]" for kind in KINDS} <= places
    assert {f"comm.collectives:DUALS[{name}]" for name in DUALS} - places == {
        "comm.collectives:DUALS[all_to_all]",  # its own dual: the fault is in `dual_of`
        "comm.collectives:DUALS[shift]",
    }


def test_a_harmless_change_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that breaks nothing is not taken for caught; undone, the function is itself."""
    from mfun.grads import GradBuffers

    code = GradBuffers.close.__code__
    edit("grads.buffers:GradBuffers.close", ("if weight != 1.0:", "if True:"))(monkeypatch)
    assert GradBuffers.close.__code__ is not code and failure(ONE) is None
    monkeypatch.undo()
    assert GradBuffers.close.__code__ is code


def test_a_fault_whose_text_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale fault raises when planted, so it can neither survive nor be caught by accident."""
    with pytest.raises(Stale, match="finalize_steps has 'no such text' 0 times"):
        edit("grads.finalize:finalize_steps", ("no such text", ""))(monkeypatch)

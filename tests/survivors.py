"""Mutants of the sample that no test kills, each judged: what they change cannot be wrong.

`make test-full ARGS="-k mutants"` fails when another one survives, which wants a test or a reason
here, and when one of these does not survive, or is no longer in the sample.
"""

from __future__ import annotations

SURVIVORS: dict[str, str] = {}

"""`python -m proofs [TIER ...]`: check everything, or the named tiers; ends with a count."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from proofs import buckets, duals, meshes, rocq, schedules, sync
from proofs.claims import Tier

TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        "rocq": rocq.claims,
        "duals": duals.claims,
        "sync": sync.claims,
        "buckets": buckets.claims,
        "meshes": meshes.claims,
        "schedules": schedules.claims,
    }
)


def main(names: Sequence[str]) -> int:
    """Run the tiers and print one line a claim.

    Args:
        names: of `TIERS`; none is all.

    Returns:
        0 if every claim holds, else 1.

    Raises:
        SystemExit: there is no tier of that name.
    """
    if unknown := [name for name in names if name not in TIERS]:
        raise SystemExit(f"no tier {unknown[0]!r}; the tiers are {', '.join(TIERS)}")
    count = {True: 0, False: 0}
    start = before = time.perf_counter()
    for name in names or TIERS:
        for says, problem in TIERS[name]():
            now = time.perf_counter()
            print(f"{'FAILED' if problem else 'ok':6} {now - before:6.1f} s  {name}: {says}")
            if problem:
                print("       " + problem.replace("\n", "\n       "))
            sys.stdout.flush()
            count[problem is None] += 1
            before = now
    print(f"{count[True]} passed, {count[False]} failed in {before - start:.0f} s")
    return 1 if count[False] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

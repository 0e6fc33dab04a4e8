"""Does a longer warm-up hide the latency of messages? Yes, and the memory for it is exactly stated.

A schedule of one's own: eager 1F1B warms up with twice the forwards of 1F1B, so that between a
forward's send and the use of its gradient there is always other work. It is a generator of a
stage's ops and a `Schedule` that says what it keeps; messages, check, picture, times and the run
(tests/test_research.py) come by themselves. The order is Zhuang et al. 2022 (arXiv 2211.05322).

Run:    python -m research.own_schedule
Expect: without latency both take (m + p - 1)(F + B). With a message as slow as a forward the eager
        one loses only 2 (p - 1) latencies, those of the first and the last microbatch, and takes
        under 80 % of 1F1B's time.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from mfun.schedule import B, Compute, Costs, F, Schedule, Sizes, plan, simulate_time, timeline

EXPECTED = 0.8


def warmup(stage: int, sizes: Sizes) -> int:
    """Twice as many forwards ahead as 1F1B."""
    return min(2 * (sizes.stages - stage - 1), sizes.microbatches)


def eager(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """Warm-up, then forward and backward in turn, then the backwards that are left."""
    ahead = warmup(stage, sizes)
    yield from map(F, range(ahead))
    for mb in range(ahead, sizes.microbatches):
        yield F(mb)
        yield B(mb - ahead)
    yield from map(B, range(sizes.microbatches - ahead, sizes.microbatches))


EAGER = Schedule("eager", eager, lambda s, n: min(warmup(s, n) + 1, n.microbatches))


def run(stages: int, microbatches: int, latency: float) -> tuple[float, float]:
    """Makespan of the eager schedule and of 1F1B in forwards, as is the latency of a message."""
    costs = Costs(F=1, B=2, latency=latency)

    def makespan(schedule: Schedule | str) -> float:
        return simulate_time(plan(schedule, stages, microbatches, costs=costs), costs).makespan

    return makespan(EAGER), makespan("1f1b")


@click.command(help=__doc__)
@click.option("--stages", default=4, show_default=True)
@click.option("--microbatches", default=16, show_default=True)
def main(stages: int, microbatches: int) -> None:
    """Command line."""
    streams = plan(EAGER, stages, min(microbatches, 8))
    print(timeline(streams))
    kept = simulate_time(streams).peak_in_flight
    print(f"most microbatches kept, by stage: {', '.join(map(str, kept))}")
    held = True
    for latency in (0.0, 0.5, 1.0):
        own, other = run(stages, microbatches, latency)
        print(
            f"latency {latency:.1f}  eager {own:5.1f}  1f1b {other:5.1f}  ratio {own / other:.3f}"
        )
        want = 3 * (microbatches + stages - 1) + 2 * (stages - 1) * latency
        held = held and own == want and (latency < 1 or own < EXPECTED * other)
    print(f"expectation {'held' if held else 'FAILED'}")
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()

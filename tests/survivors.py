"""Mutants of the sample that no test kills, each judged: what they change is not wrong.

`make test-full ARGS="-k mutants"` fails when another one survives, which wants a test or a reason
here, and when one of these does not survive, or is no longer in the sample.
"""

from __future__ import annotations

SURVIVORS: dict[str, str] = {
    "comm/kernels.py _shift: return out -> return": (
        "Real ranks alone run it, and see it (tests/test_collectives.py): the runner leaves "
        "these out."
    ),
    "comm/overlap.py start_all_gather: async_op=True -> async_op=False": (
        "On CUDA alone; the branch of the CPU has returned before."
    ),
    "comm/p2p.py Header.slot: 2 ** 31 - _TENSORS -> 2 ** 30 - _TENSORS": (
        "Fewer slots: two messages share one still less than once in 100 million."
    ),
    "comm/process.py ProcessWorld.together: async_ops=True -> async_ops=False": (
        "A backend that coalesces, NCCL's, alone takes this branch."
    ),
    "comm/world.py World.reduce_scatter: False -> True": (
        "A default in the signature of a Protocol; each world has its own."
    ),
    "host.py to_device: non_blocking=True -> non_blocking=False": "On CUDA alone.",
    "host.py to_device: return host.to(device, non_blocking=True) -> return": "On CUDA alone.",
    "host.py to_host: non_blocking=True -> non_blocking=False": "On CUDA alone.",
    "nn/dropout.py score_grid: (1, h * axis.size, s, t) -> (0, h * axis.size, s, t)": (
        "The size of a grid's first dim does not enter the index of an element."
    ),
    "nn/linear.py module: 1 << 17 -> 1 << 16": (
        "From which size on the halves of a product travel apart: time, not values."
    ),
    "optim/muon.py orthogonalise: shape[-2] <= shape[-1] -> shape[-2] < shape[-1]": (
        "Of square matrices alone, whose transpose gives the transpose, in as many operations."
    ),
    "schedule/check.py _microbatches: default=0 -> default=1": (
        "Of streams without any op: one microbatch or none, nothing is checked."
    ),
    "schedule/collective_check.py _Meetings.shown: len(ops) - 1 -> len(ops) - 2": (
        "Which of the last ops is marked where a stage has no more: a text."
    ),
    "schedule/greedy.py soonest: virtual + 1 < place.count -> virtual - 1 < place.count": (
        "What is added after the last virtual stage is not read."
    ),
    (
        "schedule/greedy_stage.py Stage.leaves_room: self.limit - (self.chunks - 1 - at) -> "
        "self.limit + (self.chunks - 1 - at)"
    ): ("A rule of a search, of which the best by time is taken, and checked: time, not validity."),
    "schedule/layer_walk.py Layers.weight: W(*item, max(due, 0)) -> W(*item, max(due, 1))": (
        "Names the op that is due where none is left: such a stream is told that an op runs twice."
    ),
    "schedule/orders.py _wave_steps: 2 * sizes.stages -> 1 * sizes.stages": (
        "Fewer microbatches than fill the pipeline: weights run in another order, which is as"
        " valid."
    ),
    "schedule/orders.py half_pattern: 3 * (sizes.stages % 2 == 0) -> 2 * (sizes.stages % 2 == 0)": (
        "When ops of the pattern would be; only their order is used, ties included, and it is"
        " checked."
    ),
    "schedule/orders.py min_pattern: sizes.stages % 3 -> sizes.stages // 3": (
        "When ops of the pattern would be; only their order is used, ties included, and it is"
        " checked."
    ),
    "schedule/rendezvous.py _Network.post: type(message) is Send -> type(message) is not Send": (
        "Sends and receives change names on both ends: the rule is symmetric in them."
    ),
    "schedule/streams.py routes: given[2] if given else -1 -> given[2] if given else -0": (
        "A virtual stage that stands where there is no message, and is not read."
    ),
    "schedule/svg.py module: (91, 143, 214) -> (92, 143, 214)": "A colour, hardly another.",
    "schedule/svg.py _legend: default=0 -> default=1": (
        "The legend of a picture without ops has no boxes."
    ),
    "schedule/zero_bubble.py _free: patience=0.5 -> patience=-0.5": (
        "One rule of a search, of which the best by time is taken, and checked: time, not validity."
    ),
    "schedule/zero_bubble.py _rules_h2: patience=1 -> patience=2": (
        "One rule of a search, of which the best by time is taken, and checked: time, not validity."
    ),
}

"""Pipeline schedules as data: a generator of ops, and everything that reads it. No torch.

`plan` gives the streams that the executor runs, `check` refuses wrong ones, `timeline` draws them.
"""

from mfun.schedule.check import Checked, check, dress, find, plan
from mfun.schedule.clock import Event, Flight, Timing, simulate_time
from mfun.schedule.collective_check import check_extras, check_order
from mfun.schedule.dual import dualpipe, dualpipev
from mfun.schedule.gather import with_gather
from mfun.schedule.generators import forward_only, gpipe, none, one_f_one_b
from mfun.schedule.layers import Buckets, bare, expand
from mfun.schedule.looped import interleaved, looped_bfs
from mfun.schedule.messages import with_p2p
from mfun.schedule.offload import with_offload
from mfun.schedule.ops import (
    AnyOp,
    B,
    Compute,
    Extra,
    F,
    Gather,
    I,
    Message,
    Offload,
    Op,
    Recompute,
    Recv,
    Reduce,
    Release,
    Reload,
    ScheduleError,
    Send,
    Tag,
    W,
)
from mfun.schedule.rendezvous import rendezvous
from mfun.schedule.sizes import Costs, Sizes
from mfun.schedule.split import merge, sends_first, split, whole
from mfun.schedule.streams import Placement, batches, gives, needs
from mfun.schedule.svg import to_svg
from mfun.schedule.table import SCHEDULES, Schedule
from mfun.schedule.timeline import grid, timeline
from mfun.schedule.torch_csv import from_csv, to_csv
from mfun.schedule.trace import to_trace
from mfun.schedule.transforms import Extras, with_extras, with_recompute, with_reduce
from mfun.schedule.zero_bubble import v_half, v_min, zb_h1, zb_h2, zb_interleaved, zbv

__all__ = [
    "SCHEDULES",
    "AnyOp",
    "B",
    "Buckets",
    "Checked",
    "Compute",
    "Costs",
    "Event",
    "Extra",
    "Extras",
    "F",
    "Flight",
    "Gather",
    "I",
    "Message",
    "Offload",
    "Op",
    "Placement",
    "Recompute",
    "Recv",
    "Reduce",
    "Release",
    "Reload",
    "Schedule",
    "ScheduleError",
    "Send",
    "Sizes",
    "Tag",
    "Timing",
    "W",
    "bare",
    "batches",
    "check",
    "check_extras",
    "check_order",
    "dress",
    "dualpipe",
    "dualpipev",
    "expand",
    "find",
    "forward_only",
    "from_csv",
    "gives",
    "gpipe",
    "grid",
    "interleaved",
    "looped_bfs",
    "merge",
    "needs",
    "none",
    "one_f_one_b",
    "plan",
    "rendezvous",
    "sends_first",
    "simulate_time",
    "split",
    "timeline",
    "to_csv",
    "to_svg",
    "to_trace",
    "v_half",
    "v_min",
    "whole",
    "with_extras",
    "with_gather",
    "with_offload",
    "with_p2p",
    "with_recompute",
    "with_reduce",
    "zb_h1",
    "zb_h2",
    "zb_interleaved",
    "zbv",
]

"""Layer 2: collectives with duals, and the worlds they run in."""

from mfun.comm.axis import Axis
from mfun.comm.collectives import (
    DUALS,
    Rule,
    all_reduce,
    all_to_all,
    broadcast,
    collect,
    copy,
    gather,
    max,
    reduce,
    reduce_scatter,
    shift,
    split,
    unsplit,
)
from mfun.comm.groups import Groups, single_groups
from mfun.comm.process import ProcessWorld, distribute
from mfun.comm.simulate import map_ranks, simulate
from mfun.comm.world import Waits, World, finish

__all__ = [
    "DUALS",
    "Axis",
    "Groups",
    "ProcessWorld",
    "Rule",
    "Waits",
    "World",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "collect",
    "copy",
    "distribute",
    "finish",
    "gather",
    "map_ranks",
    "max",
    "reduce",
    "reduce_scatter",
    "shift",
    "simulate",
    "single_groups",
    "split",
    "unsplit",
]

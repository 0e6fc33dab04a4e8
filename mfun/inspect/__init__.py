"""What checkpoints and safetensors files hold: tensors and their places, numbers, differences."""

from mfun.inspect.compare import Difference, compare
from mfun.inspect.source import Source, Whole, open_source
from mfun.inspect.statistics import Statistics, statistics
from mfun.inspect.weights import SourceError, Weight

__all__ = [
    "Difference",
    "Source",
    "SourceError",
    "Statistics",
    "Weight",
    "Whole",
    "compare",
    "open_source",
    "statistics",
]

"""The batch size while it ramps up: integers, a pure function of the samples consumed so far.

`train.rampup = [start, increment, samples]`: the batch starts at `start` and grows by `increment`
up to `train.global_batch` G, evenly over `samples` samples:

    B(consumed) = start + increment * floor(consumed / (samples / n)),  n = (G - start) / increment

and G from `samples` on. A step takes one batch whole, so the size is that at its first sample. A
microbatch keeps its size; there are fewer of them.

Source: Megatron-LM core/num_microbatches_calculator.py, rampup_batch_size.
"""

from __future__ import annotations

import attrs

from mfun.config.sections import Config, TrainConfig


def batch_size(train: TrainConfig, consumed: int) -> int:
    """Sequences of the global batch that follows `consumed` of them.

    Example:
      >>> ramp = TrainConfig(global_batch=8, rampup=(2, 2, 30))
      >>> [batch_size(ramp, n) for n in (0, 9, 10, 20, 29, 30, 1000)]
      [2, 2, 4, 6, 6, 8, 8]
    """
    if not train.rampup:
        return train.global_batch
    start, increment, samples = train.rampup
    if consumed >= samples:
        return train.global_batch
    return start + increment * (consumed * _increments(train) // samples)


def consumed(train: TrainConfig, step: int) -> int:
    """Sequences consumed by the first `step` steps; costs as much as the ramp has sizes.

    Example:
      >>> ramp = TrainConfig(global_batch=8, rampup=(2, 2, 30))
      >>> [consumed(ramp, step) for step in range(11)]
      [0, 2, 4, 6, 8, 10, 14, 18, 22, 28, 34]
    """
    total = 0
    while step and (size := batch_size(train, total)) < train.global_batch:
        _, _, samples = train.rampup
        level = total * _increments(train) // samples + 1
        end = -(-level * samples // _increments(train))  # the first sample of the next size
        steps = min(step, -(-(end - total) // size))
        total, step = total + steps * size, step - steps
    return total + step * train.global_batch


def sizes(train: TrainConfig) -> tuple[int, ...]:
    """Every size that the batch may take, ascending.

    Example:
      >>> sizes(TrainConfig(global_batch=8, rampup=(2, 3, 30))), sizes(TrainConfig(global_batch=8))
      ((2, 5, 8), (8,))
    """
    if not train.rampup:
        return (train.global_batch,)
    start, increment, _ = train.rampup
    return (*range(start, train.global_batch, increment), train.global_batch)


def at(config: Config, step: int) -> Config:
    """The configuration whose batch and microbatches are those of the step after `step` steps.

    Example:
      >>> train = TrainConfig(global_batch=8, microbatches=4, rampup=(2, 2, 30))
      >>> then = at(Config(train=train), step=5).train
      >>> then.global_batch, then.microbatches, then.rampup
      (4, 2, ())
    """
    return of_size(config, batch_size(config.train, consumed(config.train, step)))


def of_size(config: Config, size: int) -> Config:
    """The configuration of a constant batch of one of `sizes`, in microbatches as large as before.

    Example:
      >>> train = TrainConfig(global_batch=8, microbatches=4, rampup=(2, 2, 30))
      >>> of_size(Config(train=train), 6).train.microbatches
      3
    """
    train = config.train
    if not train.rampup:
        return config
    count = size * train.microbatches // train.global_batch
    then = attrs.evolve(train, global_batch=size, microbatches=count, rampup=())
    return attrs.evolve(config, train=then)


def _increments(train: TrainConfig) -> int:
    start, increment, _ = train.rampup
    return max(1, (train.global_batch - start) // increment)

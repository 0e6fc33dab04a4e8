"""Saving beside training: a thread writes a snapshot, and the ranks agree between steps.

The thread only writes this rank's own files. Whatever ranks do together, preparing a checkpoint and
giving it its name, they do between steps, in the same order everywhere: no collective runs beside
the training's. One save is under way at most; the next waits for it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import attrs

from mfun.checkpoint.writer import Agree, Order, alone, together


class Going(NamedTuple):
    """A save under way: what was asked for, the thread, and what it failed with."""

    order: Order
    thread: threading.Thread
    failure: list[BaseException]


class Background:
    """The saves of one rank.

    Args:
        agree: tells all ranks what one of them knows.
    """

    def __init__(self, agree: Agree = alone) -> None:
        self._agree = agree
        self._going: Going | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way; the same on all ranks."""
        return self._going is not None

    def start(self, order: Order) -> None:
        """Begin to save the values of now; every rank calls this. The one before must be over.

        Raises:
            CheckpointError: on every rank, if there is no place for the checkpoint.
        """
        assert self._going is None, "finish the save before first"
        together(order, [order.prepare], self._agree)
        failure: list[BaseException] = []
        taken = order.snapshot()

        def write() -> None:
            try:
                taken.write()
            except BaseException as error:  # told at the end of the next step
                failure.append(error)

        thread = threading.Thread(target=write, name=f"mfun-save-{order.step}", daemon=True)
        self._going = Going(attrs.evolve(order, tensors={}), thread, failure)
        thread.start()

    def poll(self) -> Path | None:
        """The checkpoint, if all ranks have written their part by now; every rank calls this.

        Raises:
            CheckpointError: on every rank, if the save failed on one.
        """
        if self._going is None or self._agree(self._going.thread.is_alive()):
            return None
        return self.finish()

    def finish(self) -> Path | None:
        """Wait for the save under way, if there is one; every rank calls this.

        Returns: its folder.

        Raises: as `poll`.
        """
        if self._going is None:
            return None
        order, thread, failure = self._going
        self._going = None
        thread.join()

        def written() -> None:
            if failure:
                raise failure[0]

        together(order, [written, order.commit], self._agree)
        return order.folder

    def close(self) -> None:
        """Wait for this rank's thread and leave the save unfinished, as after an error."""
        if self._going is not None:
            self._going.thread.join()
            self._going = None

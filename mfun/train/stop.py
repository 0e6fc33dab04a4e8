"""`Stop`: hears the wish to end a run, at once and whatever the main thread is doing.

A thread reads the signals from a pipe, so a rank that is stuck in a collective hears them too. The
first signal asks the loop to save and end at its next step. If there is no loop yet, or it does not
get there (a peer is gone), or at a second signal, the process ends here with 128 + the signal's
number; and if the launcher disappears, with 1.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C; torchrun, SLURM and kill; the end of a session; SLURM's early warning."""
PATIENCE_S = 10.0
SAVING_S = 600
"""Seconds that ranks have to save."""


def _end(status: int) -> None:
    os._exit(status)


class Stop:
    """Listens for signals between `with` and its end; only in a process's main thread.

    Args:
        parent: end when the process that started this one does.
        patience: seconds in which the loop must get to a step's end after a signal; 0 before it
            has told its pace.
        end: ends the process; tests give their own.
    """

    def __init__(
        self,
        *,
        parent: bool = False,
        patience: float = 0.0,
        end: Callable[[int], Any] = _end,
    ) -> None:
        self._parent = os.getppid() if parent else None
        self.patience, self._end = patience, end
        self._heard: tuple[signal.Signals, float] | None = None
        self._settled, self._moved = False, 0.0
        self._old: dict[int, Any] = {}

    @property
    def requested(self) -> str | None:
        """Name of the first signal, None so far."""
        return self._heard[0].name if self._heard else None

    def pace(self, step_s: float) -> None:
        """The loop runs, and what it does next takes so long: a slow step is waited for."""
        self.patience, self._moved = max(PATIENCE_S, 3 * step_s), time.monotonic()

    def saving(self) -> None:
        """The loop writes a checkpoint, which is not cut short."""
        self.patience, self._moved = SAVING_S, time.monotonic()

    def settle(self) -> None:
        """All ranks know and are on their way out: no more deadline."""
        self._settled = True

    def __enter__(self) -> Stop:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, _note)
        self._thread = threading.Thread(target=self._listen, name="mfun-stop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not hasattr(self, "_thread"):
            return
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _listen(self) -> None:
        """The thread: until the pipe is closed."""
        while True:
            ready, _, _ = select.select([self._read], [], [], 0.5)
            numbers = os.read(self._read, 64) if ready else None
            if numbers == b"":
                return
            for number in numbers or b"":
                self._hear(number)
            self._watch()

    def _hear(self, number: int) -> None:
        if number not in self._old:
            return
        if self._heard is None:
            self._heard = (signal.Signals(number), time.monotonic())
        else:
            self._end(128 + number)

    def _watch(self) -> None:
        """End a process that nobody waits for, or that does not come to its next step."""
        if self._parent is not None and os.getppid() != self._parent:
            self._end(1)
        if self._heard and not self._settled:
            number, since = self._heard
            if time.monotonic() - max(since, self._moved) > self.patience:
                self._end(128 + number)


def _note(number: int, frame: FrameType | None) -> None:
    """The signal is read from the pipe; this only keeps it from killing the process."""

"""Megatron-style distributed training as pure functions.

Seven rules hold in every file:

1. A function is given what it needs and returns what it made. Nothing is kept in module globals,
   hung on a model, or done behind the caller's back by a hook.
2. Code is written from one rank's point of view, on that rank's shapes. Cutting a whole tensor
   into pieces and gluing the pieces together happens at the door, from a declared spec.
3. One notion, one interface: a transform is ``(init, update)``, a layer is specs and ``apply``,
   a schedule is a stream of ops. A new feature is a new row of a table.
4. Whatever crosses ranks does so through a named collective, and each collective names the one
   that carries its gradients back.
5. Integers come first. Ranks, slices, buckets and schedules are worked out by code that never
   imports torch, so they can be enumerated, printed and proved before anything runs.
6. One device is no special case: it runs the same code on axes of size one. An independent
   reference, which shares no code with it, says what the right values are.
7. An error that has to be guessed at is a bug. A message names the argument, the key path, the
   axis, the value and what to change.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]

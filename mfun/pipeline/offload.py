"""What a layer's graph keeps, moved to the host's memory and back.

Autograd is given a place on a `Shelf` for each tensor it saves. The shelf holds whole storages, so
views of one memory are moved once and share memory again when they are back. Saved-tensor hooks do
not work under `torch.func`'s derivatives; the executor takes plain autograd's, where they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfun.host import arrived, to_device, to_host
from mfun.pipeline.pullback import Apply, Message


class Place(NamedTuple):
    """A view of the memory that is number `at` on a shelf."""

    at: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Shelf:
    """What is kept of one microbatch on one layer: all on the device, or all on the host.

    Example:
        >>> shelf, x = Shelf(), torch.ones(3)
        >>> place = shelf.put(x)
        >>> shelf.offload()
        >>> shelf.reload()
        >>> shelf.get(place), shelf.get(place).data_ptr() == x.data_ptr()
        (tensor([1., 1., 1.]), False)
    """

    def __init__(self) -> None:
        self._bytes: list[Tensor] = []
        self._at: dict[int, int] = {}  # by address, of what is on the device
        self._devices: list[torch.device] = []

    @contextmanager
    def saving(
        self, stay: Iterable[Tensor], known: Callable[[Tensor], bool] = lambda x: False
    ) -> Iterator[None]:
        """What autograd saves meanwhile is put here.

        Args:
            stay: tensors whose memory is kept in any case, as parameters.
            known: says of other tensors that they must stay where they are.
        """
        own = {x.untyped_storage().data_ptr() for x in stay}

        def pack(x: Tensor) -> Tensor | Place:
            here = x.untyped_storage().data_ptr() in own or known(x)
            return x if here else self.put(x)

        with torch.autograd.graph.saved_tensors_hooks(pack, self.get):
            yield

    def put(self, x: Tensor) -> Place:
        """Keep a tensor's memory."""
        storage = x.untyped_storage()
        at = self._at.setdefault(storage.data_ptr(), len(self._bytes))
        if at == len(self._bytes):
            everything = torch.empty(0, dtype=torch.uint8, device=x.device)
            self._bytes.append(everything.set_(storage))  # type: ignore[call-overload]
        return Place(at, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def get(self, place: Tensor | Place) -> Tensor:
        """The tensor of a place."""
        if isinstance(place, Tensor):
            return place
        memory = self._bytes[place.at].view(place.dtype)
        return memory.as_strided(place.size, place.stride, place.offset)

    def offload(self) -> None:
        """Move everything to the host."""
        self._devices = [x.device for x in self._bytes]
        self._bytes = [to_host(x) for x in self._bytes]
        self._at = {}

    def reload(self) -> None:
        """Move everything back."""
        pairs = zip(self._bytes, self._devices, strict=True)
        self._bytes = [arrived(to_device(x, device)) for x, device in pairs]
        self._at = {x.untyped_storage().data_ptr(): i for i, x in enumerate(self._bytes)}


class _StandIn(torch.autograd.Function):
    """x, whose gradient goes to a leaf of its shape that holds no memory."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        """x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Its gradient, for the leaf."""
        return grads[0], None


def without_input(apply: Apply, x: Message) -> tuple[Apply, Message]:
    """A layer and its input such that a pullback does not hold the input, as a graph's leaves do.

    Example:
        >>> square = lambda params, x: {"y": x["h"] ** 2}
        >>> layer, x = without_input(square, {"h": torch.tensor([3.0, 4.0])})
        >>> x["h"].untyped_storage().nbytes(), layer({}, x)["y"]
        (4, tensor([ 9., 16.]))
    """
    stands = {k: v.new_empty(()).expand(v.shape) for k, v in x.items()}

    def layer(params: Any, leaves: Message) -> Message:
        return apply(params, {k: _StandIn.apply(leaf, x[k]) for k, leaf in leaves.items()})

    return layer, stands

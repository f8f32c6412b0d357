"""Giving units their homes: copies are read with several reads at once, and locked pages before they are locked."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..plans.document import Reader
from ..plans.policy import Home
from ..plans.units import MIB, format_bytes
from .layout import Layout, Stored
from .machine import Machine
from .mapping import Mappings
from .pages import PageLock, Pages, merged
from .reads import FileReader, can_read
from .transport import Place, Transport, Weights, completed, fetch, filling, packed_route

_CHUNK_BYTES, _DEPTH = 4 * MIB, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The home that a unit got, and its weights there. `lock` keeps a locked one's pages."""

    home: Home
    source: Weights
    lock: PageLock | None = None


Settle = Callable[[str, Home, Layout], Settled]
"""Gives a unit, known by its label, the home that the plan says."""


class Homes:
    """Gives homes to one component's units, until it is closed.

    Args:
        mappings: the component's files.
        stored: every tensor's file and entry.
        host: where `pageable` copies are made.
        device: where `device` homes are, and for which memory is `pinned`.
    """

    def __init__(self, mappings: Mappings, stored: Stored, host: Machine, device: Machine) -> None:
        self.notes: list[str] = []
        self._mappings, self._stored, self._host, self._device = mappings, stored, host, device
        self._locked: list[Pages] = []
        self._transport: Transport | None = None
        if can_read():
            paths = sorted({header.path for header, _ in stored.values()})
            reader = FileReader(paths, reader=Reader.buffered, chunk_bytes=_CHUNK_BYTES, depth=_DEPTH)
            self._transport = Transport(device, reader)

    def settle(self, label: str, home: Home, layout: Layout) -> Settled:
        """Give a unit its home. One that cannot be locked stays mapped, with a note.

        Raises:
            ExecutionError: a file is shorter than its header says, a disk fails, or memory cannot be page-locked.
            DeviceMemoryError: the device has not enough left.
        """
        views = {span.name: self._mappings.view(span.name) for span in layout.spans}
        if home is Home.locked:
            return self._lock(label, views)
        if home is Home.mapped:
            return Settled(home=home, source=views)
        make = {Home.device: self._device.allocate, Home.pinned: self._device.pinned}.get(home, self._host.allocate)
        return Settled(home=home, source=self._copy(layout, views, make(layout.nbytes)))

    @property
    def locked_bytes(self) -> int:
        """What is locked, in whole pages."""
        return sum(stop - start for start, stop in self._locked)

    def _copy(self, layout: Layout, views: Weights, buffer: torch.Tensor) -> Weights:
        staged = buffer.device.type != "cpu"
        machine = self._device if staged else self._host
        apart = {span.name: views[span.name] for span in layout.spans if span.transformed}
        if self._transport is None:
            weights = layout.views(buffer)
            place = Place(weights=weights, fill=filling(machine, weights, views))
        else:
            if staged:
                self._transport.open()
            route = packed_route(layout, self._stored, staged=staged)
            place = completed(self._transport.place(route, self._stored, buffer), machine, apart)
        self._mappings.expect(apart)
        fetch(machine, place, (machine.mark(),))
        machine.synchronize()
        return place.weights

    def _lock(self, label: str, views: Weights) -> Settled:
        self._mappings.expect(views)
        try:
            lock = PageLock(tuple(views.values()), self._locked)
        except OSError as error:
            size = sum(view.nbytes for view in views.values())
            self.notes.append(
                f"{label} stays mapped: {format_bytes(size)} ({size} bytes) could not be locked,"
                f" {error.strerror}; the limit is {_memlock()} (ulimit -l)"
            )
            return Settled(home=Home.mapped, source=views)
        self._locked = merged((*self._locked, *lock.pages))
        return Settled(home=Home.locked, source=views, lock=lock)


def _memlock() -> str:
    with contextlib.suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return "none" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    return "not known"

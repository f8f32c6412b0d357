"""The way of one component's units to its compute device: copied from their homes, or read from their files."""

import threading
from collections.abc import Collection, Mapping

import torch

from ..plans.document import Reader
from ..plans.policy import Home
from .guards import LentWeight
from .layout import Layout, Stored
from .machine import Machine
from .mapping import Mappings
from .pages import pages_of, tells_cached
from .reads import FileReader
from .transport import Place, Route, Transport, completed, filling, leave_out, packed_route, route_in_place
from .units import Unit


class Fetcher:
    """Makes ready, and then fetches, what is not at home on the compute device.

    Units at home `mapped` are read as the plan's staging says; all others are copied whole.

    Args:
        machine: the compute device.
        stored: every tensor's file and entry.
        mappings: the files.
        reader: of the files of mapped units; null to copy them out of the mapping.
        names: of the weights in the module, by those of the checkpoint.
    """

    def __init__(
        self,
        machine: Machine,
        stored: Stored,
        mappings: Mappings,
        reader: FileReader | None,
        names: Mapping[str, str],
    ) -> None:
        self._notes: dict[str, None] = {}
        self._machine = machine
        self._stored = stored
        self._mappings = mappings
        self._names = names
        self._transport = Transport(machine, reader) if reader else None
        self._routes: dict[int, Route] = {}
        self._counting = threading.Lock()
        self._copied_bytes = 0
        self.link_bytes = 0  # Of weights, to a device that is not the host.

    @property
    def reader(self) -> Reader:
        """How mapped units are read now."""
        return self._transport.reader.reader if self._transport else Reader.mapping

    @property
    def read_bytes(self) -> dict[str, int]:
        """What was read until now, by the way; blocks are counted whole."""
        counts = {str(Reader.mapping): self._copied_bytes}
        if self._transport:
            counts |= {str(way): count for way, count in sorted(self._transport.reader.read_bytes.items())}
        return counts

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read as the plan says."""
        return (*self._notes, *(self._transport.reader.notes if self._transport else ()))

    @property
    def staging_bytes(self) -> int:
        """What buffers on the host take during the component's phase."""
        return self._transport.staging_bytes if self._transport else 0

    def open(self) -> None:
        """Make the buffers on the host."""
        if self._transport:
            self._transport.open()

    def close(self) -> None:
        """Give them back."""
        if self._transport:
            self._transport.close()

    def slot_layout(self, unit: Unit) -> Layout:
        """How a unit lies in a slot."""
        return unit.layout if (route := self._route(unit)) is None else route.layout

    def in_slot(self, unit: Unit, slot: torch.Tensor) -> Place:
        """A unit's place in a slot."""
        return self._place(unit, slot, self._route(unit))

    def packed(self, unit: Unit, buffer: torch.Tensor) -> Place:
        """A unit's place in a buffer that is as large as its packed layout."""
        transport = self._transport if unit.home is Home.mapped else None
        return self._place(
            unit, buffer, packed_route(unit.layout, self._stored, staged=transport.staged) if transport else None
        )

    def _place(self, unit: Unit, buffer: torch.Tensor, route: Route | None) -> Place:
        if route is None or self._transport is None:
            views = unit.layout.views(buffer)
            return self._counted(
                unit, Place(weights=views, fill=filling(self._machine, views, unit.source)), unit.on_file
            )
        route = leave_out(route, self._stored, frozenset(unit.replaced))
        paths, strided = {read.path for read in route.reads}, unit.strided
        read = (view for name, view in unit.on_file.items() if name not in strided)
        cached = pages_of(read) if all(map(tells_cached, paths)) else ()
        # Blocks of the file go over some of what was replaced.
        apart = {name: unit.source[name] for name in unit.source if name in strided or name in unit.replaced}
        place = completed(self._transport.place(route, self._stored, buffer, cached), self._machine, apart)
        return self._counted(unit, place, strided)

    def _counted(self, unit: Unit, place: Place, copied: Collection[str]) -> Place:
        """The place with weights to lend, which what fills it does not write to. What is filled is counted.

        Args:
            unit: what the place is of.
            place: with plain views of its buffer.
            copied: the names of weights that are copied out of the mapping.
        """
        expect, fill = self._mappings.expecting(copied), place.fill
        copied_bytes = sum(unit.source[name].nbytes for name in copied)
        linked = self._machine.device.type != "cpu"
        link_bytes = sum(span.end - span.begin for span in unit.layout.spans) if linked else 0

        def fill_and_count() -> None:
            expect()
            fill()
            with self._counting:
                self._copied_bytes += copied_bytes
                self.link_bytes += link_bytes

        weights = {name: LentWeight.of(self._names[name], view) for name, view in place.weights.items()}
        return Place(weights=weights, fill=fill_and_count)

    def home_value(self, unit: Unit, name: str) -> torch.Tensor:
        """A weight's value at home, in memory of its own on the host.

        Raises:
            ExecutionError: the file has become shorter.
        """
        if name in unit.on_file:
            self._mappings.expect((name,))
            return self._mappings.value(name)
        return unit.source[name].detach().to("cpu", copy=True)

    def _route(self, unit: Unit) -> Route | None:
        """The way into a slot; null for what is copied."""
        if self._transport is None or unit.home is not Home.mapped:
            return None
        if id(unit) not in self._routes:
            self._routes[id(unit)] = self._find_route(unit, self._transport)
        return self._routes[id(unit)]

    def _find_route(self, unit: Unit, transport: Transport) -> Route:
        if not transport.staged:
            if route := route_in_place(unit.layout, self._stored):
                return route
            note = "tensors do not lie at multiples of their dtypes' sizes in the file: read through the page cache"
            self._notes[note] = None
        return packed_route(unit.layout, self._stored, staged=transport.staged)

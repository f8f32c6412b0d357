"""Slots: buffers on the compute device that layers take turns in, filled at once or ahead of use by a reader thread.

The thread only copies. Whether a layer's weights are there is decided, and binding is done, by the thread that
computes: it waits for the copy that it needs. A copy that fails ahead of use is made once more when it is needed, and
from then on all copies are made then: a broken reader costs speed, never a value.
"""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter

import torch

from ..plans.units import KIB
from .fetching import Fetcher
from .machine import Machine, Mark
from .transport import Place, Weights, fetch
from .units import Unit

SMALL_BYTES = 64 * KIB
"""Layers below it are copied when they are needed: that takes less time than to hand them to another thread."""


class SpanKind(StrEnum):
    """What happened: weights came, the computing thread waited for them, or a layer computed."""

    fetch = "fetch"
    wait = "wait"
    compute = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that happened to a layer, by the clock `time.perf_counter`."""

    kind: SpanKind
    layer: str
    begin_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class _Taken:
    """A slot that is a layer's: its weights are `there`, or are being copied ahead of use, or nobody has begun to.

    They are there for a stream that waits for the mark that copying gave.
    """

    unit: Unit
    index: int
    place: Place
    copying: "Future[Mark] | None" = None
    there: bool = False


class Slots:
    """The slots of one component.

    Args:
        machine: the compute device.
        fetcher: brings layers to it.
        count: how many there are.
        slot_bytes: the size of each, at least that of every layer.

    `stall_s` is what the computing thread has waited for weights. Fetches and waits go to `spans` where it is a list.
    """

    def __init__(self, machine: Machine, fetcher: Fetcher, count: int, slot_bytes: int) -> None:
        self._machine = machine
        self._fetcher = fetcher
        self._count = count
        self._slot_bytes = slot_bytes
        self._buffers: list[torch.Tensor] = []
        self._used: list[Mark] = []  # By slot, the mark behind its last use.
        self._last: dict[int, Weights] = {}  # By slot, what it held last.
        self._taken: dict[int, _Taken] = {}  # By id of the unit; the oldest first.
        self._places: dict[tuple[int, int], Place] = {}  # By id of the unit and slot, made once while they are open.
        self._reader: ThreadPoolExecutor | None = None
        self._reader_broke = False
        self.stall_s = 0.0
        self.spans: list[Span] | None = None

    @property
    def nbytes(self) -> int:
        """What the slots take on the device now."""
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def reader_broke(self) -> bool:
        """Whether a copy ahead of use failed, so that none is made any more."""
        return self._reader_broke

    def units(self) -> list[Unit]:
        """The layers that are in slots, there or on their way."""
        return [taken.unit for taken in self._taken.values()]

    def open(self) -> None:
        """Make the buffers.

        Raises:
            DeviceMemoryError: the device has not enough left.
        """
        self._buffers += [self._machine.allocate(self._slot_bytes) for _ in range(self._count - len(self._buffers))]
        self._used = [self._machine.mark()] * len(self._buffers)

    def close(self) -> None:
        """Give the buffers back, when nothing is copied into them any more."""
        for unit in self.units():
            self.free(unit)
        self._machine.synchronize()
        self._places.clear()
        self._last.clear()
        self._buffers.clear()

    def weights(self, unit: Unit, busy: Collection[int]) -> Weights | None:
        """A layer's weights in a slot, complete for this thread's stream; null where every slot is busy.

        Args:
            unit: the layer.
            busy: ids of the layers in use, which keep their slots; others give way, the oldest first.
        """
        taken = self._taken.get(id(unit)) or self._take(unit, busy)
        if taken is None:
            return None
        began = perf_counter()
        self._complete(taken)
        ended = perf_counter()
        self.stall_s += ended - began
        if self.spans is not None:
            self.spans.append(Span(kind=SpanKind.wait, layer=unit.label, begin_s=began, end_s=ended))
        return taken.place.weights

    def fetch_ahead(self, unit: Unit) -> None:
        """Begin to copy a layer, if it is worth it, there is an empty slot, and the reader works."""
        if id(unit) in self._taken or len(self._taken) >= len(self._buffers) or self._reader_broke:
            return
        if unit.layout.nbytes < SMALL_BYTES:
            return
        taken = self._take(unit, ())
        if taken is not None:
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="placewise-reader")
            try:
                taken.copying = self._reader.submit(self._fetch, unit, taken.place, taken.index)
            except RuntimeError:  # The system gives no thread. The pool would keep what it was asked.
                self._reader, self._reader_broke = None, True

    def free(self, unit: Unit) -> None:
        """Empty a layer's slot. A copy into it is waited for; the next one waits for what this stream reads."""
        taken = self._taken.get(id(unit))
        if taken is None:
            return
        if taken.copying is not None:
            self._reader_broke |= taken.copying.exception() is not None
        # Not before: an interrupt of that wait must leave the slot taken, since it is still written.
        del self._taken[id(unit)]
        if taken.there:
            self._used[taken.index] = self._machine.mark()

    def forget(self, unit: Unit) -> None:
        """Empty a layer's slot, and find its ways there anew: its weights have other homes now."""
        self.free(unit)
        for key in [key for key in self._places if key[0] == id(unit)]:
            del self._places[key]

    def _take(self, unit: Unit, busy: Collection[int]) -> _Taken | None:
        full = {taken.index for taken in self._taken.values()}
        index = next((index for index in range(len(self._buffers)) if index not in full), None)
        if index is None:
            idle = next((taken for taken in self._taken.values() if id(taken.unit) not in busy), None)
            if idle is None:
                return None
            index = idle.index
            self.free(idle.unit)
        place = self._places.get((id(unit), index))
        if place is None:
            with torch.inference_mode(mode=False):
                place = self._places[id(unit), index] = self._fetcher.in_slot(unit, self._buffers[index])
        # Else a backward that has kept what was there before would take the new bytes for it.
        torch.autograd.graph.increment_version(list(self._last.get(index, {}).values()))
        self._last[index] = place.weights
        taken = _Taken(unit=unit, index=index, place=place)
        self._taken[id(unit)] = taken
        return taken

    def _complete(self, taken: _Taken) -> None:
        if taken.copying is not None:
            if taken.copying.exception() is None:
                self._machine.wait(taken.copying.result())
                taken.there = True
            else:
                self._reader_broke = True
            taken.copying = None
        if not taken.there:
            try:
                self._machine.wait(self._fetch(taken.unit, taken.place, taken.index))
            except BaseException:
                del self._taken[id(taken.unit)]
                raise
            taken.there = True

    def _fetch(self, unit: Unit, place: Place, index: int) -> Mark:
        # Not given what is taken: an error knows this frame, and would keep the memory of the slot with itself.
        spans, began = self.spans, perf_counter()
        mark = fetch(self._machine, place, (self._used[index],))
        if spans is not None:
            self._machine.reach(mark)
            spans.append(Span(kind=SpanKind.fetch, layer=unit.label, begin_s=began, end_s=perf_counter()))
        return mark

"""The planner's working state: units with a fate that is still open, and a ledger of what each axis has to bear."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..models.headers import slot_bytes_for_reads
from ..plans.document import Budget, Reader, Sharding
from ..plans.machine import Machine, MemoryKind
from ..plans.pipeline import Component, LayerSize, TracedActivations, known_peak_bytes
from ..plans.policy import Hold, Home
from ..policies.admission import CPU, locks, pins
from ..policies.selectors import Wish, Wishes
from .budgets import HOST, LOCKED, PINNED, axis_of, cacheable_bytes
from .rates import Rates
from .sharding import part_of, sharding_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Reads from the disk into slots: their way, their size in bytes, and how many are under way at once."""

    reader: Reader
    chunk_bytes: int
    depth: int

    @property
    def buffer_bytes(self) -> int:
        """Host memory that they land in, on the way to a device that is not the host's processor."""
        return self.chunk_bytes * self.depth


@dataclass(slots=True, kw_only=True)
class Unit:
    """One layer, or a component's fixed part (`stack` null).

    `bytes` as stored, `transformed` those of them that are so on the way, `packed` as it takes memory, `slot` as it
    takes a slot.
    """

    stack: str | None
    layer: int
    bytes: int
    transformed: int
    packed: int
    slot: int
    wish: Wish
    home: Home
    hold: Hold

    @property
    def moved(self) -> int:
        """Bytes that go to a device; of casts they are others than what is stored."""
        return self.packed if self.transformed else self.bytes


@dataclass(slots=True, kw_only=True)
class Draft:
    """One component on its compute device. `held_bytes` and `streamed` follow the units' holds.

    Attributes:
        overlaps: whether weights are fetched while the device computes, so that more than one slot is of use.
        pins: whether page-locked host copies are of use to the device.
        locks: whether mapped weights may be locked in memory.
        ranks: processes that share the host, and what is locked there.
        reads: how slots can be filled by reads from the disk; null where touching the mapping is as good.
        reading: whether slots are filled so.
        chunk_tokens: how many tokens token-wise modules take at once; null is all of them.
        sharding: how the component is divided over ranks, whose part the units are; null where it is not.
    """

    component: Component
    compute_device: str
    axis: str
    overlaps: bool
    pins: bool
    locks: bool
    ranks: int
    reads: Reads | None
    units: tuple[Unit, ...]
    held_bytes: int
    streamed: int
    chunk_tokens: int | None = None
    sharding: Sharding | None = None
    reading: bool = False
    granted_slots: int = 0
    granted_ahead: int = 0
    slots: int = 0
    slot_bytes: int = 0
    prefetch_layers: int = 0

    @property
    def on_cpu(self) -> bool:
        """Weights are used where they rest, or are read into slots."""
        return self.compute_device == CPU

    @property
    def streams_mapped(self) -> bool:
        """Whether any layer passes through a slot off the mapping."""
        return any(unit.home is Home.mapped and unit.hold is Hold.layer for unit in self.units)

    @property
    def reads_past_cache(self) -> bool:
        """Whether slots are filled by reads in any case: what the CPU would find in the page cache it uses in place."""
        return self.on_cpu and self.reads is not None

    def cached_bytes(self, unit: Unit, home: Home, hold: Hold) -> int:
        """What of a unit of this fate goes through the page cache: what is transformed is never read past it."""
        if home is not Home.mapped:
            return 0
        return unit.transformed if self.reads_past_cache and hold is Hold.layer else unit.bytes

    def phase_bytes(self, axis: str) -> int:
        """What the component's phase adds on an axis to what is always there.

        Unknown activations are covered by the reserve, and the verdict says so.
        """
        buffers = self.reads.buffer_bytes if self.reads and self.reading and not self.on_cpu and axis == HOST else 0
        if axis != self.axis:
            return buffers
        slots = self.slots * self.slot_bytes if self.streamed else 0
        return self.held_bytes + slots + self.pass_bytes() + buffers

    def pass_bytes(self) -> int:
        """What a pass adds whatever is held: activations, and what is gathered of other ranks' parts.

        Activations that are unknown are none here: the reserve covers them, and the verdict says so.
        """
        gathered = self.sharding.gathered_bytes if self.sharding else 0
        activations = self.component.activations
        if self.chunk_tokens is not None and isinstance(activations, TracedActivations):
            chunked = (each.peak_bytes for each in activations.chunked if each.chunk_tokens == self.chunk_tokens)
            return gathered + next(chunked)
        return gathered + (known_peak_bytes(activations) or 0)

    def rests_on(self, home: Home) -> tuple[str, ...]:
        """The axes that bear a unit for good; none bears what stays mapped."""
        match home:
            case Home.device:
                return (self.axis,)
            case Home.pageable:
                return (HOST,)
            case Home.pinned:
                return (HOST, PINNED)
            case Home.locked:
                return (LOCKED,)
            case Home.mapped:
                return ()

    def grant_slots(self, slots: int, ahead: int) -> None:
        """Allow so many slots, and so many layers fetched ahead; `fit_slots` takes what is of use."""
        self.granted_slots, self.granted_ahead = slots, ahead
        self.fit_slots()

    def fit_slots(self) -> None:
        """Slots as large as the largest layer that passes through them, and no more than are granted or needed."""
        self.slot_bytes = max((unit.slot for unit in self.units if unit.hold is Hold.layer), default=0)
        self.slots = min(self.granted_slots, self.streamed)
        self.prefetch_layers = max(0, min(self.granted_ahead, self.slots - 1))


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What each axis has to bear: bytes held always, and in each component's phase what that adds.

    Locked bytes are counted whole, and the host bears this rank's part of them: the pages are the same for all.
    `cacheable_bytes` are what it may bear of hard bytes and mapped pages that stay.
    """

    budgets: dict[str, Budget]
    drafts: tuple[Draft, ...]
    always: dict[str, int]
    ranks: int
    cacheable_bytes: int

    def rests(self, axis: str) -> int:
        """Bytes on an axis whatever computes."""
        shared = -(-self.always[LOCKED] // self.ranks) if axis == HOST else 0
        return self.always[axis] + shared

    def needs(self, axis: str, draft: Draft) -> int:
        """Bytes on an axis while a component computes."""
        return self.rests(axis) + draft.phase_bytes(axis)

    def peak(self, axis: str) -> int:
        """The highest sum over all phases."""
        return max((self.needs(axis, draft) for draft in self.drafts), default=self.rests(axis))

    def left(self, axis: str) -> int:
        """Usable bytes beyond the peak; negative when the axis is short."""
        return self.budgets[axis].usable_bytes - self.peak(axis)

    def short(self) -> list[str]:
        """The measured axes whose peak is over their budget."""
        return [
            axis
            for axis, each in sorted(self.budgets.items())
            if each.available_bytes is not None and self.left(axis) < 0
        ]

    def move(self, draft: Draft, unit: Unit, home: Home, hold: Hold) -> None:
        """Give a unit another home and hold, and charge the difference."""
        self._charge(draft, unit, -1)
        unit.home, unit.hold = home, hold
        self._charge(draft, unit, +1)

    def _charge(self, draft: Draft, unit: Unit, sign: int) -> None:
        for axis in draft.rests_on(unit.home):
            self.always[axis] += sign * unit.packed
        if unit.hold is Hold.phase:
            draft.held_bytes += sign * unit.packed
        draft.streamed += sign * (unit.hold is Hold.layer)

    def asks_of(self, axis: str, draft: Draft) -> int:
        """What a component needs of an axis in its own phase, other components left out."""
        axes = (axis, LOCKED) if axis == HOST else (axis,)
        return draft.phase_bytes(axis) + sum(
            unit.packed for unit in draft.units if set(axes) & set(draft.rests_on(unit.home))
        )


def ledger_of(drafts: tuple[Draft, ...], budgets: dict[str, Budget], ranks: int) -> Ledger:
    """The ledger of what the drafts hold already."""
    always = dict.fromkeys((*budgets, PINNED, LOCKED), 0)
    for draft in drafts:
        for unit in draft.units:
            for axis in draft.rests_on(unit.home):
                always[axis] += unit.packed
    cacheable = cacheable_bytes(budgets[HOST], (draft.component for draft in drafts), ranks)
    return Ledger(budgets=budgets, drafts=drafts, always=always, ranks=ranks, cacheable_bytes=cacheable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a component computes, and how many tokens its token-wise modules take at once; null is all of them."""

    device: str
    chunk_tokens: int | None = None


def draft_of(
    component: Component,
    seat: Seat,
    machine: Machine,
    wishes: Wishes,
    rates: Mapping[str, Rates],
    budgets: Mapping[str, Budget],
    ranks: int,
) -> Draft:
    """A component with nothing held beyond a pass: the fixed part for the phase, each layer for its own turn.

    Of a sharded one the units are one rank's part, and their fates are settled.
    """
    on_cpu = seat.device == CPU
    network = machine.disk is not None and machine.disk.network
    reads = reads_of(rates[seat.device], network=network, on_cpu=on_cpu)
    axis, wish = axis_of(seat.device, machine), wishes.of(component.name, None)
    sharding = sharding_of(component, wish, budgets[axis].usable_bytes, ranks)
    placed = component if sharding is None else part_of(component)
    units = tuple(_units(placed, wishes, on_cpu=on_cpu, reads=reads is not None))
    for unit in units if sharding is not None else ():
        _settle_part(unit)
    accelerators = [each for each in machine.accelerators if each.device == seat.device]
    return Draft(
        component=component,
        compute_device=seat.device,
        axis=axis,
        # Unified memory has no second copy to make. The host's processor computes while its disk reads.
        overlaps=any(each.streams and each.memory is MemoryKind.separate for each in accelerators)
        or (on_cpu and reads is not None),
        pins=any(map(pins, accelerators)),
        locks=locks(machine),
        ranks=ranks,
        reads=reads,
        units=units,
        held_bytes=sum(unit.packed for unit in units if unit.hold is Hold.phase),
        streamed=sum(unit.hold is Hold.layer for unit in units),
        chunk_tokens=seat.chunk_tokens,
        sharding=sharding,
    )


_NETWORK_READS = Reads(reader=Reader.buffered, chunk_bytes=4 << 20, depth=4)
"""A network file system is never read page by page, even where nobody measured how fast it is."""


def reads_of(rates: Rates, *, network: bool, on_cpu: bool) -> Reads | None:
    """The fastest measured reads. A device takes them if they beat page faults; the CPU's run beside its compute."""
    disk = rates.disk
    if disk is None:
        return _NETWORK_READS if network else None
    if not on_cpu and not network and disk.bytes_per_s <= (rates.fault_bytes_per_s or 0):
        return None
    return Reads(reader=Reader(disk.mode.value), chunk_bytes=disk.chunk_bytes, depth=disk.depth)


def _units(component: Component, wishes: Wishes, *, on_cpu: bool, reads: bool) -> Iterator[Unit]:
    wish = wishes.of(component.name, None)
    if component.fixed_bytes:
        packed, transformed = component.fixed_packed_bytes, component.fixed_transformed_bytes
        home, hold = _first_fate(None, packed, transformed, wish, on_cpu=on_cpu)
        yield Unit(
            stack=None,
            layer=0,
            bytes=component.fixed_bytes,
            transformed=transformed,
            packed=packed,
            slot=packed,
            wish=wish,
            home=home,
            hold=hold,
        )
    for stack in component.stacks:
        wish = wishes.of(component.name, stack.name)
        for size in stack.sizes:
            stored, packed, transformed = size.layer_bytes, size.packed_bytes, size.transformed_bytes
            slot = read_slot_bytes(size, stack.extents) if on_cpu and reads else packed
            home, hold = _first_fate(stack.name, packed, transformed, wish, on_cpu=on_cpu)
            for layer in range(*size.layers):
                yield Unit(
                    stack=stack.name,
                    layer=layer,
                    bytes=stored,
                    transformed=transformed,
                    packed=packed,
                    slot=slot,
                    wish=wish,
                    home=home,
                    hold=hold,
                )


def read_slot_bytes(size: LayerSize, extents: int) -> int:
    """A slot that a layer is read into as it is stored, with what is transformed packed behind.

    Where a file's layout does not serve, layers are packed into their slots after all.
    """
    as_stored = size.layer_bytes - size.transformed_bytes
    behind = size.packed_bytes - as_stored if size.transformed_bytes else 0
    return max(size.packed_bytes, slot_bytes_for_reads(as_stored, extents) + behind)


def _settle_part(unit: Unit) -> None:
    """A part rests on the device, or on the host until its layer is gathered; nothing else is open to it."""
    if unit.packed and unit.wish.home is Home.pageable:
        unit.hold = Hold.phase if unit.stack is None else Hold.layer
    else:
        unit.home, unit.hold = Home.device, Hold.always
    unit.wish = replace(unit.wish, home=unit.home, hold=unit.hold)


def _first_fate(stack: str | None, packed: int, transformed: int, wish: Wish, *, on_cpu: bool) -> tuple[Home, Hold]:
    """What takes the least memory of what the overrides leave open."""
    home = wish.home or Home.mapped
    if packed == 0:
        # Nothing to move: no bytes fit anywhere, always.
        return Home.device, Hold.always
    if on_cpu and not transformed:
        return home, Hold.layer if wish.hold is Hold.layer and stack is not None else Hold.always
    if home is Home.device or wish.hold is Hold.always:
        return Home.device, Hold.always
    return home, Hold.phase if stack is None else wish.hold or Hold.layer

"""The planner's working state: units with a fate that is still open, and a ledger of what each axis has to bear."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..plans.document import Budget
from ..plans.machine import Machine, MemoryKind
from ..plans.pipeline import Component, known_peak_bytes
from ..plans.policy import Hold, Home
from ..policies.admission import CPU, default_device
from ..policies.selectors import Wish, Wishes
from .budgets import HOST, axis_of


@dataclass(slots=True, kw_only=True)
class Unit:
    """One layer, or a component's fixed part (`stack` null). `bytes` as stored, `packed` as it takes memory."""

    stack: str | None
    layer: int
    bytes: int
    packed: int
    wish: Wish
    home: Home
    hold: Hold


@dataclass(slots=True, kw_only=True)
class Draft:
    """One component on its compute device. `held_bytes` and `streamed` follow the units' holds.

    `overlaps` says whether the device copies while it computes, so that more than one slot is of use.
    """

    component: Component
    compute_device: str
    axis: str
    overlaps: bool
    units: tuple[Unit, ...]
    held_bytes: int
    streamed: int
    granted_slots: int = 0
    granted_ahead: int = 0
    slots: int = 0
    slot_bytes: int = 0
    prefetch_layers: int = 0

    @property
    def on_cpu(self) -> bool:
        """Weights are used where they rest."""
        return self.compute_device == CPU

    def phase_bytes(self) -> int:
        """What the component's phase adds on its axis to what is always there.

        Unknown activations are covered by the reserve, and the verdict says so.
        """
        slots = self.slots * self.slot_bytes if self.streamed else 0
        return self.held_bytes + slots + self.activation_bytes()

    def activation_bytes(self) -> int:
        """Known activation bytes of one pass; zero where unknown: the reserve covers them, and the verdict says so."""
        return known_peak_bytes(self.component.activations) or 0

    def rests_on(self, unit: Unit) -> str | None:
        """The axis that bears a unit for good; none bears what stays mapped."""
        return {Home.device: self.axis, Home.pageable: HOST}.get(unit.home)

    def asks_of(self, axis: str) -> int:
        """What the component needs of an axis in its own phase, other components left out."""
        resting = sum(unit.packed for unit in self.units if self.rests_on(unit) == axis)
        return resting + (self.phase_bytes() if axis == self.axis else 0)

    def grant_slots(self, slots: int, ahead: int) -> None:
        """Allow so many slots, and so many layers fetched ahead; `fit_slots` takes what is of use."""
        self.granted_slots, self.granted_ahead = slots, ahead
        self.fit_slots()

    def fit_slots(self) -> None:
        """Slots as large as the largest layer that passes through them, and no more than are granted or needed."""
        self.slot_bytes = max((unit.packed for unit in self.units if unit.hold is Hold.layer), default=0)
        self.slots = min(self.granted_slots, self.streamed)
        self.prefetch_layers = max(0, min(self.granted_ahead, self.slots - 1))


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What each axis has to bear: bytes held always, and in each component's phase what that adds."""

    budgets: dict[str, Budget]
    drafts: tuple[Draft, ...]
    always: dict[str, int]

    def peak(self, axis: str) -> int:
        """The highest sum over all phases."""
        return self.always[axis] + max((draft.phase_bytes() for draft in self.drafts if draft.axis == axis), default=0)

    def left(self, axis: str) -> int:
        """Usable bytes beyond the peak; negative when the axis is short."""
        return self.budgets[axis].usable_bytes - self.peak(axis)

    def move(self, draft: Draft, unit: Unit, home: Home, hold: Hold) -> None:
        """Give a unit another home and hold, and charge the difference."""
        self._charge(draft, unit, -1)
        unit.home, unit.hold = home, hold
        self._charge(draft, unit, +1)

    def _charge(self, draft: Draft, unit: Unit, sign: int) -> None:
        axis = draft.rests_on(unit)
        if axis is not None:
            self.always[axis] += sign * unit.packed
        if unit.hold is Hold.phase:
            draft.held_bytes += sign * unit.packed
        draft.streamed += sign * (unit.hold is Hold.layer)


def ledger_of(drafts: tuple[Draft, ...], budgets: dict[str, Budget]) -> Ledger:
    """The ledger of what the drafts hold already."""
    always = dict.fromkeys(budgets, 0)
    for draft in drafts:
        for unit in draft.units:
            axis = draft.rests_on(unit)
            if axis is not None:
                always[axis] += unit.packed
    return Ledger(budgets=budgets, drafts=drafts, always=always)


def draft_of(component: Component, machine: Machine, wishes: Wishes) -> Draft:
    """A component with nothing held beyond a pass: the fixed part for the phase, each layer for its own turn."""
    device = wishes.of(component.name, None).compute_device or default_device(machine)
    units = tuple(_units(component, wishes, on_cpu=device == CPU))
    return Draft(
        component=component,
        compute_device=device,
        axis=axis_of(device, machine),
        overlaps=_overlaps(device, machine),
        units=units,
        held_bytes=sum(unit.packed for unit in units if unit.hold is Hold.phase),
        streamed=sum(unit.hold is Hold.layer for unit in units),
    )


def _overlaps(device: str, machine: Machine) -> bool:
    """Unified memory has no second copy to make."""
    return any(
        accelerator.streams and accelerator.memory is MemoryKind.separate
        for accelerator in machine.accelerators
        if accelerator.device == device
    )


def _units(component: Component, wishes: Wishes, *, on_cpu: bool) -> Iterator[Unit]:
    wish = wishes.of(component.name, None)
    if component.fixed_bytes:
        yield _unit(None, 0, component.fixed_bytes, component.fixed_packed_bytes, wish, on_cpu=on_cpu)
    for stack in component.stacks:
        wish = wishes.of(component.name, stack.name)
        for size in stack.sizes:
            for layer in range(*size.layers):
                yield _unit(stack.name, layer, size.layer_bytes, size.packed_bytes, wish, on_cpu=on_cpu)


def _unit(stack: str | None, layer: int, count: int, packed: int, wish: Wish, *, on_cpu: bool) -> Unit:
    home = wish.home or Home.mapped
    if packed == 0:
        # Nothing to move: no bytes fit anywhere, always.
        home, hold = Home.device, Hold.always
    elif on_cpu or home is Home.device or wish.hold is Hold.always:
        hold = Hold.always
        home = home if on_cpu else Home.device
    elif stack is None:
        hold = Hold.phase
    else:
        hold = wish.hold or Hold.layer
    return Unit(stack=stack, layer=layer, bytes=count, packed=packed, wish=wish, home=home, hold=hold)

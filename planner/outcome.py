"""From the finished draft to the plan's placements and predicted phases."""

from collections.abc import Iterable, Sequence

from ..plans.document import Phase, Placement, Predicted, Reader, Segment, Staging
from ..plans.pipeline import Run
from ..plans.policy import Hold, Home
from .draft import Draft, Ledger, Unit

PAGE_CACHE = "page_cache"
"""The soft axis: file pages that the kernel drops under pressure. It costs speed, never life, and has no budget."""


def placement_of(draft: Draft) -> Placement:
    """The component's segments, and its staging where layers pass through slots or the whole waits for its phase."""
    return Placement(
        component=draft.component.name,
        compute_device=draft.compute_device,
        staging=_staging(draft),
        segments=_segments(draft.units),
    )


def _staging(draft: Draft) -> Staging | None:
    if not draft.streamed:
        return None
    return Staging(
        device="cpu",
        reader=Reader.mapping,
        slots=draft.slots,
        slot_bytes=draft.slot_bytes,
        chunk_bytes=None,
        prefetch_layers=draft.prefetch_layers,
    )


def _segments(units: Iterable[Unit]) -> tuple[Segment, ...]:
    """Units of one stack, home and hold become one segment, in the order in which the first of them stands."""
    groups: dict[tuple[str | None, Home, Hold], list[Unit]] = {}
    for unit in units:
        groups.setdefault((unit.stack, unit.home, unit.hold), []).append(unit)
    return tuple(
        Segment(
            stack=stack,
            layers=() if stack is None else runs_of(unit.layer for unit in members),
            home=home,
            hold=hold,
            bytes=sum(unit.bytes for unit in members),
            packed_bytes=sum(unit.packed for unit in members),
        )
        for (stack, home, hold), members in groups.items()
    )


def runs_of(numbers: Iterable[int]) -> tuple[Run, ...]:
    """Ascending numbers as half-open runs."""
    runs: list[Run] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return tuple(runs)


def phases_of(drafts: Sequence[Draft], ledger: Ledger) -> tuple[Phase, ...]:
    """What each component's phase is predicted to cost. Seconds are not known without calibration."""
    return tuple(_phase(draft, ledger) for draft in drafts)


def _phase(draft: Draft, ledger: Ledger) -> Phase:
    peaks: dict[str, int | None] = {
        axis: always + (draft.phase_bytes() if axis == draft.axis else 0) for axis, always in ledger.always.items()
    }
    left = {
        axis: budget.usable_bytes - (peaks[axis] or 0)
        for axis, budget in ledger.budgets.items()
        if budget.available_bytes is not None
    }
    peaks[PAGE_CACHE] = sum(unit.bytes for unit in draft.units if unit.home is Home.mapped)
    return Phase(
        component=draft.component.name,
        passes=draft.component.passes,
        predicted=Predicted(
            seconds=None, stall_s=None, disk_bytes=None, link_bytes=_link_bytes(draft), peak_bytes=peaks
        ),
        binding=min(left, key=lambda axis: (left[axis], axis), default=None),
    )


def _link_bytes(draft: Draft) -> int:
    """Bytes that one request moves from the host to the compute device."""
    times = {Hold.always: 0, Hold.phase: 1, Hold.layer: draft.component.passes}
    return 0 if draft.on_cpu else sum(unit.bytes * times[unit.hold] for unit in draft.units)


def margins(ledger: Ledger) -> dict[str, int | None]:
    """What is left of each axis at its highest peak; null where the axis was not measured."""
    return {
        axis: None if budget.available_bytes is None else ledger.left(axis) for axis, budget in ledger.budgets.items()
    }

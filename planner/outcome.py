"""From the finished draft to the plan's placements and predicted phases."""

from collections.abc import Iterable
from dataclasses import replace

from ..plans.document import Phase, Placement, Predicted, Reader, Segment, Staging
from ..plans.pipeline import Run
from ..plans.policy import Hold, Home
from .budgets import HOST, LOCKED, PINNED
from .costs import Costs, is_cached, run_phase
from .draft import Draft, Ledger, Unit

PAGE_CACHE = "page_cache"
"""The soft axis: file pages that the kernel drops under pressure. It costs speed, never life, and has no budget."""


def placement_of(draft: Draft) -> Placement:
    """The component's segments, and its staging where layers pass through slots or the whole waits for its phase."""
    return Placement(
        component=draft.component.name,
        compute_device=draft.compute_device,
        chunk_tokens=draft.chunk_tokens,
        sharding=draft.sharding,
        staging=_staging(draft),
        segments=_segments(draft.units),
    )


def _staging(draft: Draft) -> Staging | None:
    if not draft.streamed:
        return None
    reads = draft.reads if draft.reading else None
    return Staging(
        device="cpu",
        reader=reads.reader if reads else Reader.mapping,
        slots=draft.slots,
        slot_bytes=draft.slot_bytes,
        chunk_bytes=reads.chunk_bytes if reads else None,
        depth=reads.depth if reads else None,
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


def phases_of(ledger: Ledger, costs: dict[str, Costs]) -> tuple[Phase, ...]:
    """What each component's phase is predicted to cost, by the simulated schedule. Null where rates are not known."""
    return tuple(_phase(draft, ledger, costs[draft.component.name]) for draft in ledger.drafts)


def _phase(draft: Draft, ledger: Ledger, costs: Costs) -> Phase:
    peaks: dict[str, int | None] = {axis: ledger.needs(axis, draft) for axis in ledger.budgets}
    left = {
        axis: budget.usable_bytes - (peaks[axis] or 0)
        for axis, budget in ledger.budgets.items()
        if budget.available_bytes is not None and (peaks[axis] or axis not in (PINNED, LOCKED))
    }
    peaks[PAGE_CACHE] = sum(_through_cache(draft, unit) for unit in draft.units)
    cached = is_cached(draft, ledger)
    timed = costs.timed and draft.sharding is None  # nobody has measured how fast ranks gather
    schedule = run_phase(draft, costs, cached=cached) if timed and costs.compute_known else None
    transfer = run_phase(draft, replace(costs, compute=0.0), cached=cached) if timed else None
    return Phase(
        component=draft.component.name,
        passes=draft.component.passes,
        predicted=Predicted(
            seconds=None if schedule is None else round(schedule.seconds, 6),
            transfer_s=None if transfer is None else round(transfer.seconds, 6),
            stall_s=None if schedule is None else round(schedule.stall_s, 6),
            disk_bytes=_disk_bytes(draft, ledger, cached=cached),
            link_bytes=_link_bytes(draft),
            peak_bytes=peaks,
        ),
        binding=min(left, key=lambda axis: (left[axis], axis), default=None),
    )


def _disk_bytes(draft: Draft, ledger: Ledger, *, cached: bool) -> int | None:
    """Bytes that one request reads from the disk at most, when nothing is cached before; null on an unmeasured host."""
    if ledger.budgets[HOST].available_bytes is None:
        return None
    return sum(unit.bytes * _reads_in_request(draft, unit, cached=cached) for unit in draft.units)


def _reads_in_request(draft: Draft, unit: Unit, *, cached: bool) -> int:
    """How often a mapped unit's bytes are read in a request; what is copied or locked, not at all."""
    if unit.home is not Home.mapped:
        return 0
    past_cache = draft.reading and unit.hold is Hold.layer
    return 1 if unit.hold is Hold.phase or (cached and not past_cache) else draft.component.passes


def _through_cache(draft: Draft, unit: Unit) -> int:
    """Bytes of a unit's file pages that are brought into memory: all that is mapped, but for what is read directly."""
    direct = draft.reading and draft.reads is not None and draft.reads.reader is Reader.direct
    if unit.home is not Home.mapped:
        return 0
    return unit.transformed if direct and unit.hold is Hold.layer else unit.bytes


def _link_bytes(draft: Draft) -> int:
    """Bytes that one request moves from the host to the compute device."""
    times = {Hold.always: 0, Hold.phase: 1, Hold.layer: draft.component.passes}
    return 0 if draft.on_cpu else sum(unit.moved * times[unit.hold] for unit in draft.units)


def margins(ledger: Ledger) -> dict[str, int | None]:
    """What is left of each axis at its highest peak; null where the axis was not measured."""
    return {
        axis: None if budget.available_bytes is None else ledger.left(axis) for axis, budget in ledger.budgets.items()
    }

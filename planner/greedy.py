"""Placements without search: what one streamed pass needs, and four simple ways to spend the rest.

The greedy one, with backfill, is the plan where there are too many kinds of layers for an exact solution. The others
are what runtimes do today; the planner compares itself with them on the same schedule, and the plan says by how much.
"""

from collections.abc import Iterator, Sequence

from ..plans.document import Short
from ..plans.policy import Copies, Hold, Home, Policy, Residency
from .budgets import HOST
from .draft import Draft, Ledger, Unit


def start(ledger: Ledger, policy: Policy) -> tuple[Short, ...]:
    """Grant slots to what the overrides and one streamed pass need. Returns every axis that is short even so."""
    for draft in ledger.drafts:
        _grant_slots(draft, ledger, policy)
    return _short(ledger)


def fill(ledger: Ledger, policy: Policy) -> None:
    """Greedy with backfill: hold for the phase, hold always, copy to the host; what saves most per byte comes first."""
    if policy.residency is Residency.fill:
        _hold_for_phases(ledger)
        _hold_always(ledger)
    copy_to_host(ledger, policy)


def fill_prefix(ledger: Ledger, policy: Policy) -> None:
    """In the order of components and layers, until the first that does not fit: what a device map does."""
    if policy.residency is Residency.fill:
        for draft in _on_devices(ledger):
            for unit in draft.units:
                if not (_is_free(unit) and unit.wish.home is None and unit.packed):
                    continue
                if not _hold_if_it_fits((unit,), draft, ledger, Hold.always):
                    break
            draft.fit_slots()
    copy_to_host(ledger, policy)


def offload_components(ledger: Ledger, policy: Policy) -> None:
    """Each component is on the device as a whole in its phase; one that does not fit there is streamed by layers."""
    if policy.residency is Residency.fill:
        for draft in _on_devices(ledger):
            layers = [unit for unit in draft.units if _is_free(unit) and unit.hold is Hold.layer]
            if layers:
                _hold_if_it_fits(layers, draft, ledger, Hold.phase)
            draft.fit_slots()
    copy_to_host(ledger, policy)


def _grant_slots(draft: Draft, ledger: Ledger, policy: Policy) -> None:
    """As many slots as the policy wishes and the device has room for; one where copies cannot overlap."""
    draft.grant_slots(policy.slots if draft.overlaps else 1, policy.prefetch_layers)
    while draft.slots > 1 and ledger.left(draft.axis) < 0:
        draft.grant_slots(draft.slots - 1, policy.prefetch_layers)


def _short(ledger: Ledger) -> tuple[Short, ...]:
    """Every axis whose peak is over its budget, with the component that asks most of it."""
    short: list[Short] = []
    for axis, budget in sorted(ledger.budgets.items()):
        need = ledger.peak(axis)
        if budget.available_bytes is None or need <= budget.usable_bytes:
            continue
        worst = max(ledger.drafts, key=lambda draft: ledger.asks_of(axis, draft)).component.name
        short.append(Short(axis=axis, component=worst, need_bytes=need, have_bytes=budget.usable_bytes))
    return tuple(short)


def _hold_for_phases(ledger: Ledger) -> None:
    """Spare components that run several times per request the repeated fetch of what fits."""
    for draft in _on_devices(ledger):
        if draft.component.passes > 1:
            layers = [unit for unit in draft.units if _is_free(unit) and unit.hold is Hold.layer]
            _take(layers, draft, ledger, Hold.phase)


def _hold_always(ledger: Ledger) -> None:
    """Give weights a home on the device. Streamed layers save a fetch per pass, held ones a fetch per request."""
    by_passes = sorted(_on_devices(ledger), key=lambda draft: -draft.component.passes)
    for hold, drafts in ((Hold.layer, by_passes), (Hold.phase, list(_on_devices(ledger)))):
        for draft in drafts:
            units = [unit for unit in draft.units if _is_free(unit) and unit.wish.home is None and unit.hold is hold]
            _take(units, draft, ledger, Hold.always)


def copy_to_host(ledger: Ledger, policy: Policy) -> None:
    """Copy what is read most. With unified memory a host copy and the device's would be twice the same pool."""
    if policy.copies is Copies.never:
        return
    wanted = [
        (draft, unit)
        for draft in ledger.drafts
        if draft.on_cpu or draft.axis != HOST
        for unit in draft.units
        if unit.home is Home.mapped and unit.wish.home is None and not (draft.on_cpu and unit.wish.hold is Hold.layer)
    ]
    wanted.sort(key=lambda pair: -_reads_per_request(*pair))
    for draft, unit in wanted:
        if unit.packed <= ledger.left(HOST):
            home, hold = (Home.device, Hold.always) if draft.on_cpu else (Home.pageable, unit.hold)
            ledger.move(draft, unit, home, hold)
    for draft in ledger.drafts:
        draft.fit_slots()


def _reads_per_request(draft: Draft, unit: Unit) -> int:
    return 1 if unit.hold is Hold.phase else draft.component.passes


def _on_devices(ledger: Ledger) -> Iterator[Draft]:
    return (draft for draft in ledger.drafts if not draft.on_cpu)


def _is_free(unit: Unit) -> bool:
    """Whether the planner may hold a unit longer: no override has said otherwise."""
    return unit.wish.hold is None


def _take(units: Sequence[Unit], draft: Draft, ledger: Ledger, hold: Hold) -> None:
    """Hold all of the units, which may free the slots; else one by one, so that smaller ones fill the gaps."""
    if units and not _hold_if_it_fits(units, draft, ledger, hold):
        for unit in units:
            _hold_if_it_fits((unit,), draft, ledger, hold)
    draft.fit_slots()


def _hold_if_it_fits(units: Sequence[Unit], draft: Draft, ledger: Ledger, hold: Hold) -> bool:
    before = [(unit.home, unit.hold) for unit in units]
    for unit in units:
        ledger.move(draft, unit, Home.device if hold is Hold.always else unit.home, hold)
    if ledger.left(draft.axis) >= 0:
        return True
    for unit, (home, held) in zip(units, before, strict=True):
        ledger.move(draft, unit, home, held)
    return False

"""From the optimum's counts to units: which layers of a class are held, and how many slots the rest passes through."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import product

from ..plans.policy import Hold, Home, Policy
from .costs import Costs, is_cached, run_phase, settle_readers
from .draft import Draft, Ledger
from .fates import Fate, UnitClass
from .solver import Optimum


class Spread(StrEnum):
    """Where the layers that stay stand among those that pass through.

    `interleaved` spreads those that come off the mapping among the others that pass through, too, so that the disk
    reads while the link copies; with `even` they stand together.
    """

    even = "even"
    interleaved = "interleaved"
    leading = "leading"


def apply_optimum(optimum: Optimum, ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> None:
    """Move every unit to its fate, and grant the slots that the simulation likes best. Everything stays in budget."""
    for draft in ledger.drafts:
        _assign(_mine(optimum, draft), ledger, draft, Spread.leading)
        if costs[draft.component.name].overlaps:
            draft.grant_slots(1, 0)  # what the program takes for certain; more are chosen below
        draft.fit_slots()
    settle_readers(ledger)
    for draft in ledger.drafts:
        _choose(draft, optimum, ledger, costs[draft.component.name], policy)


def _mine(optimum: Optimum, draft: Draft) -> list[tuple[UnitClass, dict[Fate, int]]]:
    return [pair for pair in zip(optimum.classes, optimum.counts, strict=True) if pair[0].draft is draft]


def _choose(draft: Draft, optimum: Optimum, ledger: Ledger, costs: Costs, policy: Policy) -> None:
    """Spacing and slots by simulation: the shortest phase, then fewer slots, then evenly spread layers."""
    if not draft.streamed or not costs.overlaps:
        return
    mine, cached = _mine(optimum, draft), is_cached(draft, ledger)
    best: tuple[float, int, int] | None = None
    options = list(product(range(1, policy.slots + 1), Spread))
    for index, (slots, spread) in enumerate(options):
        _assign(mine, ledger, draft, spread)
        draft.grant_slots(slots, policy.prefetch_layers)
        if draft.slots != slots or ledger.left(draft.axis) < 0:
            continue
        key = (round(run_phase(draft, costs, cached=cached).seconds, 9), slots, index)
        best = key if best is None else min(best, key)
    if best is not None:
        slots, spread = options[best[2]]
        _assign(mine, ledger, draft, spread)
        draft.grant_slots(slots, policy.prefetch_layers)


def _assign(classes: Sequence[tuple[UnitClass, dict[Fate, int]]], ledger: Ledger, draft: Draft, spread: Spread) -> None:
    for each, counts in classes:
        for unit, (home, hold) in zip(each.units, _fates_in_order(each, counts, spread), strict=True):
            if (unit.home, unit.hold) != (home, hold):
                ledger.move(draft, unit, home, hold)


def _fates_in_order(each: UnitClass, counts: dict[Fate, int], spread: Spread) -> list[Fate]:
    """One fate per unit: those that stay first or, evenly spread, between those that pass through."""
    staying = [fate for fate in _by_stay(each.fates) if fate[1] is not Hold.layer for _ in range(counts[fate])]
    passing = [fate for fate in _by_stay(each.fates) if fate[1] is Hold.layer for _ in range(counts[fate])]
    if spread is Spread.interleaved:
        mapped = [fate for fate in passing if fate[0] is Home.mapped]
        passing = _mixed(mapped, [fate for fate in passing if fate[0] is not Home.mapped])
    return [*staying, *passing] if spread is Spread.leading else _mixed(staying, passing)


def _mixed(some: list[Fate], others: list[Fate]) -> list[Fate]:
    """One kind spread evenly among the other, beginning with it."""
    if not some or not others:
        return [*some, *others]
    places = even_positions(len(some), len(some) + len(others))
    first, second = iter(some), iter(others)
    return [next(first) if index in places else next(second) for index in range(len(some) + len(others))]


def _by_stay(fates: Sequence[Fate]) -> list[Fate]:
    """The longest hold first; of equal holds, the host copy before the mapping."""
    holds, homes = list(Hold), [Home.device, Home.pinned, Home.pageable, Home.locked, Home.mapped]
    return sorted(fates, key=lambda fate: (holds.index(fate[1]), homes.index(fate[0])))


def even_positions(chosen: int, total: int) -> frozenset[int]:
    """`chosen` of `total` positions, evenly spread, the first one among them when any is chosen."""
    return frozenset(index * total // chosen for index in range(chosen))

"""Every placement of a pipeline that has few: what the schedule likes best is then known, and not only bounded."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from ..plans.policy import Policy
from .costs import Costs, Known, settle_readers, total_cost
from .draft import Draft, Ledger
from .fates import Fate, fates_of

MOST_PLACEMENTS = 4_000
"""Placements that are tried one by one in a tenth of a second or so."""

_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class _Option:
    """One component's part of a placement: a fate for each unit, and the slots that are granted."""

    fates: tuple[Fate, ...]
    slots: int


def placements(ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> int:
    """How many there are: each fate of each unit with each number of slots."""
    slots = [len(_slots(draft, costs, policy)) for draft in ledger.drafts]
    return prod(slots) * prod(
        len(fates_of(unit, draft, policy, ledger.budgets)) for draft in ledger.drafts for unit in draft.units
    )


def try_all(ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> None:
    """Leave the ledger with the cheapest of every placement that keeps to the budgets; of equal ones the present."""
    known: Known = {}
    best = total_cost(ledger, costs, known)
    options = [list(_options(draft, ledger, costs, policy)) for draft in ledger.drafts]
    chosen = tuple(_present(draft) for draft in ledger.drafts)
    for combination in product(*options):
        _place(combination, ledger, policy)
        cost = total_cost(ledger, costs, known)
        if cost < best * (1 - _GAIN) and not ledger.short():
            best, chosen = cost, combination
    _place(chosen, ledger, policy)
    settle_readers(ledger)


def _slots(draft: Draft, costs: dict[str, Costs], policy: Policy) -> range:
    """What is granted does not matter where nothing overlaps."""
    return range(1, policy.slots + 1) if costs[draft.component.name].overlaps else range(1, 2)


def _options(draft: Draft, ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> Iterator[_Option]:
    fates = (fates_of(unit, draft, policy, ledger.budgets) for unit in draft.units)
    return (_Option(*each) for each in product(product(*fates), _slots(draft, costs, policy)))


def _present(draft: Draft) -> _Option:
    return _Option(tuple((unit.home, unit.hold) for unit in draft.units), draft.granted_slots)


def _place(combination: tuple[_Option, ...], ledger: Ledger, policy: Policy) -> None:
    for draft, option in zip(ledger.drafts, combination, strict=True):
        for unit, fate in zip(draft.units, option.fates, strict=True):
            if (unit.home, unit.hold) != fate:
                ledger.move(draft, unit, *fate)
        draft.grant_slots(option.slots, policy.prefetch_layers)

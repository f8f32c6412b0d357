"""The last percent: single changes of a placement that the schedule likes better than the program did.

The program takes a pass that overlaps for as long as its longest resource; the schedule knows the order of the layers.
So one layer is moved, two layers change places, or the slots change, for as long as that makes a request cheaper.
"""

from collections.abc import Callable, Iterator
from functools import partial

from ..plans.policy import Policy
from .costs import Costs, settle_readers, total_cost
from .draft import Draft, Ledger, Unit
from .fates import Fate, fates_of

_MOST_STEPS = 10_000
"""Turns of units that are simulated in all, so that planning stays well below a second."""

_GAIN = 1e-9

Change = tuple[tuple[Unit, Fate], ...]


def polish(ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> None:
    """Take the first change that makes a request cheaper and keeps to every budget; again, until there is none."""
    steps = _MOST_STEPS // max(1, sum(len(draft.units) for draft in ledger.drafts))
    price = partial(total_cost, ledger, costs, {})
    best = price()
    improved = True
    while improved and steps > 0:
        improved = False
        for draft in ledger.drafts:
            for slots, change in _changes(draft, ledger, policy) if costs[draft.component.name].overlaps else ():
                steps -= 1
                cost = _try(draft, slots, change, ledger, price, policy, best)
                if cost is not None:
                    best, improved = cost, True
                    break
                if steps <= 0:
                    return


def _changes(draft: Draft, ledger: Ledger, policy: Policy) -> Iterator[tuple[int, Change]]:
    """Each change with the slots that go with it."""
    now = draft.granted_slots
    yield from ((slots, ()) for slots in range(1, policy.slots + 1) if slots != now)
    units = [unit for unit in draft.units if unit.packed]
    for index, unit in enumerate(units):
        mine = (unit.home, unit.hold)
        yield from ((now, ((unit, fate),)) for fate in fates_of(unit, draft, policy, ledger.budgets) if fate != mine)
        for other in units[index + 1 :]:
            theirs = (other.home, other.hold)
            alike = (other.stack, other.packed, other.transformed) == (unit.stack, unit.packed, unit.transformed)
            if alike and mine != theirs:
                yield now, ((unit, theirs), (other, mine))


def _try(
    draft: Draft,
    slots: int,
    change: Change,
    ledger: Ledger,
    price: Callable[[], float],
    policy: Policy,
    best: float,
) -> float | None:
    """Make a change; take it back unless it costs less than `best`, which is then returned.

    Readers are settled by the next change, or by `price`.
    """
    before = tuple((unit, (unit.home, unit.hold)) for unit, _ in change)
    granted = draft.granted_slots
    _make(draft, slots, change, ledger, policy)
    settle_readers(ledger)
    if not ledger.short():
        cost = price()
        if cost < best * (1 - _GAIN):
            return cost
    _make(draft, granted, before, ledger, policy)
    return None


def _make(draft: Draft, slots: int, change: Change, ledger: Ledger, policy: Policy) -> None:
    for unit, fate in change:
        ledger.move(draft, unit, *fate)
    draft.grant_slots(slots, policy.prefetch_layers)

"""The placement that costs least: the exact optimum beside simple placements, all on the same simulated schedule."""

from collections.abc import Callable
from dataclasses import dataclass

from ..plans.document import Short
from ..plans.policy import Policy
from . import greedy
from .apply import apply_optimum
from .costs import Costs, costs_of, total_cost
from .draft import Ledger
from .milp import SolverError
from .rates import Rates
from .solver import Optimum, solve

OPTIMUM, GREEDY = "optimum", "greedy-with-backfill"

_MOST_COMPARED_UNITS = 2_000
"""Beyond this many units the simple placements are not simulated beside the optimum: planning stays under a second."""

_TIE = 1e-9
"""Costs that differ by less than this share are the same: they are sums of floating-point numbers."""

_PROOF = 1e-6
"""How close to the bound a cost must be to be proven: the solver's tolerance on it."""

_SIMPLE: tuple[tuple[str, Callable[[Ledger, Policy], None]], ...] = (
    (GREEDY, greedy.fill),
    ("greedy-prefix", greedy.fill_prefix),
    ("component-offload", greedy.offload_components),
    ("everything-streamed", greedy.copy_to_host),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to place the pipeline, and its cost: seconds where `timed`, else bytes moved."""

    name: str
    ledger: Ledger
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The chosen placement, the others, and what was short where there is none.

    `bound` is a cost that no placement is below, by the solver's account; null where it did not look to the end. It
    takes a pass that overlaps for as long as its longest resource; the chosen placement's schedule may lie above.
    """

    ledger: Ledger
    costs: dict[str, Costs]
    short: tuple[Short, ...] = ()
    chosen: Candidate | None = None
    others: tuple[Candidate, ...] = ()
    bound: float | None = None

    @property
    def proven(self) -> bool:
        """Whether the simulated cost is the program's own, below which nothing is."""
        return self.chosen is not None and self.bound is not None and self.chosen.cost <= self.bound * (1 + _PROOF)

    @property
    def timed(self) -> bool:
        """Whether all costs are seconds."""
        return bool(self.costs) and all(costs.timed for costs in self.costs.values())


def search(make: Callable[[], Ledger], rates: dict[str, Rates | None], policy: Policy) -> Found:
    """Find the cheapest placement within every budget.

    Args:
        make: gives a fresh ledger in which only the overrides are spent.
        rates: by compute device; null where the machine was not calibrated.
        policy: what is allowed.
    """
    ledger = make()
    costs = _costs(ledger, rates)
    short = greedy.start(ledger, policy)
    if short or not ledger.drafts:
        return Found(ledger=ledger, costs=costs, short=short)
    optimum = _solve(ledger, costs, policy)
    candidates: list[Candidate] = []
    if optimum is not None:
        _spend_rest(optimum, ledger, costs, policy)
        candidates.append(Candidate(name=OPTIMUM, ledger=ledger, cost=total_cost(ledger, costs)))
    many = sum(len(draft.units) for draft in ledger.drafts) > _MOST_COMPARED_UNITS
    for name, spend in _SIMPLE:
        if not (many and (candidates or name != GREEDY)):
            other = make()
            greedy.start(other, policy)
            spend(other, policy)
            candidates.append(Candidate(name=name, ledger=other, cost=total_cost(other, costs)))
    # Of equal costs the first: the optimum, which takes the fewest hard bytes for it.
    chosen = min(candidates, key=lambda each: each.cost * (1 if each.name == OPTIMUM else 1 + _TIE))
    return Found(
        ledger=chosen.ledger,
        costs=costs,
        chosen=chosen,
        others=tuple(candidate for candidate in candidates if candidate is not chosen),
        bound=optimum.cost if optimum is not None and optimum.proven else None,
    )


def _solve(ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> Optimum | None:
    """The optimum, where the solver finds one that holds in whole bytes; its arithmetic is in floating point."""
    try:
        optimum = solve(ledger, costs, policy)
    except SolverError:
        return None
    if optimum is None or not optimum.is_whole:
        return None
    apply_optimum(optimum, ledger, costs, policy)
    return optimum if all(ledger.left(axis) >= 0 or not ledger.peak(axis) for axis in ledger.budgets) else None


def _spend_rest(optimum: Optimum, ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> None:
    """Spend what is left to the byte, which the program rounds away; taken back where it does not make it cheaper."""
    before = total_cost(ledger, costs)
    greedy.fill(ledger, policy)
    if total_cost(ledger, costs) >= before:
        apply_optimum(optimum, ledger, costs, policy)


def _costs(ledger: Ledger, rates: dict[str, Rates | None]) -> dict[str, Costs]:
    """One currency for all: seconds when every component's rates are known, else bytes for every component."""
    drafts = ledger.drafts
    costs = {draft.component.name: costs_of(draft, rates[draft.compute_device]) for draft in drafts}
    if all(cost.timed for cost in costs.values()):
        return costs
    return {draft.component.name: costs_of(draft, None) for draft in drafts}

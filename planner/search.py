"""The placement that costs least: the exact optimum beside simple placements, all on the same simulated schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..plans.document import Short
from ..plans.policy import Policy
from . import greedy
from .apply import apply_optimum
from .costs import Costs, costs_of, total_cost
from .draft import Ledger
from .exhaustive import MOST_PLACEMENTS, placements, try_all
from .milp import SolverError
from .polish import polish
from .rates import Rates
from .seats import Seating
from .solver import Optimum, solve

OPTIMUM, GREEDY = "optimum", "greedy-with-backfill"

_MOST_COMPARED_UNITS = 2_000
"""Beyond this many units the simple placements are not simulated beside the optimum: planning stays under a second."""

_TIE = 1e-9
"""Costs that differ by less than this share are the same: they are sums of floating-point numbers."""

_CHUNKS_COST = 1.01
"""Chunks are worth it only when they save more than one part in a hundred."""

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

    `seatings` are the costs of other devices and chunks that were tried; null where nothing fits.
    `bound` is a cost that no placement is below, by the solver's account; null where it did not look to the end. It
    takes a pass that overlaps for as long as its longest resource; the chosen placement's schedule may lie above.
    """

    ledger: Ledger
    costs: dict[str, Costs]
    short: tuple[Short, ...] = ()
    chosen: Candidate | None = None
    others: tuple[Candidate, ...] = ()
    bound: float | None = None
    seatings: tuple[tuple[Seating, float | None], ...] = ()

    @property
    def cost(self) -> float | None:
        """The chosen placement's; null where nothing fits."""
        return None if self.chosen is None else self.chosen.cost

    @property
    def proven(self) -> bool:
        """Whether the simulated cost is the program's own, below which nothing is."""
        return self.chosen is not None and self.bound is not None and self.chosen.cost <= self.bound * (1 + _PROOF)

    @property
    def compute(self) -> float:
        """The part of the cost that no placement changes."""
        drafts = self.ledger.drafts
        return sum(self.costs[draft.component.name].compute * draft.component.passes for draft in drafts)

    @property
    def timed(self) -> bool:
        """Whether all costs are seconds."""
        return bool(self.costs) and all(costs.timed for costs in self.costs.values())


def search(
    make: Callable[[Seating], Ledger], among: Sequence[Seating], rates: Mapping[str, Rates], policy: Policy
) -> Found:
    """Find the cheapest placement within every budget, on the cheapest devices.

    Args:
        make: gives a fresh ledger in which only the overrides are spent.
        among: the seatings to try; of equal ones the first is taken.
        rates: by compute device.
        policy: what is allowed.
    """
    found: list[Found] = []
    for seating in among:
        if _in_chunks(seating) and not _is_pressed(found):
            break
        found.append(_search_seating(partial(make, seating), rates, policy))
    # Bytes and seconds do not compare: what is not in the first one's currency is left out.
    comparable = [index for index, each in enumerate(found) if each.timed == found[0].timed or each.chosen is None]
    best = min(comparable, key=lambda index: (*_rank(found[index], among[index]), index))
    tried = tuple((among[index], found[index].cost) for index in comparable if index != best)
    return replace(_polished(found[best], policy), seatings=tried)


def _polished(found: Found, policy: Policy) -> Found:
    """The same, its schedule improved where it is not known to be the best."""
    if found.chosen is None or found.proven:
        return found
    every = placements(found.ledger, found.costs, policy) <= MOST_PLACEMENTS
    (try_all if every else polish)(found.ledger, found.costs, policy)
    cost = total_cost(found.ledger, found.costs)
    return replace(found, chosen=replace(found.chosen, cost=cost), bound=cost if every else found.bound)


def _in_chunks(seating: Seating) -> bool:
    return any(seat.chunk_tokens is not None for seat in seating)


def _is_pressed(found: Sequence[Found]) -> bool:
    """Whether less memory for activations could help: nothing fits, or some weights are not where they cost nothing."""
    return all(each.cost is None or each.cost > each.compute for each in found)


def _rank(found: Found, seating: Seating) -> tuple[float, float]:
    """What fits before what does not, less cost before more, and a smaller shortage before a larger one.

    Chunks must gain more than a little: that they compute a little slower is in no cost.
    """
    if found.cost is None:
        return 1.0, float(sum(short.need_bytes - short.have_bytes for short in found.short))
    return 0.0, found.cost * (_CHUNKS_COST if _in_chunks(seating) else 1.0)


def _search_seating(make: Callable[[], Ledger], rates: Mapping[str, Rates], policy: Policy) -> Found:
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
    return None if ledger.short() else optimum


def _spend_rest(optimum: Optimum, ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> None:
    """Spend what is left to the byte, which the program rounds away; taken back where it does not make it cheaper."""
    before = total_cost(ledger, costs)
    greedy.fill(ledger, policy)
    if total_cost(ledger, costs) >= before:
        apply_optimum(optimum, ledger, costs, policy)


def _costs(ledger: Ledger, rates: Mapping[str, Rates]) -> dict[str, Costs]:
    """One currency for all: seconds when every component's rates are known, else bytes for every component."""
    drafts = ledger.drafts
    costs = {draft.component.name: costs_of(draft, rates[draft.compute_device]) for draft in drafts}
    if all(cost.timed for cost in costs.values()):
        return costs
    return {draft.component.name: costs_of(draft, None) for draft in drafts}

"""The optimum: one small mixed-integer program over all components, phases and axes.

For every class of equal units and every fate it counts how many units have it. Memory rows bound each axis in each
phase: sizes are counted in their greatest common divisor, so that coefficients are whole, or in a ten-millionth of the
largest, rounded up, where they differ by more than the solver can tell apart. The first objective is the request's cost
(`costs`), the second the hard bytes that this takes. Which units of a class have which fate, and how many slots there
are beyond two, is decided afterwards by simulation.
"""

import math
from contextlib import suppress
from dataclasses import dataclass

from ..plans.policy import Hold, Home, Policy
from .budgets import HOST
from .costs import Costs, fate_link, read_cost
from .draft import Draft, Ledger
from .fates import Fate, UnitClass, classes_of
from .milp import EXACT, Program, Search, SolverError

MOST_CLASSES = 128
"""With more classes than this the program is no longer small, and the greedy placement stands."""

_FEW_CLASSES = 16
_LOOSE = Search(nodes=1, gap=1e-4)
"""With more than a few classes the last bytes are a knapsack that takes many seconds: near is then enough."""

_NEAR = Search(nodes=1, gap=1e-2)
"""Of equal costs nearly the fewest bytes will do."""

_SLACK = 1e-9
"""How much of the first objective, relatively, may be lost to the second: the solver's own tolerance."""

_INTEGRALITY = 2e-6
"""Twice how far from a whole number the solver's whole numbers may be."""

_MOST_COEFFICIENT = 10_000_000
_COST_SCALE = 1e6
"""The largest cost in the program: far above its tolerances, and small enough that rounding does not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The counts that were found: by class, how many units have each of its fates."""

    classes: tuple[UnitClass, ...]
    counts: tuple[dict[Fate, int], ...]
    cost: float
    proven: bool

    @property
    def is_whole(self) -> bool:
        """Whether every unit has exactly one fate, after rounding."""
        return all(
            sum(counts.values()) == len(each.units) and min(counts.values()) >= 0
            for each, counts in zip(self.classes, self.counts, strict=True)
        )


@dataclass(slots=True, kw_only=True)
class _Model:
    """The program under construction. Variables are numbers; `x[class][fate]` counts units."""

    program: Program
    classes: tuple[UnitClass, ...]
    x: list[dict[Fate, int]]
    double: dict[str, int]
    slot_bytes: dict[str, dict[int, float]]
    reading: dict[str, int]
    costs: dict[str, Costs]
    ledger: Ledger
    unit_bytes: int
    cost_unit: float
    most_slots: int

    def size(self, count: int) -> int:
        """Bytes in the program's unit, rounded up."""
        return -(-count // self.unit_bytes)

    def part(self, count: int) -> int:
        """One rank's part of bytes that all ranks share, in the program's unit."""
        return self.size(-(-count // self.ledger.ranks))


def solve(ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> Optimum | None:
    """The placement of least cost within every budget; null where there are too many classes.

    Args:
        ledger: drafts as the overrides and one streamed pass leave them, which fits.
        costs: by component.
        policy: says which fates are open, and how many slots.

    Raises:
        SolverError: no placement fits, against what the ledger said.
    """
    classes = classes_of(ledger.drafts, policy, ledger.budgets)
    if len(classes) > MOST_CLASSES:
        return None
    model = _set_up(classes, ledger, costs, policy)
    first_objective = _cost_rows(model)
    few = len(classes) <= _FEW_CLASSES
    first = second = model.program.minimise(first_objective, EXACT if few else _LOOSE)
    if few:
        model.program.at_most(first_objective, first.objective * (1 + _SLACK) + _SLACK)
        with suppress(SolverError):  # None within the nodes: what the first found stands.
            second = model.program.minimise(_hard_bytes(model), _NEAR, first)
    counts = tuple({fate: second.whole(variable) for fate, variable in row.items()} for row in model.x)
    return Optimum(
        classes=classes,
        counts=counts,
        cost=max(0.0, first.objective) * model.cost_unit,  # The solver's nothing may be a little less.
        proven=few and first.optimal,
    )


def _set_up(classes: tuple[UnitClass, ...], ledger: Ledger, costs: dict[str, Costs], policy: Policy) -> _Model:
    program = Program()
    x = [{fate: program.count(len(each.units)) for fate in each.fates} for each in classes]
    for each, row in zip(classes, x, strict=True):
        program.exactly(dict.fromkeys(row.values(), 1.0), len(each.units))
    sizes = [size for each in classes for size in (each.packed, each.units[0].slot) if size]
    sizes += [-(-each.packed // ledger.ranks) for each in classes if ledger.ranks > 1 and each.packed]
    sizes += [draft.reads.buffer_bytes for draft in ledger.drafts if draft.reads and sizes]
    unit_bytes = max(math.gcd(*sizes), max(sizes) // _MOST_COEFFICIENT) if sizes else 1
    model = _Model(
        program=program,
        classes=classes,
        x=x,
        double={},
        slot_bytes={},
        reading={},
        costs=costs,
        ledger=ledger,
        unit_bytes=max(1, unit_bytes),
        cost_unit=_largest_cost(classes, costs) / _COST_SCALE or 1.0,
        most_slots=policy.slots,
    )
    for draft in ledger.drafts:
        name, reading = draft.component.name, _reading_row(model, draft)
        model.slot_bytes[name] = _slot_rows(model, draft, policy)
        model.reading |= {} if reading is None else {name: reading}
    _memory_rows(model)
    return model


def _slot_rows(model: _Model, draft: Draft, policy: Policy) -> dict[int, float]:
    """A variable for the bytes of a component's slots, and, where it may choose, whether there are two."""
    name = draft.component.name
    streams = [(each, row) for each, row in _of(model, draft) if any(hold is Hold.layer for _, hold in each.fates)]
    if not streams:
        return {}
    room = model.program.amount()
    chooses = model.costs[name].overlaps and policy.slots > 1
    if chooses:
        model.double[name] = model.program.count(1)
    for each, row in streams:
        used = model.program.count(1)
        layered: dict[int, float] = {row[fate]: 1.0 for fate in each.fates if fate[1] is Hold.layer}
        model.program.at_most({**layered, used: -float(len(each.units))}, 0)
        size = model.size(each.units[0].slot)
        slots = 1 if chooses else max(1, draft.slots)
        model.program.at_most({used: slots * size, room: -1.0}, 0)
        if chooses:
            # Two of this class's size: only when it is streamed and there are two slots.
            model.program.at_most({used: 2 * size, model.double[name]: 2 * size, room: -1.0}, 2 * size)
    return {room: 1.0}


def _reading_row(model: _Model, draft: Draft) -> int | None:
    """A variable: whether the reader reads past the cache. On the CPU every slot is filled so; null where none is."""
    streams = any((Home.mapped, Hold.layer) in each.fates for each, _ in _of(model, draft))
    return model.program.count(1) if draft.reads is not None and streams and not draft.on_cpu else None


def _memory_rows(model: _Model) -> None:
    """Each axis in each phase; and each axis without a phase of its own, for what is always there."""
    for axis, budget in model.ledger.budgets.items():
        if budget.available_bytes is None:
            # Nothing is spent there: no buffers, which are the one thing that may be spent or not.
            for reading in model.reading.values() if axis == HOST else ():
                model.program.at_most({reading: 1.0}, 0)
            continue
        always = _always(model, axis)
        terms = [(_in_phase(model, draft, axis), draft) for draft in model.ledger.drafts]
        for in_phase, draft in terms:
            if in_phase or draft.axis == axis:
                usable = budget.usable_bytes - (draft.pass_bytes() if draft.axis == axis else 0)
                model.program.at_most(_sum(always, in_phase), usable // model.unit_bytes)
        if always and not any(in_phase or draft.axis == axis for in_phase, draft in terms):
            model.program.at_most(always, budget.usable_bytes // model.unit_bytes)


def _in_phase(model: _Model, draft: Draft, axis: str) -> dict[int, float]:
    """What a component's phase adds on an axis, but for activations, which are the same for every placement."""
    terms: dict[int, float] = {}
    reading = model.reading.get(draft.component.name)
    if axis == HOST and reading is not None and draft.reads is not None:
        terms[reading] = float(model.size(draft.reads.buffer_bytes))
    if axis != draft.axis:
        return terms
    held: dict[int, float] = {row[fate]: size for _, row, fate, size in _fates(model, draft) if fate[1] is Hold.phase}
    return _sum(terms, held, model.slot_bytes[draft.component.name])


def _always(model: _Model, axis: str) -> dict[int, float]:
    """What is on an axis whatever computes; of what is locked, the host bears this rank's part."""
    terms: dict[int, float] = {}
    for draft in model.ledger.drafts:
        for each, row, (home, hold), size in _fates(model, draft):
            if axis in draft.rests_on(home):
                terms[row[home, hold]] = size
            elif axis == HOST and home is Home.locked:
                terms[row[home, hold]] = model.part(each.packed)
    return terms


def _cost_rows(model: _Model) -> dict[int, float]:
    """The request's cost: the sum of the phases' costs, each a variable bounded from below by what it has to do."""
    objective: dict[int, float] = {}
    for draft in model.ledger.drafts:
        phase = model.program.amount()
        objective[phase] = 1.0
        _phase_rows(model, draft, phase)
    return objective


def _phase_rows(model: _Model, draft: Draft, phase: int) -> None:
    """One after the other; or, with two slots, as long as the longest of compute, link and disk.

    What the disk does in the compute's own turn comes on top of the compute in any case: what is fetched for the whole
    phase, and page faults of what the CPU uses in place.
    """
    name = draft.component.name
    costs, program = model.costs[name], model.program
    compute = costs.compute * draft.component.passes / model.cost_unit
    layers: dict[int, float] = {}
    serial: dict[int, float] = {}
    for each, row, (home, hold), _ in _fates(model, draft):
        target = layers if hold is Hold.layer else serial
        target[row[home, hold]] = fate_link(costs, draft, each.moved, home, hold) / model.cost_unit
    cached = _cached_row(model, draft)
    beside, within = _streamed_reads(model, draft, cached), _reads_in_turn(model, draft, cached)
    everything = _sum(layers, serial, {beside: 1.0, within: 1.0, phase: -1.0})
    double = model.double.get(name)
    if double is None:
        program.at_most(everything, -compute)
        return
    worst = compute + 2 * _most_disk(model, draft)
    for each, row in _of(model, draft):
        links = (fate_link(costs, draft, each.moved, *fate) for fate in row)
        worst += len(each.units) * max(links) / model.cost_unit
    program.at_most(_sum(everything, {double: -worst}), -compute)
    lost = {variable: costs.loss * cost for variable, cost in layers.items()}
    program.at_most(_sum(serial, lost, {beside: costs.loss, within: 1.0, phase: -1.0}), -compute)
    program.at_most(_sum(layers, serial, {phase: -1.0}), 0)
    program.at_most({beside: 1.0, within: 1.0, phase: -1.0}, 0)
    if model.most_slots <= 2 and not draft.on_cpu:
        _fetch_rows(model, draft, phase, cached)


def _fetch_rows(model: _Model, draft: Draft, phase: int, cached: int) -> None:
    """With two slots one layer is on its way at a time, and takes as long as the slower of its disk and link.

    So the layers' fetches add up, whatever runs beside them: disk and link of different layers do not overlap. More
    slots may do better, and then the rows are left out.
    """
    costs, passes = model.costs[draft.component.name], draft.component.passes
    reading = model.reading.get(draft.component.name)
    for by_reads, lifted in ((True, {cached: 1.0}), (False, _sum({cached: 1.0}, _one(reading)))):
        fetches: dict[int, float] = {}
        for each, row, (home, hold), _ in _fates(model, draft):
            if hold is Hold.layer:
                disk = read_cost(costs, each.units[0]) if by_reads else each.stored * costs.fault
                slower = max(each.moved * costs.link[home], disk if home is Home.mapped else 0.0)
                fetches[row[home, hold]] = slower * passes / model.cost_unit
        # When it is cached, the slower is the link, of which another row takes care.
        most = _most_disk(model, draft)
        model.program.at_most(_sum(fetches, {phase: -1.0}, dict.fromkeys(lifted, -most)), 0)


def _cached_row(model: _Model, draft: Draft) -> int:
    """A variable: whether all that goes through the page cache stays there from pass to pass.

    A scan in the same order every time keeps nothing in a cache that it does not fit into.
    """
    cached = model.program.count(1)
    mapped: dict[int, float] = {
        row[fate]: count / model.unit_bytes
        for each, row, fate, _ in _fates(model, draft)
        if (count := draft.cached_bytes(each.units[0], *fate))
    }
    total = sum(len(each.units) * each.stored for each, _ in _of(model, draft)) / model.unit_bytes
    room = model.ledger.cacheable_bytes / model.unit_bytes
    needed = _sum(_always(model, HOST), _in_phase(model, draft, HOST))
    if draft.axis == HOST:
        room -= draft.pass_bytes() / model.unit_bytes
    # When cached is 1, what is mapped goes into what the host does not need otherwise; when 0, the row says nothing.
    slots = sum(max(unit.slot for unit in each.units) for each in model.classes) * model.most_slots
    slack = total + (3 * sum(len(each.units) * each.packed for each in model.classes) + slots) / model.unit_bytes
    slack += abs(room) + sum(needed[variable] for variable in model.reading.values() if variable in needed)
    # A solver's 1 may be a millionth less, which times the slack is not little: what is cached must be so by more.
    model.program.at_most(_sum(mapped, needed, {cached: slack}), room + slack - math.floor(slack * _INTEGRALITY))
    reading = model.reading.get(draft.component.name)
    if reading is not None:
        model.program.at_most({cached: 1.0, reading: 1.0}, 1)
    return cached


def _streamed_reads(model: _Model, draft: Draft, cached: int) -> int:
    """A variable: the disk's cost of filling slots off the mapping, in all passes.

    Page by page once, or in every pass where the cache keeps nothing; by reads, in every pass.
    """
    disk = model.program.amount()
    costs, passes = model.costs[draft.component.name], draft.component.passes
    streamed = [(each, row[fate]) for each, row, fate, _ in _fates(model, draft) if fate == (Home.mapped, Hold.layer)]
    stored = {variable: each.stored / model.cost_unit for each, variable in streamed}
    late = (costs.whole - costs.read) * passes / model.cost_unit
    through_cache = {variable: late * each.units[0].transformed for each, variable in streamed}
    in_cache, reading = _one(cached), _one(model.reading.get(draft.component.name))
    nothing: dict[int, float] = {}
    bounds = [(costs.read * passes, through_cache, in_cache), (costs.fault, nothing, reading)]
    bounds.append((costs.fault * passes, nothing, _sum(in_cache, reading)))
    if draft.reads_past_cache:
        bounds = [(costs.read * passes, through_cache, _one(None))]
    most = _most_disk(model, draft)
    for cost, more, lifted in bounds:
        terms = {variable: amount * cost for variable, amount in stored.items()}
        model.program.at_most(_sum(terms, more, dict.fromkeys(lifted, -most), {disk: -1.0}), 0)
    return disk


def _reads_in_turn(model: _Model, draft: Draft, cached: int) -> int:
    """A variable: the disk's cost of what is fetched for the whole phase, and of what the CPU uses in place."""
    disk = model.program.amount()
    costs, passes = model.costs[draft.component.name], draft.component.passes
    once: dict[int, float] = {}
    every: dict[int, float] = {}
    for each, row, (home, hold), _ in _fates(model, draft):
        if home is Home.mapped and hold is not Hold.layer:
            in_place = hold is Hold.always
            once[row[home, hold]] = each.stored * (costs.fault if in_place else costs.whole) / model.cost_unit
            every[row[home, hold]] = once[row[home, hold]] * (passes if in_place else 1)
    model.program.at_most(_sum(once, {disk: -1.0}), 0)
    model.program.at_most(_sum(every, {disk: -1.0, cached: -_most_disk(model, draft)}), 0)
    return disk


def _most_disk(model: _Model, draft: Draft) -> float:
    stored = sum(len(each.units) * each.stored for each, _ in _of(model, draft))
    slowest = model.costs[draft.component.name].slowest_disk
    return stored * slowest * draft.component.passes / model.cost_unit


def _largest_cost(classes: tuple[UnitClass, ...], costs: dict[str, Costs]) -> float:
    """What the request costs when everything is read and copied in every pass."""
    total = 0.0
    for each in classes:
        cost = costs[each.draft.component.name]
        weights = len(each.units) * max(each.stored, each.moved) * (max(cost.link.values()) + cost.slowest_disk)
        total += each.draft.component.passes * (weights + cost.compute)
    return total


def _hard_bytes(model: _Model) -> dict[int, float]:
    """What cannot be dropped under pressure: copies on the host, everything held on devices, slots and buffers.

    Of two homes that take as much the one without page-locking costs a little less.
    """
    terms: dict[int, float] = {}
    for draft in model.ledger.drafts:
        for each, row, (home, hold), size in _fates(model, draft):
            resting = {Home.mapped: 0, Home.locked: model.part(each.packed)}.get(home, size)
            dearer = size / 8 if home is Home.pinned else 0
            terms[row[home, hold]] = float(resting + (size if hold is Hold.phase else 0) + dearer)
        terms |= model.slot_bytes[draft.component.name] if draft.on_cpu else {}
    return terms


def _of(model: _Model, draft: Draft) -> list[tuple[UnitClass, dict[Fate, int]]]:
    return [(each, row) for each, row in zip(model.classes, model.x, strict=True) if each.draft is draft]


def _fates(model: _Model, draft: Draft) -> list[tuple[UnitClass, dict[Fate, int], Fate, int]]:
    """All classes and fates of a component, with the bytes of one unit in the program's unit."""
    return [(each, row, fate, model.size(each.packed)) for each, row in _of(model, draft) for fate in each.fates]


def _one(variable: int | None) -> dict[int, float]:
    return {} if variable is None else {variable: 1.0}


def _sum(*parts: dict[int, float]) -> dict[int, float]:
    total: dict[int, float] = {}
    for part in parts:
        for variable, value in part.items():
            total[variable] = total.get(variable, 0.0) + value
    return total

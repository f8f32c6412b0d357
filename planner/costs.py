"""What a unit's fate costs in a request: seconds where the rates are known, or bytes moved as their stand-in.

Without rates the model is the same, with one byte as one unit of cost: every byte that is copied to the device counts,
and every byte that rests on the mapping counts again for each time it may have to come off the disk. Seconds are then
unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ..models.dataflow import is_generator
from ..plans.pipeline import Component, RowFlops, TracedActivations
from ..plans.policy import Hold, Home
from ..plans.units import GIB
from ..policies.admission import CPU
from .budgets import HOST
from .draft import Draft, Ledger, Unit
from .rates import Rates
from .simulate import Schedule, Step, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one component on its device; per byte, and of one pass's compute.

    Attributes:
        link: of copying one byte to the device, by home.
        fault: of bringing in one byte that is not cached, page by page, by touching the mapping.
        whole: the same by reading a unit from begin to end through the page cache.
        read: the same by the reader's reads into a slot; as `fault` where the reader does not read.
        compute: of one pass without weights to wait for. Zero where unknown: it is the same for every placement.
        compute_known: whether `compute` is a measured figure.
        timed: whether costs are seconds.
        overlaps: whether copies can run beside the compute. A stand-in never does.
        loss: which part of the time of what runs beside it the compute loses.
    """

    link: dict[Home, float]
    fault: float
    whole: float
    read: float
    compute: float
    compute_known: bool
    timed: bool
    overlaps: bool
    loss: float = 0.0

    @property
    def slowest_disk(self) -> float:
        """The most that one byte off the disk costs."""
        return max(self.fault, self.whole, self.read)


_IN_BYTES = Costs(
    link=dict.fromkeys(Home, 1.0),
    fault=1.0,
    whole=1.0,
    read=1.0,
    compute=0.0,
    compute_known=False,
    timed=False,
    overlaps=False,
)


def costs_of(draft: Draft, rates: Rates | None) -> Costs:
    """The costs of a component; in bytes where a rate that it needs is unknown."""
    compute = None if rates is None else compute_seconds(draft.component, rates)
    fault = None if rates is None else _fault_rate(draft, rates)
    if rates is None or fault is None or (rates.link_pageable_bytes_per_s is None and not draft.on_cpu):
        return _IN_BYTES
    pageable = rates.link_pageable_bytes_per_s
    mapped = rates.link_mapped_bytes_per_s
    links = {
        Home.mapped: mapped,
        Home.locked: mapped,
        Home.pageable: pageable,
        Home.pinned: rates.link_pinned_bytes_per_s or pageable,
    }
    disk = rates.disk_bytes_per_s if draft.reads else None
    return Costs(
        link={home: 1 / rate if rate else 0.0 for home, rate in links.items()},
        fault=1 / fault,
        whole=1 / max(fault, rates.buffered_bytes_per_s or 0.0),
        read=1 / (disk or fault),
        compute=compute or 0.0,
        compute_known=compute is not None,
        timed=True,
        overlaps=draft.overlaps,
        loss=_loss(draft, rates),
    )


_LEAST_LOSS = 0.03
"""Passes whose copies hide behind the compute took 1.02 to 1.08 times as long (benchmarks/results/overlap-*.md)."""


def _loss(draft: Draft, rates: Rates) -> float:
    """What runs beside the compute is not free: else weights would be fetched again and again with memory to spare.

    On the CPU reads take processor time that the compute wants: of its cores' time the part that they keep busy.
    """
    disk = rates.disk
    if not draft.on_cpu or disk is None or disk.cpu_s_per_gib is None:
        return _LEAST_LOSS
    return max(_LEAST_LOSS, disk.cpu_s_per_gib / GIB * disk.bytes_per_s / (rates.cores or 1))


def _fault_rate(draft: Draft, rates: Rates) -> float | None:
    """How fast a mapping comes off the disk. Where that was not measured, and the device does not compute on the
    mapping itself, the disk's rate stands in."""
    return rates.fault_bytes_per_s or (None if draft.on_cpu else rates.disk_bytes_per_s)


def compute_seconds(component: Component, rates: Rates) -> float | None:
    """Seconds of one pass's arithmetic, by its traced FLOPs at the rates of the dtype that most weights have.

    On the CPU all else takes as long as copies of what it reads and writes, and activations wait for fresh memory where
    they do not find it in the heap; as far as that was counted, and later passes' is not. Where those take fewer tokens
    than the first, the mean over a request's passes.
    """
    activations, passes = component.activations, component.passes
    if not isinstance(activations, TracedActivations) or not component.dtype_bytes:
        return None
    dtype = max(component.dtype_bytes, key=lambda name: (component.dtype_bytes[name], name))
    square = rates.flops_per_s(dtype)
    if square is None:
        return None
    by_rows = sum(each.flops for each in activations.row_flops)
    first = (activations.flops - by_rows) / square + _product_seconds(activations.row_flops, dtype, rates)
    if rates.device == CPU and activations.moved_bytes is not None and rates.memory_copy_bytes_per_s is not None:
        # A copy reads and writes each byte. What an accelerator's own memory does was not measured.
        first += activations.moved_bytes / 2 / rates.memory_copy_bytes_per_s
    if activations.fresh_bytes is not None and rates.touch_s_per_gib is not None:
        first += activations.fresh_bytes / GIB * rates.touch_s_per_gib
    if not activations.later_row_flops:
        # A pass of a model that generates is one token of many, which the pass over all at once does not tell of.
        return None if passes > 1 and is_generator(component.class_name) else first
    return (first + (passes - 1) * _product_seconds(activations.later_row_flops, dtype, rates)) / passes


def _product_seconds(products: Sequence[RowFlops], dtype: str, rates: Rates) -> float:
    return sum(each.flops / (rates.flops_per_s(dtype, each.rows) or inf) for each in products)


def fate_link(costs: Costs, draft: Draft, moved: int, home: Home, hold: Hold) -> float:
    """The cost of copying one unit to the device, in a whole request."""
    if draft.on_cpu or hold is Hold.always:
        return 0.0
    return moved * costs.link[home] * (draft.component.passes if hold is Hold.layer else 1)


def is_cached(draft: Draft, ledger: Ledger) -> bool:
    """Whether a component's mapped weights stay in the page cache from pass to pass: all of them, or none.

    Scans in the same order push out what comes next, so a cache that is a little too small keeps nothing. What the CPU
    reads into slots goes past the cache, and does not count.
    """
    mapped = sum(draft.cached_bytes(unit, unit.home, unit.hold) for unit in draft.units)
    return mapped + ledger.needs(HOST, draft) <= ledger.cacheable_bytes


def settle_readers(ledger: Ledger) -> None:
    """Let each component's reader read past the cache where the cache would keep nothing, and buffers have room."""
    for draft in ledger.drafts:
        draft.reading = False
        if draft.reads is None or not draft.streams_mapped:
            continue
        room = ledger.budgets[HOST].usable_bytes - ledger.needs(HOST, draft)
        draft.reading = draft.on_cpu or (not is_cached(draft, ledger) and draft.reads.buffer_bytes <= room)


Known = dict[tuple[object, ...], float]
"""Costs of phases that were simulated before, by all that they depend on."""


def total_cost(ledger: Ledger, costs: dict[str, Costs], known: Known | None = None) -> float:
    """The simulated cost of a request: the sum over its phases. The readers are settled first.

    Args:
        ledger: finished drafts.
        costs: by component.
        known: what is known already, and is added to; for one ledger and its costs only.
    """
    settle_readers(ledger)
    known = {} if known is None else known
    total = 0.0
    for draft in ledger.drafts:
        name, cached = draft.component.name, is_cached(draft, ledger)
        fates = tuple((unit.home, unit.hold) for unit in draft.units)
        key = (name, fates, draft.slots, draft.prefetch_layers, draft.reading, cached)
        if key not in known:
            known[key] = run_phase(draft, costs[name], cached=cached).seconds
        total += known[key]
    return total


def run_phase(draft: Draft, costs: Costs, *, cached: bool) -> Schedule:
    """The simulated phase of a finished draft. `cached`: whether mapped weights stay in the page cache all the time."""
    held = [unit for unit in draft.units if unit.hold is Hold.phase]
    begin = sum(_link(unit, draft, costs) + unit.bytes * costs.whole * (unit.home is Home.mapped) for unit in held)
    steps = _steps(draft, costs, cached=cached)
    return simulate(
        steps,
        passes=draft.component.passes,
        slots=draft.slots,
        prefetch_layers=draft.prefetch_layers,
        overlap=costs.overlaps and draft.slots > 1,
        loss=costs.loss,
        begin_s=begin,
    )


def _steps(draft: Draft, costs: Costs, *, cached: bool) -> Sequence[Step]:
    total = sum(unit.bytes for unit in draft.units) or 1
    steps: list[Step] = []
    for unit in draft.units:
        streamed = unit.hold is Hold.layer
        first, again = _disk(unit, draft, costs, cached=cached)
        steps.append(
            Step(
                compute_s=costs.compute * unit.bytes / total,
                link_s=_link(unit, draft, costs) if streamed else 0.0,
                first_disk_s=first,
                disk_s=again,
                streamed=streamed,
            )
        )
    return steps


def read_cost(costs: Costs, unit: Unit) -> float:
    """The cost of one unit's bytes by the reader; those that are transformed come through the page cache."""
    return (unit.bytes - unit.transformed) * costs.read + unit.transformed * costs.whole


def _link(unit: Unit, draft: Draft, costs: Costs) -> float:
    return 0.0 if draft.on_cpu else unit.moved * costs.link[unit.home]


def _disk(unit: Unit, draft: Draft, costs: Costs, *, cached: bool) -> tuple[float, float]:
    """The cost of the disk in a unit's turn: in the first pass, when nothing is cached yet, and in every other one."""
    if unit.home is not Home.mapped or unit.hold is Hold.phase:
        return 0.0, 0.0
    if unit.hold is Hold.layer and draft.reading:
        return read_cost(costs, unit), read_cost(costs, unit)
    first = unit.bytes * costs.fault
    return first, 0.0 if cached else first

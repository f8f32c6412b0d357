"""What a unit's fate costs in a request: seconds where the rates are known, or bytes moved as their stand-in.

Without rates the model is the same, with one byte as one unit of cost: every byte that is copied to the device counts,
and every byte that rests on the mapping counts again for each time it may have to come off the disk. Seconds are then
unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..models.dataflow import is_generator
from ..plans.pipeline import Component, TracedActivations
from ..plans.policy import Hold, Home
from .budgets import HOST
from .draft import Draft, Ledger, Unit
from .rates import Rates
from .simulate import Schedule, Step, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one component on its device; per byte, and of one pass's compute.

    Attributes:
        link: of copying one byte to the device, by home.
        disk: of reading one byte that is not cached.
        compute: of one pass without weights to wait for. Zero where unknown: it is the same for every placement.
        compute_known: whether `compute` is a measured figure.
        timed: whether costs are seconds.
        overlaps: whether copies can run beside the compute. A stand-in never does.
    """

    link: dict[Home, float]
    disk: float
    compute: float
    compute_known: bool
    timed: bool
    overlaps: bool


def costs_of(draft: Draft, rates: Rates | None) -> Costs:
    """The costs of a component; in bytes where a rate that it needs is unknown."""
    compute = None if rates is None else compute_seconds(draft.component, rates)
    if rates is None or not _known(draft, rates):
        return Costs(
            link={Home.mapped: 1.0, Home.pageable: 1.0},
            disk=1.0,
            compute=0.0,
            compute_known=False,
            timed=False,
            overlaps=False,
        )
    disk = _reading(draft, rates)
    mapped, pageable = rates.link_mapped_bytes_per_s, rates.link_pageable_bytes_per_s
    return Costs(
        link={Home.mapped: 1 / mapped if mapped else 0.0, Home.pageable: 1 / pageable if pageable else 0.0},
        disk=1 / disk if disk else 0.0,
        compute=compute or 0.0,
        compute_known=compute is not None,
        timed=True,
        overlaps=draft.overlaps,
    )


def _known(draft: Draft, rates: Rates) -> bool:
    return _reading(draft, rates) is not None and (draft.on_cpu or rates.link_pageable_bytes_per_s is not None)


def _reading(draft: Draft, rates: Rates) -> float | None:
    """How fast mapped weights come off the disk: by page faults, as the reader of this version takes them.

    Where faults were not measured, and the device does not compute on the mapping itself, the disk's rate stands in.
    """
    return rates.fault_bytes_per_s or (None if draft.on_cpu else rates.disk_bytes_per_s)


def compute_seconds(component: Component, rates: Rates) -> float | None:
    """Seconds of one pass's arithmetic, by its traced FLOPs at the rate of the dtype that most weights have."""
    if not isinstance(component.activations, TracedActivations) or not component.dtype_bytes or _generates(component):
        return None
    dtype = max(component.dtype_bytes, key=lambda name: (component.dtype_bytes[name], name))
    rate = rates.flops_per_s(dtype)
    return None if rate is None else component.activations.flops / rate


def _generates(component: Component) -> bool:
    """Whether a pass is one token of many, which the traced pass over all tokens at once does not tell the cost of."""
    return component.passes > 1 and is_generator(component.class_name)


def fate_link(costs: Costs, draft: Draft, stored: int, home: Home, hold: Hold) -> float:
    """The cost of copying one unit to the device, in a whole request."""
    if draft.on_cpu or hold is Hold.always:
        return 0.0
    return stored * costs.link[home] * (draft.component.passes if hold is Hold.layer else 1)


def reads_in_request(draft: Draft, home: Home, hold: Hold) -> int:
    """How often a mapped unit's bytes are read in a request; those that are copied or held always, not at all."""
    if home is not Home.mapped:
        return 0
    return 1 if hold is Hold.phase else draft.component.passes


def is_cached(draft: Draft, ledger: Ledger) -> bool:
    """Whether a component's mapped weights stay in the page cache from pass to pass: all of them, or none.

    Scans in the same order push out what comes next, so a cache that is a little too small keeps nothing.
    """
    host = ledger.budgets[HOST]
    mapped = sum(unit.bytes for unit in draft.units if unit.home is Home.mapped)
    needed = ledger.always[HOST] + (draft.phase_bytes() if draft.axis == HOST else 0)
    return host.available_bytes is not None and mapped + needed <= host.usable_bytes


def total_cost(ledger: Ledger, costs: dict[str, Costs]) -> float:
    """The simulated cost of a request: the sum over its phases."""
    return sum(
        run_phase(draft, costs[draft.component.name], cached=is_cached(draft, ledger)).seconds
        for draft in ledger.drafts
    )


def run_phase(draft: Draft, costs: Costs, *, cached: bool) -> Schedule:
    """The simulated phase of a finished draft. `cached`: whether mapped weights stay in the page cache all the time."""
    held = [unit for unit in draft.units if unit.hold is Hold.phase]
    begin = sum(_link(unit, draft, costs) + _disk(unit, costs) for unit in held)
    steps = _steps(draft, costs, cached=cached)
    return simulate(
        steps,
        passes=draft.component.passes,
        slots=draft.slots,
        prefetch_layers=draft.prefetch_layers,
        overlap=costs.overlaps and draft.slots > 1,
        begin_s=begin,
    )


def _steps(draft: Draft, costs: Costs, *, cached: bool) -> Sequence[Step]:
    total = sum(unit.bytes for unit in draft.units) or 1
    steps: list[Step] = []
    for unit in draft.units:
        streamed = unit.hold is Hold.layer
        reads = streamed or (draft.on_cpu and unit.home is Home.mapped)
        first = _disk(unit, costs) if reads else 0.0
        steps.append(
            Step(
                compute_s=costs.compute * unit.bytes / total,
                link_s=_link(unit, draft, costs) if streamed else 0.0,
                first_disk_s=first,
                disk_s=0.0 if cached else first,
                streamed=streamed,
            )
        )
    return steps


def _link(unit: Unit, draft: Draft, costs: Costs) -> float:
    return 0.0 if draft.on_cpu else unit.bytes * costs.link[unit.home]


def _disk(unit: Unit, costs: Costs) -> float:
    return unit.bytes * costs.disk if unit.home is Home.mapped else 0.0

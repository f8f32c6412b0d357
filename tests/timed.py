"""Machines with rates, and the cheapest of every placement that the planner could take there, on its own schedule."""

from itertools import product

from placewise.planner.budgets import budgets_of, copied_bytes_of
from placewise.planner.costs import costs_of, total_cost
from placewise.planner.draft import Ledger, Seat, draft_of, ledger_of
from placewise.planner.fates import fates_of
from placewise.planner.rates import rates_of
from placewise.plans.calibration import Calibration, ComputeRate, DiskRate, LinkRate, ReadMode
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Component, TracedActivations
from placewise.plans.units import MIB
from placewise.policies.selectors import resolve_overrides

from .questions import Case

FLOPS_PER_S = 1e11


def disk_of(
    *, faults: float, direct: float | None = None, chunk_bytes: int = 4 * MIB, depth: int = 4
) -> tuple[DiskRate, ...]:
    """A disk with these rates in bytes per second; page faults are slower than reads wherever a test wants reads."""
    reads = () if direct is None else ((ReadMode.direct, direct), (ReadMode.buffered, direct * 0.8))
    one = DiskRate(mode=ReadMode.faults, chunk_bytes=MIB, depth=1, bytes_per_s=faults)
    return one, *(DiskRate(mode=mode, chunk_bytes=chunk_bytes, depth=depth, bytes_per_s=rate) for mode, rate in reads)


def calibrated(
    machine: Machine, *disks: DiskRate, pageable: float = 4e9, pinned: float | None = None, mapped: float | None = None
) -> Machine:
    """The machine with a disk, links to its accelerators, and the same matrix products everywhere."""
    given = {"pageable": pageable, "pinned": pinned, "mapped": mapped}
    devices = [accelerator.device for accelerator in machine.accelerators]
    return machine.model_copy(
        update={
            "calibration": Calibration(
                measured_at="2026-01-01",
                fingerprint="test",
                disks=disks,
                links=tuple(
                    LinkRate(device=device, source=source, bytes_per_s=rate)  # type: ignore[arg-type]
                    for device in devices
                    for source, rate in given.items()
                    if rate is not None
                ),
                compute=tuple(
                    ComputeRate(device=device, dtype="F32", flops_per_s=FLOPS_PER_S) for device in ("cpu", *devices)
                ),
            )
        }
    )


def computing(component: Component, seconds: float, *, activations: int = 0) -> Component:
    """The component with a pass that takes so many seconds of arithmetic."""
    traced = TracedActivations(peak_bytes=activations, flops=round(seconds * FLOPS_PER_S))
    stored = sum(component.dtype_bytes.values())
    return component.model_copy(update={"activations": traced, "dtype_bytes": {"F32": stored}})


def placements(case: Case) -> int:
    """How many placements `least_seconds` would try."""
    ledger = _ledger(case)
    count = 1
    for draft in ledger.drafts:
        for unit in draft.units:
            count *= len(fates_of(unit, draft, case.policy, ledger.budgets))
    return count


def least_seconds(case: Case) -> float:
    """The least that any placement takes: every fate of every unit, with every number of slots."""
    ledger = _ledger(case)
    rates = rates_of(case.machine.calibration, _device(case))
    costs = {draft.component.name: costs_of(draft, rates) for draft in ledger.drafts}
    units = [(draft, unit) for draft in ledger.drafts for unit in draft.units]
    best = float("inf")
    for fates in product(*(fates_of(unit, draft, case.policy, ledger.budgets) for draft, unit in units)):
        for (draft, unit), fate in zip(units, fates, strict=True):
            ledger.move(draft, unit, *fate)
        for slots in product(range(1, case.policy.slots + 1), repeat=len(ledger.drafts)):
            for draft, count in zip(ledger.drafts, slots, strict=True):
                draft.grant_slots(count if draft.overlaps else 1, case.policy.prefetch_layers)
            seconds = total_cost(ledger, costs)
            best = best if ledger.short() else min(best, seconds)
    return best


def _device(case: Case) -> str:
    return next((accelerator.device for accelerator in case.machine.accelerators), "cpu")


def _ledger(case: Case) -> Ledger:
    device, ranks = _device(case), case.workload.ranks
    rates = {device: rates_of(case.machine.calibration, device)}
    wishes = resolve_overrides(case.policy, case.pipeline)
    copied = copied_bytes_of(case.pipeline.components)
    budgets = budgets_of(case.machine, case.policy, copied_bytes=copied, ranks=ranks)
    drafts = (
        draft_of(component, Seat(device=device), case.machine, wishes, rates, budgets, ranks)
        for component in sorted(case.pipeline.components, key=lambda component: component.name)
    )
    return ledger_of(tuple(drafts), budgets, ranks)

"""What a change of the machine would buy: each axis grown, and the whole plan solved again."""

from dataclasses import dataclass

from ..plans.document import Fits, Plan
from ..plans.machine import Machine, Measured, MemoryKind, Reading
from ..plans.units import GIB
from .budgets import HOST, LOCKED, PINNED
from .compile import compile_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What `more_bytes` on an axis save in each request. Seconds are null where they are not predicted."""

    axis: str
    more_bytes: int
    saves_s: float | None
    saves_moved_bytes: int


def worths(plan: Plan, *, more_bytes: int = GIB) -> tuple[Worth, ...]:
    """The worth of every axis with a known size, in the order of the plan's budgets. Empty for a refused plan."""
    if not isinstance(plan.verdict, Fits):
        return ()
    axes = (budget.axis for budget in plan.budgets if budget.available_bytes and budget.axis != PINNED)
    grown = ((axis, _replan(plan, axis, more_bytes)) for axis in axes)
    return tuple(
        Worth(
            axis=axis,
            more_bytes=more_bytes,
            saves_s=_saved_seconds(plan, other),
            saves_moved_bytes=moved_bytes(plan) - moved_bytes(other),
        )
        for axis, other in grown
    )


def request_seconds(plan: Plan) -> float | None:
    """Predicted seconds of a request: the sum over its phases; null where one is not predicted."""
    return _sum_of([phase.predicted.seconds for phase in plan.phases])


def transfer_seconds(plan: Plan) -> float | None:
    """Predicted seconds of moving weights in a request, were the compute to take none; null where not predicted."""
    return _sum_of([phase.predicted.transfer_s for phase in plan.phases])


def _sum_of(seconds: list[float | None]) -> float | None:
    known = [second for second in seconds if second is not None]
    return sum(known) if known and len(known) == len(seconds) else None


def moved_bytes(plan: Plan) -> int:
    """Bytes that a request copies to devices and reads from the disk at most."""
    return sum((phase.predicted.link_bytes or 0) + (phase.predicted.disk_bytes or 0) for phase in plan.phases)


def with_available(machine: Machine, axis: str, available_bytes: int) -> Machine:
    """The machine with so many bytes available on an axis; of devices with unified memory, on each.

    What may be pinned grows with the host; what may be locked is the process's own limit.
    """
    accelerators = tuple(
        accelerator.model_copy(update={"free": _figure(accelerator.free, available_bytes)})
        if axis in (accelerator.device, HOST) and (axis != HOST or accelerator.memory is MemoryKind.unified)
        else accelerator
        for accelerator in machine.accelerators
    )
    host = machine.host
    if axis in (HOST, PINNED):
        host = host.model_copy(update={"available": _figure(host.available, available_bytes)})
    if axis == LOCKED:
        host = host.model_copy(update={"memlock": _figure(host.memlock, available_bytes)})
    return machine.model_copy(update={"host": host, "accelerators": accelerators})


def _figure(reading: Reading, value: int) -> Measured:
    return Measured(value=value, source=reading.source if isinstance(reading, Measured) else "given")


def _replan(plan: Plan, axis: str, more_bytes: int) -> Plan:
    available = next(budget.available_bytes or 0 for budget in plan.budgets if budget.axis == axis)
    machine = with_available(plan.machine, axis, available + more_bytes)
    return compile_plan(plan.pipeline, machine, plan.policy, plan.workload, version=plan.made_by.version)


def _saved_seconds(plan: Plan, other: Plan) -> float | None:
    """By the whole schedule where it is known; else by its part that moves weights."""
    for measure in (request_seconds, transfer_seconds):
        now, then = measure(plan), measure(other)
        if now is not None and then is not None:
            return now - then
    return None

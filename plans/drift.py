"""Drift: which facts of a plan no longer hold. Names every one of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from .document import Plan
from .machine import Accelerator, Host, Machine, Measured, MemoryKind, Reading, Unlimited
from .pipeline import Component, Pipeline
from .policy import Home
from .readings import reading_text
from .units import format_bytes

SIMULATED = "sim"
"""The kind of accelerator that the executor makes itself, wherever it is: it cannot be absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFact:
    """One fact: where it stands, what the plan was made with, what it is now."""

    fact: str
    planned: str
    now: str


def drift(plan: Plan, pipeline: Pipeline, machine: Machine) -> tuple[ChangedFact, ...]:
    """Compare a plan's facts with facts of now, which `pipeline` and `machine` hold.

    Figures that vary from moment to moment, such as available memory, have changed when what the plan needs is no
    longer there. Figures that were given and not measured are compared in that way only.
    """
    return (*_pipeline(plan.pipeline, pipeline), *_host(plan, machine.host), *_accelerators(plan, machine))


def _pipeline(planned: Pipeline, now: Pipeline) -> Iterator[ChangedFact]:
    present = {component.name: component for component in now.components}
    for component in planned.components:
        if component.name in present:
            yield from _component(component, present.pop(component.name))
        else:
            yield ChangedFact(fact=f"component {component.name}", planned="present", now="absent")
    for name in present:
        yield ChangedFact(fact=f"component {name}", planned="absent", now="present")


def _component(planned: Component, now: Component) -> Iterator[ChangedFact]:
    where = f"component {planned.name}"
    for what in ("library", "class_name"):
        yield from _same(f"{where}, {what}", getattr(planned, what), getattr(now, what))
    present = {file.path: file for file in now.checkpoint.files}
    for file in planned.checkpoint.files:
        other = present.pop(file.path, None)
        if other is None:
            yield ChangedFact(fact=f"{where}, file {file.path}", planned="present", now="absent")
            continue
        for what in ("size_bytes", "mtime_ns", "header_sha256"):
            yield from _same(f"{where}, file {file.path}, {what}", getattr(file, what), getattr(other, what))
    for path in present:
        yield ChangedFact(fact=f"{where}, file {path}", planned="absent", now="present")


def _host(plan: Plan, now: Host) -> Iterator[ChangedFact]:
    planned = plan.machine.host
    if planned.binding != "given":
        yield from _same("host, platform", planned.platform, now.platform)
        yield from _same("host, total", reading_text(planned.total), reading_text(now.total))
        yield from _same("host, capped by", _caps(planned), _caps(now))
    yield from _room("host", plan, planned.available, now.available)
    yield from _lockable(plan, planned.memlock, now.memlock)


def _accelerators(plan: Plan, machine: Machine) -> Iterator[ChangedFact]:
    present = {accelerator.device: accelerator for accelerator in machine.accelerators}
    used = {placement.compute_device for placement in plan.placements}
    for planned in plan.machine.accelerators:
        if planned.kind == SIMULATED:
            continue
        now = present.pop(planned.device, None)
        if now is None:
            yield ChangedFact(fact=f"accelerator {planned.device}", planned=planned.name, now="absent")
        else:
            yield from _accelerator(plan, planned, now, used=planned.device in used)
    for device, accelerator in present.items():
        yield ChangedFact(fact=f"accelerator {device}", planned="absent", now=accelerator.name)


def _accelerator(plan: Plan, planned: Accelerator, now: Accelerator, *, used: bool) -> Iterator[ChangedFact]:
    where = f"accelerator {planned.device}"
    given = isinstance(planned.total, Measured) and planned.total.source == "given"
    if not given:
        yield from _same(f"{where}, name", planned.name, now.name)
        yield from _same(f"{where}, total", reading_text(planned.total), reading_text(now.total))
    for what in ("memory", "pinned_memory", "streams"):
        yield from _same(f"{where}, {what}", getattr(planned, what), getattr(now, what))
    if used:
        unified = planned.memory is MemoryKind.unified
        yield from _room("host" if unified else planned.device, plan, planned.free, now.free)


def _room(axis: str, plan: Plan, planned: Reading, now: Reading) -> Iterator[ChangedFact]:
    """Whether what the plan spends on an axis is still to be had, with half of the reserve.

    The other half is for ups and downs: else a plan that fills what was available would have drifted a moment later.
    """
    ranks = plan.workload.ranks if axis == "host" else 1
    peak = ranks * max((phase.predicted.peak_bytes.get(axis) or 0 for phase in plan.phases), default=0)
    reserve = next((budget.reserve_bytes for budget in plan.budgets if budget.axis == axis), 0) // 2
    if peak and now != planned and not (isinstance(now, Measured) and now.value >= peak + reserve):
        need = f"the plan needs {format_bytes(peak)} and {format_bytes(reserve)} free beside it"
        yield ChangedFact(fact=f"{axis}, available", planned=reading_text(planned), now=f"{reading_text(now)}; {need}")


def _lockable(plan: Plan, planned: Reading, now: Reading) -> Iterator[ChangedFact]:
    """Whether what the plan locks in memory may still be locked."""
    segments = (segment for placement in plan.placements for segment in placement.segments)
    locked = sum(segment.packed_bytes for segment in segments if segment.home is Home.locked)
    enough = isinstance(now, Unlimited) or (isinstance(now, Measured) and now.value >= locked)
    if locked and not enough:
        need = f"the plan locks {format_bytes(locked)}"
        yield ChangedFact(fact="locked, available", planned=reading_text(planned), now=f"{reading_text(now)}; {need}")


def _same(fact: str, planned: object, now: object) -> Iterator[ChangedFact]:
    if planned != now:
        yield ChangedFact(fact=fact, planned=str(planned), now=str(now))


def _caps(host: Host) -> str:
    caps = [f"{cap.hierarchy} {cap.path} {cap.kind} {format_bytes(cap.limit_bytes)}" for cap in host.caps]
    return ", ".join(caps) or "nothing"

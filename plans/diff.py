"""The difference of two plans: which units moved, what that does to the figures, and what changed beneath."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from .document import Fits, Plan
from .record import Record
from .subjects import subject_of
from .units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Units that rest or stay otherwise: `subject` by name, and what they were and are (home/hold on device)."""

    subject: str
    bytes: int
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs. `causes` are changes of what the plans were made from, `figures` of what they predict."""

    causes: tuple[str, ...]
    moves: tuple[Move, ...]
    figures: tuple[str, ...]


def diff_plans(before: Plan, after: Plan) -> Difference:
    """What moved from one plan to another; equal plans differ in nothing."""
    return Difference(
        causes=tuple(_causes(before, after)), moves=tuple(_moves(before, after)), figures=tuple(_figures(before, after))
    )


def _causes(before: Plan, after: Plan) -> Iterator[str]:
    """What the plans were made from, named as far as a reader needs it to look further."""
    for what in ("pipeline", "workload", "policy"):
        old, new = cast(Record, getattr(before, what)), cast(Record, getattr(after, what))
        fields = [name for name, value in old if value != getattr(new, name)]
        if fields:
            yield f"{what}: {', '.join(fields)} differ"
    old_budgets = {budget.axis: budget for budget in before.budgets}
    for budget in after.budgets:
        old_budget = old_budgets.pop(budget.axis, None)
        if old_budget is None:
            yield f"{budget.axis}: new"
        elif old_budget.usable_bytes != budget.usable_bytes:
            usable = f"{format_bytes(old_budget.usable_bytes)} -> {format_bytes(budget.usable_bytes)}"
            yield f"{budget.axis}: usable {usable}"
    yield from (f"{axis}: gone" for axis in old_budgets)
    if before.machine.calibration != after.machine.calibration:
        yield "calibration: differs"


def _moves(before: Plan, after: Plan) -> Iterator[Move]:
    """Runs of units with one fate before and one after, where the two are not the same."""
    old, new = _fates(before), _fates(after)
    sizes = _sizes(before) | _sizes(after)
    runs: list[tuple[str, str | None, list[int], str, str]] = []
    for component, stack, layer in sorted({*old, *new}, key=lambda unit: (unit[0], unit[1] or "", unit[2])):
        was, now = old.get((component, stack, layer), "not there"), new.get((component, stack, layer), "not there")
        if was == now:
            continue
        if runs and runs[-1][:2] == (component, stack) and runs[-1][3:] == (was, now) and runs[-1][2][-1] == layer - 1:
            runs[-1][2].append(layer)
        else:
            runs.append((component, stack, [layer], was, now))
    for component, stack, layers, was, now in runs:
        moved = sum(sizes[component, stack, layer] for layer in layers)
        yield Move(
            subject=subject_of(component, stack, [(layers[0], layers[-1] + 1)]), bytes=moved, before=was, after=now
        )


def _figures(before: Plan, after: Plan) -> Iterator[str]:
    if before.verdict.kind != after.verdict.kind:
        yield f"verdict: {before.verdict.kind} -> {after.verdict.kind}"
    if not (isinstance(before.verdict, Fits) and isinstance(after.verdict, Fits)):
        return
    for budget in after.budgets:
        old, new = (max(p.predicted.peak_bytes.get(budget.axis) or 0 for p in plan.phases) for plan in (before, after))
        if old != new:
            yield f"peak of {budget.axis}: {format_bytes(old)} -> {format_bytes(new)}"
    old_link, new_link = (sum(phase.predicted.link_bytes or 0 for phase in plan.phases) for plan in (before, after))
    if old_link != new_link:
        yield f"copied to devices per request: {format_bytes(old_link)} -> {format_bytes(new_link)}"
    seconds = [[phase.predicted.seconds for phase in plan.phases] for plan in (before, after)]
    if None not in seconds[0] and None not in seconds[1]:
        old_s, new_s = (sum(second or 0.0 for second in each) for each in seconds)
        if old_s != new_s:
            yield f"seconds per request: {old_s:.3f} -> {new_s:.3f}"


def _fates(plan: Plan) -> dict[tuple[str, str | None, int], str]:
    return {
        (placement.component, segment.stack, layer): f"{segment.home}/{segment.hold} on {placement.compute_device}"
        for placement in plan.placements
        for segment in placement.segments
        for run in (segment.layers or ((0, 1),))
        for layer in range(*run)
    }


def _sizes(plan: Plan) -> dict[tuple[str, str | None, int], int]:
    sizes: dict[tuple[str, str | None, int], int] = {}
    for component in plan.pipeline.components:
        sizes[component.name, None, 0] = component.fixed_bytes
        for stack in component.stacks:
            for size in stack.sizes:
                sizes |= {(component.name, stack.name, layer): size.layer_bytes for layer in range(*size.layers)}
    return sizes

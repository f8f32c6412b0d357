"""A plan for people: where everything goes, the peaks against the budgets, why, and what was not taken."""

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .document import Budget, Decision, Fits, Placement, Plan, Predicted, Refused, Segment
from .pipeline import Pipeline, Run
from .units import format_bytes

_BAR_CELLS = 24
_STYLES = {"device": "green", "pageable": "cyan", "pinned": "cyan", "mapped": "yellow", "locked": "yellow"}


def print_plan(plan: Plan, console: Console) -> None:
    """Print the dry run of a plan."""
    console.print(Group(*_sections(plan)))


def print_pipeline(pipeline: Pipeline, console: Console) -> None:
    """Print what a checkpoint holds."""
    console.print(Text(f"{pipeline.name}: {_count(len(pipeline.components), 'component')}", style="bold"))
    console.print(_inventory(pipeline))
    for note in pipeline.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _sections(plan: Plan) -> Iterator[RenderableType]:
    yield Text.assemble((plan.pipeline.name, "bold"), f" under the policy {plan.policy.preset}")
    yield _inventory(plan.pipeline)
    if plan.placements:
        yield Text("\nPlacement", style="bold")
        yield _placements(plan)
        yield Text("\nPeaks", style="bold")
        yield _peaks(plan)
        yield Text("\nPhases of a request", style="bold")
        yield _phases(plan)
    if plan.decisions:
        yield Text("\nWhy", style="bold")
        yield from (_decision(decision) for decision in plan.decisions)
    if plan.notes:
        yield Text("\nNotes", style="bold")
        yield from (Text(f"  {note}") for note in plan.notes)
    yield Text()
    yield _verdict(plan)


def _inventory(pipeline: Pipeline) -> Table:
    table = _table(
        "component", "class", "size", "dtypes", "tensors", "layers", "passes", right=("size", "tensors", "passes")
    )
    for component in pipeline.components:
        stacks = ", ".join(f"{stack.name or '(root)'} x {stack.layers}" for stack in component.stacks)
        table.add_row(
            component.name,
            component.class_name or "(yours)",
            format_bytes(sum(component.dtype_bytes.values())),
            ", ".join(component.dtype_bytes),
            str(component.tensors),
            stacks or "none",
            str(component.passes),
        )
    return table


def _placements(plan: Plan) -> Table:
    table = _table("component", "part", "size", "home", "hold", "on", "which is", right=("size",))
    for placement in plan.placements:
        for segment in placement.segments:
            table.add_row(
                placement.component,
                part_of(segment),
                format_bytes(segment.bytes),
                Text(segment.home, style=_STYLES[segment.home]),
                segment.hold,
                placement.compute_device,
                way_of(placement, segment),
            )
    return table


def part_of(segment: Segment) -> str:
    """A segment for people: `blocks 0-11, 30-59`, last layers included; or `fixed part`."""
    if segment.stack is None:
        return "fixed part"
    return " ".join(filter(None, (segment.stack, ", ".join(map(_run, segment.layers)))))


def _run(run: Run) -> str:
    start, stop = run
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def way_of(placement: Placement, segment: Segment) -> str:
    """The familiar name of a home and hold, with the slots of layerwise offload; each is as large as a layer."""
    if placement.sharding is not None:
        ranks = " x ".join(map(str, placement.sharding.mesh))
        return f"one part of {ranks}, offloaded" if segment.home == "pageable" else f"one part of {ranks}"
    if segment.hold == "always":
        return "resident" if segment.home == "device" else f"{segment.home} in place"
    if segment.hold == "phase" or placement.staging is None:
        return "component offload"
    staging = placement.staging
    ahead = f", {staging.prefetch_layers} ahead" if staging.prefetch_layers else ""
    reads = f", {staging.reader} reads" if staging.reader != "mapping" and segment.home == "mapped" else ""
    return f"layerwise offload, {_count(staging.slots, 'slot')}{ahead}{reads}"


def _peaks(plan: Plan) -> Table:
    table = _table(
        "axis", "", "peak", "usable", "available", "in reserve", right=("peak", "usable", "available", "in reserve")
    )
    for budget in plan.budgets:
        if not _is_of_interest(budget.axis, plan):
            continue
        peak = max(phase.predicted.peak_bytes.get(budget.axis) or 0 for phase in plan.phases)
        known = budget.available_bytes is not None
        table.add_row(
            budget.axis,
            _bar(peak, budget),
            format_bytes(peak),
            format_bytes(budget.usable_bytes) if known else "unknown",
            "unknown" if budget.available_bytes is None else format_bytes(budget.available_bytes),
            format_bytes(budget.reserve_bytes) if known else "unknown",
        )
    cache = max(phase.predicted.peak_bytes.get("page_cache") or 0 for phase in plan.phases)
    table.add_row("page cache", Text("soft: costs speed, never life", style="dim"), format_bytes(cache), "", "", "")
    return table


def _is_of_interest(axis: str, plan: Plan) -> bool:
    """Parts of the host are only where something is pinned or locked."""
    return axis not in ("pinned", "locked") or any(phase.predicted.peak_bytes.get(axis) for phase in plan.phases)


def _phases(plan: Plan) -> Table:
    figures = ("passes", "predicted", "copied to device", "read from disk")
    table = _table("component", *figures, "least left on", right=figures)
    for phase in plan.phases:
        predicted = phase.predicted
        table.add_row(
            phase.component,
            str(phase.passes),
            _seconds(predicted),
            _known(predicted.link_bytes),
            "unknown" if predicted.disk_bytes is None else f"at most {format_bytes(predicted.disk_bytes)}",
            phase.binding or "unknown",
        )
    return table


def _seconds(predicted: Predicted) -> str:
    if predicted.seconds is not None:
        return f"{predicted.seconds:.2f} s"
    return "unknown" if predicted.transfer_s is None else f"{predicted.transfer_s:.2f} s + compute"


def _known(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)


def _bar(peak: int, budget: Budget) -> Text:
    if not budget.usable_bytes:
        return Text("-" * _BAR_CELLS, style="dim")
    # Any use at all shows: an empty bar would say that nothing is there.
    filled = min(_BAR_CELLS, -(-peak * _BAR_CELLS // budget.usable_bytes))
    return Text.assemble(("█" * filled, "green"), ("░" * (_BAR_CELLS - filled), "dim"))


def _decision(decision: Decision) -> Text:
    text = Text.assemble(f"  {decision.subject}: ", (decision.choice, "bold"), f" by {decision.rule}")
    facts = ", ".join(_figure(name, value) for name, value in decision.because.items())
    text.append(f"\n    {facts}", style="dim")
    for rejected in decision.rejected:
        text.append(f"\n    not {rejected.choice}: {rejected.why}")
    return text


def _figure(name: str, value: int | None) -> str:
    if value is None:
        return f"{name} unknown"
    if name == "proven_optimal":
        return "proven optimal" if value else "not proven optimal"
    if name == "microseconds":
        return f"{value / 1e6:.3f} s of phases"
    if name == "bound_microseconds":
        return f"none is below {value / 1e6:.3f} s"
    if name.endswith("_bytes") or name == "bytes":
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(value)}"
    return f"{name.replace('_', ' ')} {value}"


def _verdict(plan: Plan) -> Text:
    match plan.verdict:
        case Fits() as fits:
            left = ", ".join(
                f"{axis} {'unknown' if margin is None else format_bytes(margin)}"
                for axis, margin in fits.margin_bytes.items()
                if _is_of_interest(axis, plan)
            )
            return Text.assemble(("fits", "bold green"), f" ({fits.confidence}); left: {left}")
        case Refused() as refused:
            return _refusal(refused)


def _refusal(refused: Refused) -> Text:
    text = Text("refused", style="bold red")
    for short in refused.short:
        text.append(
            f"\n  {short.axis} is short in the phase of {short.component}: "
            f"needs {format_bytes(short.need_bytes)}, usable are {format_bytes(short.have_bytes)}",
            style="not bold default",
        )
    for broken in refused.broken:
        text.append(f"\n  {broken.subject}: {broken.why} (rule {broken.rule})", style="not bold default")
    if refused.nearest:
        changes = ", ".join(f"{format_bytes(change.to_available_bytes)} of {change.axis}" for change in refused.nearest)
        text.append(f"\n  it would fit with {changes} available", style="not bold default")
    return text


def _table(*names: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")

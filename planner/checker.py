"""An independent check of a finished plan: re-derives what must hold from the document alone.

It shares no code with the passes that build plans, so that a mistake there is not repeated here.
"""

from collections import Counter

from ..plans.document import Fits, Phase, Placement, Plan, Segment
from ..plans.errors import PlacewiseError
from ..plans.machine import Machine
from ..plans.pipeline import Component, LayerSize


class UnsoundPlanError(PlacewiseError):
    """Our own fault: a plan that breaks an invariant was about to be returned."""


_COPIES = ("pinned", "pageable", "mapped", "locked")
_ON_DEVICE = {"always": ("device",), "phase": _COPIES, "layer": _COPIES}
_ON_CPU = {"always": ("device", "mapped", "locked"), "phase": (), "layer": ("mapped",)}
_TRANSFORMED_ON_CPU = {"always": ("device",), "phase": ("mapped",), "layer": ("mapped",)}
"""The homes that go with each hold. On the CPU weights are used where they rest, or read into slots off the mapping.

Those that are transformed do not rest there as they are used.
"""

_BLOCK_BYTES = 4096
"""Reads into slots are of whole blocks: a range of a file begins and ends within one."""


def check_plan(plan: Plan) -> None:
    """Check coverage, budgets and holds of a plan that fits.

    Raises:
        UnsoundPlanError: naming the first invariant that does not hold.
    """
    if not isinstance(plan.verdict, Fits):
        if plan.placements:
            raise UnsoundPlanError("a refused plan places nothing")
        return
    components = {component.name: component for component in plan.pipeline.components}
    if [placement.component for placement in plan.placements] != list(components):
        raise UnsoundPlanError("each component is placed exactly once, in the order of the phases")
    if [(phase.component, phase.passes) for phase in plan.phases] != [
        (component.name, component.passes) for component in plan.pipeline.components
    ]:
        raise UnsoundPlanError("each component has exactly one phase, in the order of the data flow")
    for placement in plan.placements:
        _check_coverage(placement, components[placement.component])
        _check_holds(placement, components[placement.component])
        _check_slots(placement, components[placement.component])
        _check_sharding(placement, components[placement.component], plan.workload.ranks)
        _check_unified(placement, plan.machine)
    _check_budgets(plan)


def _check_coverage(placement: Placement, component: Component) -> None:
    """Every unit stands in exactly one segment, and the segments' bytes are the units' bytes."""
    expected: Counter[tuple[str | None, int]] = Counter()
    sizes: dict[tuple[str | None, int], tuple[int, int]] = {}
    parts = placement.sharding is not None
    if component.fixed_bytes:
        part = component.fixed_part_bytes or 0
        sizes[None, 0] = (part, part) if parts else (component.fixed_bytes, component.fixed_packed_bytes)
    for stack in component.stacks:
        for size in stack.sizes:
            part = size.part_bytes or 0
            for layer in range(*size.layers):
                sizes[stack.name, layer] = (part, part) if parts else (size.layer_bytes, size.packed_bytes)
    for segment in placement.segments:
        units = _units(segment)
        expected.update(units)
        for position, stated in enumerate((segment.bytes, segment.packed_bytes)):
            if sum(sizes.get(unit, (0, 0))[position] for unit in units) != stated:
                raise UnsoundPlanError(
                    f"{component.name}: a segment of '{segment.stack}' states {stated} bytes wrongly"
                )
    if expected != Counter(sizes.keys()):
        raise UnsoundPlanError(f"{component.name}: not every unit stands in exactly one segment")


def _units(segment: Segment) -> list[tuple[str | None, int]]:
    if segment.stack is None:
        return [(None, 0)]
    return [(segment.stack, layer) for run in segment.layers for layer in range(*run)]


def _transformed_units(component: Component) -> set[tuple[str | None, int]]:
    units: set[tuple[str | None, int]] = {(None, 0)} if component.fixed_transformed_bytes else set()
    for stack in component.stacks:
        for size in stack.sizes:
            units |= {(stack.name, layer) for layer in range(*size.layers) if size.transformed_bytes}
    return units


def _check_holds(placement: Placement, component: Component) -> None:
    transformed = _transformed_units(component)
    for segment in placement.segments:
        some = not transformed.isdisjoint(_units(segment))
        on_cpu = _TRANSFORMED_ON_CPU if some else _ON_CPU
        allowed = on_cpu if placement.compute_device == "cpu" else _ON_DEVICE
        layered = segment.hold == "layer"
        if segment.home not in allowed[segment.hold] or (segment.stack is None and layered):
            raise UnsoundPlanError(
                f"{placement.component}: {segment.home}/{segment.hold} on {placement.compute_device}"
            )
    if (placement.staging is not None) != any(segment.hold == "layer" for segment in placement.segments):
        raise UnsoundPlanError(f"{placement.component}: staging goes with streamed layers, and only with them")


def _check_slots(placement: Placement, component: Component) -> None:
    """Every streamed layer fits a slot, and one slot at least is not being filled ahead."""
    if placement.staging is None:
        return
    streamed = {unit for segment in placement.segments if segment.hold == "layer" for unit in _units(segment)}
    in_blocks = placement.compute_device == "cpu" and placement.staging.reader != "mapping"
    largest = max(
        max(
            (size.part_bytes or 0) if placement.sharding else size.packed_bytes,
            _in_blocks(size, stack.extents) if in_blocks else 0,
        )
        for stack in component.stacks
        for size in stack.sizes
        if any((stack.name, layer) in streamed for layer in range(*size.layers))
    )
    if placement.staging.slot_bytes < largest:
        raise UnsoundPlanError(
            f"{placement.component}: slots of {placement.staging.slot_bytes} bytes, a layer needs {largest}"
        )
    if placement.staging.prefetch_layers >= placement.staging.slots:
        raise UnsoundPlanError(f"{placement.component}: all {placement.staging.slots} slots are filled ahead of use")


def _check_sharding(placement: Placement, component: Component, ranks: int) -> None:
    """Every rank has a part, and a pass has room for its fixed part and the layers that are whole at once."""
    if placement.sharding is None:
        return
    if placement.sharding.mesh != (ranks,) or placement.sharding.dimension != 0:
        raise UnsoundPlanError(f"{placement.component}: sharded over {placement.sharding.mesh} of {ranks} ranks")
    layers = [size.packed_bytes for stack in component.stacks for size in stack.sizes]
    least = component.fixed_packed_bytes + max([component.fixed_packed_bytes, *(3 * layer for layer in layers)])
    if placement.sharding.gathered_bytes < least:
        raise UnsoundPlanError(f"{placement.component}: a pass gathers {least} bytes")


def _check_unified(placement: Placement, machine: Machine) -> None:
    """Where device and host are one memory, layers pass one at a time: copies never run beside the compute."""
    shares = any(each.device == placement.compute_device and each.memory == "unified" for each in machine.accelerators)
    if shares and placement.staging is not None and placement.staging.slots > 1:
        raise UnsoundPlanError(f"{placement.component}: {placement.staging.slots} slots with unified memory")


def _in_blocks(size: LayerSize, extents: int) -> int:
    """What is read in whole blocks, and what is transformed behind it: no more than is packed beside what is read."""
    read = size.layer_bytes - size.transformed_bytes
    return _whole_blocks(read, extents) + (size.packed_bytes - read if size.transformed_bytes else 0)


def _whole_blocks(count: int, extents: int) -> int:
    return (-(-count // _BLOCK_BYTES) + 2 * extents + 1) * _BLOCK_BYTES


def _check_budgets(plan: Plan) -> None:
    """The peak of each phase, summed anew from placements, is within every axis that was measured."""
    budgets = {budget.axis: budget for budget in plan.budgets}
    always: Counter[str] = Counter()
    for placement in plan.placements:
        pool = placement.compute_device if placement.compute_device in budgets else "host"
        for segment in placement.segments:
            axes = {"device": [pool], "pageable": ["host"], "pinned": ["host", "pinned"], "locked": ["locked"]}
            for axis in axes.get(segment.home, []):
                always[axis] += segment.packed_bytes
    always["host"] += -(-always["locked"] // plan.workload.ranks)
    for placement, phase in zip(plan.placements, plan.phases, strict=True):
        pool = placement.compute_device if placement.compute_device in budgets else "host"
        for axis, budget in budgets.items():
            peak = always[axis] + (_phase_bytes(placement, plan) if axis == pool else 0)
            peak += _buffer_bytes(placement) if axis == "host" else 0
            if phase.predicted.peak_bytes.get(axis) != peak:
                raise UnsoundPlanError(f"{phase.component}: predicted peak of {axis} is not {peak} bytes")
            if budget.available_bytes is not None and peak > budget.usable_bytes:
                raise UnsoundPlanError(f"{phase.component}: {peak} bytes on {axis}, usable are {budget.usable_bytes}")
            _check_unmeasured(phase, axis, peak, measured=budget.available_bytes is not None)


def _check_unmeasured(phase: Phase, axis: str, peak: int, *, measured: bool) -> None:
    if not measured and axis not in ("host", "pinned") and peak:
        raise UnsoundPlanError(f"{phase.component}: {peak} bytes on {axis}, which was not measured")


def _phase_bytes(placement: Placement, plan: Plan) -> int:
    held = sum(segment.packed_bytes for segment in placement.segments if segment.hold == "phase")
    slots = placement.staging.slots * placement.staging.slot_bytes if placement.staging else 0
    component = next(part for part in plan.pipeline.components if part.name == placement.component)
    gathered = placement.sharding.gathered_bytes if placement.sharding else 0
    return held + slots + gathered + _activation_bytes(component, placement.chunk_tokens)


def _activation_bytes(component: Component, chunk_tokens: int | None) -> int:
    activations = component.activations
    if chunk_tokens is None:
        return 0 if activations.kind == "unknown" else activations.peak_bytes
    peaks = {each.chunk_tokens: each.peak_bytes for each in activations.chunked} if activations.kind == "traced" else {}
    if chunk_tokens not in peaks:
        raise UnsoundPlanError(f"{component.name}: nobody knows the peak of chunks of {chunk_tokens} tokens")
    return peaks[chunk_tokens]


def _buffer_bytes(placement: Placement) -> int:
    """Host memory that reads land in on their way to another device."""
    staging = placement.staging
    if staging is None or placement.compute_device == "cpu":
        return 0
    return (staging.chunk_bytes or 0) * (staging.depth or 0)

"""Questions to the planner, built by hand, and short ways to what it answers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from placewise.planner.compile import compile_plan
from placewise.plans.document import Decision, Fits, Placement, Plan, Refused
from placewise.plans.machine import (
    Accelerator,
    Host,
    Machine,
    Measured,
    MemoryKind,
    Reading,
    Unmeasurable,
)
from placewise.plans.pipeline import (
    Activations,
    Cast,
    Checkpoint,
    Component,
    Deinterleave,
    File,
    GivenActivations,
    LayerSize,
    Pipeline,
    Stack,
    Transpose,
    UnknownActivations,
    Workload,
)
from placewise.plans.policy import Override, Policy
from placewise.policies.presets import load_preset

GIB = 1 << 30
HUGE = 1 << 60
"""More than any pipeline of the tests can ask for, reserves among it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that a plan is made from."""

    pipeline: Pipeline
    machine: Machine
    policy: Policy
    workload: Workload

    def compile(self) -> Plan:
        return compile_plan(self.pipeline, self.machine, self.policy, self.workload, version="0")

    def on(self, machine: Machine) -> "Case":
        return replace(self, machine=machine)

    def under(self, policy: Policy) -> "Case":
        return replace(self, policy=policy)


def packed_units(component: Component) -> list[int]:
    """What each unit takes in memory: the fixed part, if there is one, and every layer."""
    fixed = [component.fixed_packed_bytes] if component.fixed_bytes else []
    sizes = [size for stack in component.stacks for size in stack.sizes]
    return fixed + [size.packed_bytes for size in sizes for _ in range(*size.layers)]


def stack_of(name: str, *layers: int) -> Stack:
    """A stack whose layers take these bytes, stored as packed."""
    sizes = (LayerSize(layers=(at, at + 1), layer_bytes=size, packed_bytes=size) for at, size in enumerate(layers))
    return Stack(name=name, layers=len(layers), extents=1, sizes=tuple(sizes))


def transformed(stack: Stack, factor: float = 1) -> Stack:
    """The stack with all its weights transformed on their way, to so many times as many bytes."""
    sizes = (
        size.model_copy(
            update={"packed_bytes": round(size.packed_bytes * factor), "transformed_bytes": size.layer_bytes}
        )
        for size in stack.sizes
    )
    return stack.model_copy(update={"sizes": tuple(sizes), "extents": 0})


def component_of(
    name: str,
    *stacks: Stack,
    fixed: int = 0,
    fixed_packed: int | None = None,
    fixed_transformed: int = 0,
    passes: int = 1,
    activations: int | None = None,
) -> Component:
    """A component of one file. Without `activations` nobody measured them. What is transformed is so in every way."""
    layers = sum(size.layer_bytes * (size.layers[1] - size.layers[0]) for stack in stacks for size in stack.sizes)
    file = File(path="model.safetensors", size_bytes=fixed + layers, mtime_ns=1, header_sha256="0" * 64)
    some = fixed_transformed or any(size.transformed_bytes for stack in stacks for size in stack.sizes)
    known: Activations = UnknownActivations() if activations is None else GivenActivations(peak_bytes=activations)
    return Component(
        name=name,
        library=None,
        class_name=None,
        checkpoint=Checkpoint(root=name, files=(file,)),
        tensors=1,
        dtype_bytes={"U8": fixed + layers},
        stacks=stacks,
        fixed_bytes=fixed,
        fixed_packed_bytes=fixed if fixed_packed is None else fixed_packed,
        fixed_transformed_bytes=fixed_transformed,
        passes=passes,
        activations=known,
        transforms=TRANSFORMS if some else (),
    )


def host_of(available: Reading, memlock: Reading | None = None) -> Host:
    unknown = Unmeasurable(why="not asked")
    return Host(
        platform="linux",
        available=available,
        total=available,
        binding="psutil",
        memlock=memlock or unknown,
        shared_memory=unknown,
    )


def accelerator_of(device: str, free: Reading, *, unified: bool = False, streams: bool = True) -> Accelerator:
    return Accelerator(
        device=device,
        kind=device.partition(":")[0],
        name="toy",
        memory=MemoryKind.unified if unified else MemoryKind.separate,
        total=free,
        free=free,
        pinned_memory=not unified,
        streams=streams,
    )


def measured(value: int) -> Measured:
    return Measured(value=value, source="given")


def machine_of(host: int | Host, *accelerators: Accelerator) -> Machine:
    """A machine of which the available memory is known, or the host was measured."""
    return Machine(host=host if isinstance(host, Host) else host_of(measured(host)), accelerators=accelerators)


def cuda(free: int, *, index: int = 0, streams: bool = True) -> Accelerator:
    """A device with memory of its own, so many bytes of it free."""
    return accelerator_of(f"cuda:{index}", measured(free), streams=streams)


def mps(free: int) -> Accelerator:
    """A device that shares the host's memory."""
    return accelerator_of("mps", measured(free), unified=True, streams=False)


def policy_of(preset: str = "auto", *overrides: Override, **changed: object) -> Policy:
    """A preset with these overrides, and these of its fields changed."""
    return load_preset(preset).model_copy(update={"overrides": overrides, **changed})


TRANSFORMS = (
    Deinterleave(tensor="*", groups=48, parts=3),
    Transpose(tensor="*"),
    Cast(tensor="*", dtype="BF16"),
)

BARE = {"reserve_bytes": 0, "device_reserve_bytes": 0}
"""No reserves, so that budgets in tests are round numbers. The host's bound is still excluded: one byte less."""


def plan_of(
    machine: Machine, *components: Component, policy: Policy | None = None, edges: Iterable[tuple[str, str]] = ()
) -> Plan:
    """The plan for components on a machine, under `auto` where no policy is given."""
    pipeline = Pipeline(name="toy", components=components, edges=tuple(edges))
    return compile_plan(pipeline, machine, policy or policy_of(), Workload(), version="0")


def placement(plan: Plan, component: str) -> Placement:
    """Where a component was placed, after a check that the plan fits."""
    fits(plan)
    return next(placed for placed in plan.placements if placed.component == component)


def fates(plan: Plan, component: str) -> list[str]:
    """A component's segments in short: `fixed mapped/phase`, `blocks[0:2,3:4] device/always`."""
    found: list[str] = []
    for segment in placement(plan, component).segments:
        runs = ",".join(f"{start}:{stop}" for start, stop in segment.layers)
        name = "fixed" if segment.stack is None else f"{segment.stack}[{runs}]"
        found.append(f"{name} {segment.home}/{segment.hold}")
    return found


def decision(plan: Plan, subject: str) -> Decision:
    """The one decision about a subject."""
    (found,) = [decision for decision in plan.decisions if decision.subject == subject]
    return found


def with_memory(machine: Machine, available: Iterable[tuple[str, int]]) -> Machine:
    """The machine with these bytes available on these axes. A device with unified memory is given the host's too.

    What may be pinned is a share of the host's, so that the larger of both figures is the host's.
    """
    by_axis = dict(available)
    if "pinned" in by_axis:
        by_axis["host"] = max(by_axis["pinned"], by_axis.get("host", 0))
    host = machine.host
    if "host" in by_axis:
        host = host.model_copy(update={"available": measured(by_axis["host"])})
    if "locked" in by_axis:
        host = host.model_copy(update={"memlock": measured(by_axis["locked"])})
    accelerators: list[Accelerator] = []
    for accelerator in machine.accelerators:
        axis = "host" if accelerator.memory is MemoryKind.unified else accelerator.device
        free = measured(by_axis[axis]) if axis in by_axis else accelerator.free
        accelerators.append(accelerator.model_copy(update={"free": free}))
    return machine.model_copy(update={"host": host, "accelerators": tuple(accelerators)})


def fits(plan: Plan) -> Fits:
    """The verdict of a plan that fits."""
    assert isinstance(plan.verdict, Fits), plan.verdict
    return plan.verdict


def refused(plan: Plan) -> Refused:
    """The verdict of a plan that is refused."""
    assert isinstance(plan.verdict, Refused), plan.verdict
    return plan.verdict

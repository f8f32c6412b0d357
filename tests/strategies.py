"""Hypothesis strategies: the only home of generators of pipelines, machines, policies and workloads.

A `Case` is all that the planner is given. Its machine's sizes hug the boundaries that the pipeline's own sizes make,
so that "just fits" and "one byte short" are common.
"""

from collections.abc import Sequence
from typing import Literal

from hypothesis import assume
from hypothesis import strategies as st
from placewise.plans.calibration import Calibration, ComputeRate, DiskRate, LinkRate, ReadMode
from placewise.plans.document import Plan, Refused
from placewise.plans.machine import Machine, Malformed, Measured, Reading, Unlimited, Unmeasurable
from placewise.plans.pipeline import (
    Activations,
    Component,
    GivenActivations,
    LayerSize,
    Pipeline,
    Stack,
    UnknownActivations,
    Workload,
)
from placewise.plans.policy import Copies, Hold, Home, Override, Policy, Residency
from placewise.policies.presets import PRESETS, load_preset

from .questions import GIB, HUGE, Case, accelerator_of, component_of, fits, host_of, measured, packed_units, with_memory

COMPONENTS = ("audio_vae", "encodeur_é", "text_encoder", "transformer", "transformer_2", "vae")
SOURCES: tuple[Literal["pageable", "pinned", "mapped"], ...] = ("pageable", "pinned", "mapped")
STACKS = ("", "blocks", "model.layers", "single_blocks")


byte_counts = st.one_of(st.integers(0, 4096), st.integers(0, 20 * GIB), st.sampled_from([0, 1, 64, GIB, 4 * GIB]))
workloads = st.builds(
    Workload,
    batch=st.integers(1, 4),
    steps=st.none() | st.integers(0, 50),
    tokens=st.none() | st.integers(1, 512),
    height=st.none() | st.just(768),
    width=st.none() | st.just(1344),
    frames=st.none() | st.integers(1, 124),
)
activations: st.SearchStrategy[Activations] = st.one_of(
    st.just(UnknownActivations()), byte_counts.map(lambda count: GivenActivations(peak_bytes=count))
)


@st.composite
def weights(draw: st.DrawFn) -> tuple[int, int, int]:
    """Bytes as stored, those of them that are transformed, and packed: a multiple of 64, and none for none.

    What is transformed may become half as much, or twice.
    """
    stored = draw(byte_counts)
    gaps = draw(st.integers(0, 3)) if stored else 0
    transformed = draw(st.just(0) | st.just(0) | st.integers(0, stored))
    become = draw(st.sampled_from([-(-transformed // 2), transformed, 2 * transformed]))
    return stored, transformed, (-(-(stored - transformed + become) // 64) + gaps) * 64


@st.composite
def stacks(draw: st.DrawFn, name: str) -> Stack:
    """1 to 12 layers, equal ones in runs."""
    sizes: list[LayerSize] = []
    start = 0
    for length in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
        stored, transformed, packed = draw(weights())
        run = (start, start + length)
        sizes.append(LayerSize(layers=run, layer_bytes=stored, packed_bytes=packed, transformed_bytes=transformed))
        start += length
    return Stack(name=name, layers=start, extents=draw(st.integers(1, 3)), sizes=tuple(sizes))


@st.composite
def components(draw: st.DrawFn, name: str) -> Component:
    names = draw(st.lists(st.sampled_from(STACKS), max_size=3, unique=True))
    drawn = tuple(draw(stacks(stack)) for stack in names)
    fixed, transformed, fixed_packed = draw(weights())
    bare = component_of(name, *drawn, fixed=fixed, fixed_packed=fixed_packed, fixed_transformed=transformed)
    passes = draw(st.sampled_from([1, 2, 28, 50]) | st.integers(1, 50))
    return bare.model_copy(update={"passes": passes, "activations": draw(activations)})


@st.composite
def edges(draw: st.DrawFn, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """A random directed acyclic graph, its edges in random order."""
    order = draw(st.permutations(names))
    pairs = [(source, target) for at, source in enumerate(order) for target in order[at + 1 :]]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return tuple(chosen)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """1 to 4 components in random order of registration."""
    names = draw(st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=4, unique=True))
    return Pipeline(name="toy", components=tuple(draw(components(name)) for name in names), edges=draw(edges(names)))


@st.composite
def sizes_near(draw: st.DrawFn, pipeline: Pipeline) -> int:
    """A memory size at, or one step from, what some of the pipeline's units need together."""
    units = [packed for component in pipeline.components for packed in packed_units(component)]
    given = [c.activations.peak_bytes for c in pipeline.components if c.activations.kind == "given"]
    some = draw(st.lists(st.sampled_from(units), max_size=8)) if units else []
    step = draw(st.sampled_from([-64, -1, 0, 1, 64]))
    reserve = draw(st.sampled_from([0, 24 << 20, 48 << 20, GIB, 4 * GIB, sum(some) // 4, sum(some) // 9]))
    activated = draw(st.sampled_from([0, *given]))
    return max(0, draw(st.sampled_from([sum(some), sum(units)])) + activated + reserve + step)


def memory_sizes(pipeline: Pipeline) -> st.SearchStrategy[int]:
    """From nothing to more than everything, the boundaries most often."""
    near = sizes_near(pipeline)
    return st.one_of(near, near, st.integers(0, 400 * GIB), st.sampled_from([0, 1, HUGE]))


unmeasured: st.SearchStrategy[Unmeasurable | Malformed] = st.sampled_from(
    [Unmeasurable(why="this platform does not tell"), Malformed(source="memory.max", why="'x' is no number")]
)


@st.composite
def machines(draw: st.DrawFn, pipeline: Pipeline) -> Machine:
    """A host, and none to two accelerators whose free memory was measured."""
    known: st.SearchStrategy[Measured] = memory_sizes(pipeline).map(measured)
    devices = draw(st.sampled_from([(), ("cuda:0",), ("cuda:0",), ("cuda:0", "cuda:1"), ("mps",)]))
    rates = draw(st.none() | st.none() | calibrations(devices))
    memlock: st.SearchStrategy[Reading] = st.one_of(st.just(Unlimited(source="RLIMIT_MEMLOCK")), known, unmeasured)
    return Machine(
        host=host_of(draw(unmeasured) if draw(st.integers(0, 3)) == 0 else draw(known), draw(memlock)),
        accelerators=tuple(
            accelerator_of(
                device,
                draw(known),
                unified=device == "mps" or draw(st.integers(0, 9)) == 0,
                streams=draw(st.booleans()),
            )
            for device in devices
        ),
        calibration=rates,
    )


@st.composite
def calibrations(draw: st.DrawFn, devices: Sequence[str]) -> Calibration:
    """Rates of a disk, of links and of matrix products, each of which may be missing."""
    rates = st.sampled_from([1e8, 1e9, 3e9, 2e10])
    modes = draw(st.lists(st.sampled_from(ReadMode), unique=True))
    sources = draw(st.lists(st.sampled_from(SOURCES), unique=True))
    return Calibration(
        measured_at="2026-01-01T00:00:00+00:00",
        fingerprint="sha256:" + "0" * 64,
        disks=tuple(
            DiskRate(mode=mode, chunk_bytes=draw(st.sampled_from([4096, 1 << 20])), depth=2, bytes_per_s=draw(rates))
            for mode in modes
        ),
        links=tuple(
            LinkRate(device=device, source=source, bytes_per_s=draw(rates)) for device in devices for source in sources
        ),
        compute=tuple(ComputeRate(device=device, dtype="U8", flops_per_s=1e12) for device in ("cpu", *devices)),
        pin_s_per_gib=draw(st.none() | st.just(0.25)),
    )


_ON_DEVICE = tuple(
    (home, hold)
    for home in (None, *Home)
    for hold in (None, *Hold)
    if (home, hold) != (None, None) and (None in (home, hold) or (home is Home.device) == (hold is Hold.always))
)
_ON_CPU = (
    *((home, hold) for home in (Home.device, Home.mapped, Home.locked) for hold in (None, Hold.always)),
    (None, Hold.always),
    (None, Hold.layer),
    (Home.mapped, Hold.layer),
)


@st.composite
def overrides(draw: st.DrawFn, pipeline: Pipeline, machine: Machine) -> tuple[Override, ...]:
    """Overrides that each match one place; a stack's and its component's may yet contradict each other."""
    devices = ["cpu", *(accelerator.device for accelerator in machine.accelerators)]
    asked: list[Override] = []
    for component in draw(st.lists(st.sampled_from(pipeline.components), min_size=1, max_size=3, unique_by=id)):
        device = draw(st.none() | st.sampled_from(devices))
        computes = device or devices[min(1, len(devices) - 1)]
        wishes = st.sampled_from(_ON_CPU if computes == "cpu" else _ON_DEVICE)
        if not component.stacks:
            wishes = wishes.filter(lambda wish: wish[1] is not Hold.layer)
        if device is not None or draw(st.booleans()):
            home, hold = draw(st.just((None, None)) | wishes) if device is not None else draw(wishes)
            asked.append(Override(select=component.name, home=home, hold=hold, compute_device=device))
        for stack in component.stacks:
            if draw(st.integers(0, 2)) == 0:
                home, hold = draw(wishes)
                asked.append(Override(select=f"{component.name}.{stack.name}", home=home, hold=hold))
    return tuple(draw(st.permutations(asked)))


policies = st.one_of(
    st.sampled_from([preset for preset in PRESETS if preset != "layerwise"]).map(load_preset),
    st.builds(
        Policy,
        preset=st.just("own"),
        reserve_bytes=byte_counts,
        reserve_max_percent=st.integers(0, 100),
        device_reserve_bytes=byte_counts,
        device_reserve_max_percent=st.integers(0, 100),
        pinned_max_percent=st.integers(0, 100),
        copies=st.sampled_from(Copies),
        residency=st.sampled_from(Residency),
        slots=st.integers(1, 4),
        prefetch_layers=st.integers(0, 4),
        rules=st.just(load_preset("auto").rules),
    ),
)


@st.composite
def cases(draw: st.DrawFn, *, overridden: bool = True) -> Case:
    """A whole question to the planner. Without overrides nothing but a lack of memory can refuse it."""
    pipeline = draw(pipelines())
    machine = draw(machines(pipeline))
    policy = draw(policies)
    if overridden and draw(st.booleans()):
        policy = policy.model_copy(update={"overrides": draw(overrides(pipeline, machine))})
    return Case(pipeline=pipeline, machine=machine, policy=policy, workload=draw(workloads))


@st.composite
def fitting_plans(draw: st.DrawFn, *, overridden: bool = True) -> Plan:
    """Plans that fit; where memory was short, on a machine that has just enough of it or somewhat more."""
    case = draw(cases(overridden=overridden))
    plan = case.compile()
    if isinstance(plan.verdict, Refused):
        assume(not plan.verdict.broken)
        units = [packed for part in case.pipeline.components for packed in packed_units(part)]
        grown = [
            (change.axis, change.to_available_bytes + sum(draw(st.lists(st.sampled_from([0, 64, *units]), max_size=4))))
            for change in plan.verdict.nearest
        ]
        plan = case.on(with_memory(case.machine, grown)).compile()
    fits(plan)
    return plan

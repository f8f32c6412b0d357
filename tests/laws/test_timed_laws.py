"""Laws of plans in seconds: nothing is quicker than the optimum, nor below the bound that the plan states."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from placewise.plans.document import Fits
from placewise.plans.machine import Machine, Unlimited
from placewise.plans.pipeline import Pipeline, Workload
from placewise.plans.units import MIB

from ..questions import (
    BARE,
    HUGE,
    Case,
    component_of,
    cuda,
    host_of,
    measured,
    policy_of,
    stack_of,
    transformed,
    with_memory,
)
from ..timed import calibrated, computing, disk_of, least_seconds, placements

_MOST_PLACEMENTS = 440
"""With up to three slots for each of two components they are few enough for the planner to try each."""
_MICROSECOND = 1e-6


@st.composite
def timed_cases(draw: st.DrawFn) -> Case:
    """One or two components with a few layers, on the CPU or on a device, with every rate known."""
    sizes = st.sampled_from([4 * MIB, 8 * MIB, 12 * MIB])
    equal = st.integers(1, 5).flatmap(lambda count: sizes.map(lambda size: [size] * count))
    components = tuple(
        computing(
            component_of(
                name,
                transformed(stack) if draw(st.booleans()) else stack,
                fixed=draw(st.sampled_from([0, 4 * MIB, 16 * MIB])),
                passes=draw(st.sampled_from([1, 3, 10])),
            ),
            draw(st.sampled_from([0.001, 0.01, 0.1])),
            activations=draw(st.sampled_from([0, MIB])),
        )
        for name in ("encoder", "transformer")[: draw(st.integers(1, 2))]
        for stack in [stack_of("blocks", *draw(equal | st.lists(sizes, min_size=1, max_size=3)))]
    )
    total = sum(sum(component.dtype_bytes.values()) for component in components)
    host = host_of(measured(draw(st.integers(MIB, 2 * total))), Unlimited(source="RLIMIT_MEMLOCK"))
    device = cuda(draw(st.integers(12 * MIB, 12 * MIB + 2 * total)), streams=draw(st.booleans()))
    faults, direct = draw(st.sampled_from([(2e8, 1e9), (5e8, 1e9), (5e8, 4e8)]))
    machine = calibrated(
        Machine(host=host, accelerators=(device,) if draw(st.booleans()) else ()),
        *disk_of(faults=faults, direct=direct, chunk_bytes=MIB // 4),
        pageable=draw(st.sampled_from([1e9, 4e9])),
        pinned=5e9,
        mapped=2e9,
    )
    policy = policy_of(
        "auto", **BARE, slots=draw(st.integers(1, 3)), pinned_max_percent=draw(st.sampled_from([0, 50, 100]))
    )
    return Case(
        pipeline=Pipeline(name="toy", components=components, edges=()),
        machine=machine,
        policy=policy,
        workload=Workload(ranks=draw(st.sampled_from([1, 1, 2]))),
    )


@settings(max_examples=150)
@given(timed_cases())
def test_i14_no_placement_is_quicker_than_the_optimum_or_the_bound(case: Case) -> None:
    assume(placements(case) <= _MOST_PLACEMENTS)
    plan = case.compile()
    assume(isinstance(plan.verdict, Fits))
    because = plan.decisions[0].because
    seconds = (because["microseconds"] or 0) * _MICROSECOND
    bound = (because.get("bound_microseconds") or because["microseconds"] or 0) * _MICROSECOND
    least = least_seconds(case)
    slack = 1e-5 * least + 2 * _MICROSECOND
    assert abs(seconds - least) <= slack
    assert bound <= least + slack


@settings(max_examples=60)
@given(timed_cases())
def test_i7_with_memory_to_spare_all_is_resident(case: Case) -> None:
    """Also where a compute that takes long would hide that weights are fetched again and again."""
    endless = with_memory(case.machine, [("host", HUGE), ("cuda:0", HUGE)])
    plan = replace(case, machine=endless, workload=Workload()).compile()
    assert {(segment.home, segment.hold) for placement in plan.placements for segment in placement.segments} == {
        ("device", "always")
    }

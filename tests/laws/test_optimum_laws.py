"""Laws of the optimum and of the schedule that it is judged by."""

from hypothesis import event, given, settings
from hypothesis import strategies as st
from placewise.planner.apply import even_positions
from placewise.planner.simulate import Step, simulate
from placewise.plans.document import Fits, Plan
from placewise.plans.pipeline import Component
from placewise.plans.policy import Policy

from ..brute import least_cost
from ..questions import (
    accelerator_of,
    component_of,
    cuda,
    machine_of,
    measured,
    plan_of,
    policy_of,
    stack_of,
    transformed,
)

SIZES = st.integers(1, 12).map(lambda size: 64 * size)


@st.composite
def tiny_components(draw: st.DrawFn, name: str) -> Component:
    layers = draw(st.lists(SIZES, min_size=1, max_size=3))
    equal = draw(st.booleans())
    stack = stack_of("blocks", *(layers[:1] * len(layers) if equal else layers))
    fixed = draw(st.just(0) | SIZES)
    factor = draw(st.sampled_from([None, None, 0.5, 1, 2]))
    return component_of(
        name,
        stack if factor is None else transformed(stack, factor),
        fixed=fixed,
        fixed_packed=None if factor is None else round(fixed * factor),
        fixed_transformed=0 if factor is None else fixed,
        passes=draw(st.integers(1, 4)),
        activations=draw(st.just(0) | SIZES),
    )


@st.composite
def tiny_plans(draw: st.DrawFn, policy: Policy | None = None) -> Plan:
    components = [draw(tiny_components(name)) for name in ("a", "b")[: draw(st.integers(1, 2))]]
    host = draw(st.integers(0, 3000))
    kind = draw(st.sampled_from(("cpu", "separate", "unified")))
    memory = draw(st.integers(0, 3000))
    accelerator = (
        () if kind == "cpu" else (accelerator_of("cuda:0", measured(memory), unified=kind == "unified", streams=False),)
    )
    return plan_of(machine_of(host, *accelerator), *components, policy=policy or exact())


def exact() -> Policy:
    return policy_of("auto", reserve_bytes=0, device_reserve_bytes=0)


def moved(plan: Plan) -> int:
    """The cost that the plan states for the placement that it took."""
    stated = next(decision for decision in plan.decisions if decision.subject == "request").because["moved_bytes"]
    assert stated is not None
    return stated


@given(plan=tiny_plans())
@settings(max_examples=150)
def test_the_optimum_equals_brute_force(plan: Plan) -> None:
    best = least_cost(plan)
    event("fits" if best is not None else "refused")
    assert isinstance(plan.verdict, Fits) == (best is not None)
    if best is not None:
        assert moved(plan) == best


@given(data=st.data(), more_host=st.integers(0, 2000), more_device=st.integers(0, 2000))
@settings(max_examples=100)
def test_more_budget_is_never_predicted_to_move_more(data: st.DataObject, more_host: int, more_device: int) -> None:
    component = data.draw(tiny_components("a"))
    host, memory = data.draw(st.integers(0, 3000)), data.draw(st.integers(0, 3000))
    small = plan_of(machine_of(host, cuda(memory, streams=False)), component, policy=exact())
    large = plan_of(machine_of(host + more_host, cuda(memory + more_device, streams=False)), component, policy=exact())
    if isinstance(small.verdict, Fits):
        assert isinstance(large.verdict, Fits)
        assert moved(large) <= moved(small)


steps = st.builds(
    Step,
    compute_s=st.floats(0, 1),
    link_s=st.floats(0, 1),
    disk_s=st.floats(0, 1),
    first_disk_s=st.floats(0, 1),
    streamed=st.just(True),
) | st.builds(Step, compute_s=st.floats(0, 1))


@given(
    steps=st.lists(steps, min_size=1, max_size=12),
    passes=st.integers(1, 6),
    slots=st.integers(1, 4),
    overlap=st.booleans(),
)
def test_a_schedule_lies_between_its_longest_resource_and_the_sum_of_all(
    steps: list[Step],
    passes: int,
    slots: int,
    overlap: bool,  # noqa: FBT001 - an arbitrary choice
) -> None:
    ran = simulate(steps, passes=passes, slots=slots, prefetch_layers=slots - 1, overlap=overlap)
    exact_passes = min(passes, 4)
    compute = exact_passes * sum(step.compute_s for step in steps)
    link = exact_passes * sum(step.link_s for step in steps)
    disk = sum(step.first_disk_s + (exact_passes - 1) * step.disk_s for step in steps)
    last = ran.events[-1].ended_s
    assert max(compute, link, disk) <= last + 1e-9
    assert last <= compute + link + disk + 1e-9
    if not overlap:
        assert abs(last - (compute + link + disk)) < 1e-9
    for before, after in zip(ran.events, ran.events[1:], strict=False):
        assert before.ended_s <= after.started_s + 1e-12
    assert ran.stall_s >= -1e-9


@given(steps=st.lists(steps, min_size=1, max_size=10), slots=st.integers(2, 4))
def test_no_more_layers_are_fetched_than_there_are_slots(steps: list[Step], slots: int) -> None:
    ran = simulate(steps, passes=3, slots=slots, prefetch_layers=slots - 1, overlap=True)
    streamed = [event for event in ran.events if steps[event.step].streamed]
    for position, later in enumerate(streamed):
        if position >= slots:
            assert later.issued_s >= streamed[position - slots].ended_s - 1e-12


@given(total=st.integers(1, 64), data=st.data())
def test_even_positions_are_as_many_as_asked_and_evenly_spread(total: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(1, total))
    positions = sorted(even_positions(chosen, total))
    assert len(positions) == chosen
    assert positions[0] == 0
    gaps = [after - before for before, after in zip(positions, [*positions[1:], total], strict=True)]
    assert max(gaps) - min(gaps) <= 1

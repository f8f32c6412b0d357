"""Laws of every plan, against an oracle that reads nothing but the document."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from placewise.plans.document import Fits, Plan
from placewise.plans.machine import Machine, Measured
from placewise.plans.pipeline import Pipeline
from placewise.plans.policy import Copies, Override

from .. import oracle
from ..strategies import HUGE, Case, cases, host_of, measured, memory_sizes, unmeasured, with_memory
from .plans import fitting, fitting_cases, is_copy


def usable(plan: Plan, axis: str) -> int:
    """What an axis offers, by the policy's own words: what is available, less a reserve; on the host one less."""
    (budget,) = [budget for budget in plan.budgets if budget.axis == axis]
    assert budget.available_bytes is not None
    policy, available = plan.policy, budget.available_bytes
    if axis == "host":
        return max(0, available - min(policy.reserve_bytes, available * policy.reserve_max_percent // 100) - 1)
    share = available * policy.device_reserve_max_percent // 100
    return max(0, available - min(policy.device_reserve_bytes, share))


def measured_axes(plan: Plan) -> list[str]:
    return [budget.axis for budget in plan.budgets if budget.available_bytes is not None]


@given(fitting_cases())
def test_i1_no_axis_is_over_budget_in_any_phase(case: Case) -> None:
    plan = fitting(case)
    assert [budget.axis for budget in plan.budgets] == oracle.axes(plan)
    for axis in measured_axes(plan):
        assert max(oracle.peaks(plan, axis)) <= usable(plan, axis)


@given(fitting_cases())
def test_i1_predicted_peaks_are_the_oracles(case: Case) -> None:
    plan = fitting(case)
    assert [phase.component for phase in plan.phases] == [part.name for part in plan.pipeline.components]
    for phase in plan.phases:
        expected = {axis: oracle.peak(plan, phase.component, axis) for axis in oracle.axes(plan)}
        expected["page_cache"] = oracle.page_cache(plan, phase.component)
        assert phase.predicted.peak_bytes == expected


@given(fitting_cases())
def test_i1_margin_is_what_is_left_at_the_highest_peak(case: Case) -> None:
    plan = fitting(case)
    assert isinstance(plan.verdict, Fits)
    known = measured_axes(plan)
    assert plan.verdict.margin_bytes == {
        axis: usable(plan, axis) - max(oracle.peaks(plan, axis)) if axis in known else None
        for axis in oracle.axes(plan)
    }


@given(fitting_cases())
def test_i1_binding_axis_has_the_least_left(case: Case) -> None:
    plan = fitting(case)
    for phase in plan.phases:
        left = {
            axis: usable(plan, axis) - oracle.peak(plan, phase.component, axis)
            for axis in measured_axes(plan)
        }
        assert (phase.binding is None) == (not left)
        if phase.binding is not None:
            assert left[phase.binding] == min(left.values())


@given(fitting_cases())
def test_link_bytes_are_what_one_request_moves(case: Case) -> None:
    plan = fitting(case)
    for phase, part in zip(plan.phases, plan.pipeline.components, strict=True):
        assert phase.passes == part.passes
        assert phase.predicted.link_bytes == oracle.link_bytes(plan, part.name, part.passes)


@given(fitting_cases())
def test_slots_hold_the_largest_streamed_layer(case: Case) -> None:
    plan = fitting(case)
    streamed = [unit for unit in oracle.residents(plan) if unit.hold == "layer"]
    for placement in plan.placements:
        mine = [unit.packed for unit in streamed if unit.name[0] == placement.component]
        assert (placement.staging is None) == (not mine)
        if placement.staging is not None:
            assert placement.staging.slot_bytes == max(mine)
            assert 1 <= placement.staging.slots <= min(len(mine), plan.policy.slots)
            assert placement.staging.prefetch_layers <= min(
                placement.staging.slots - 1, plan.policy.prefetch_layers
            )


@given(fitting_cases())
def test_i2_a_copy_that_would_fit_is_made(case: Case) -> None:
    plan = fitting(case)
    if plan.policy.copies is Copies.never:
        return
    asked = {override.select for override in plan.policy.overrides if override.home}
    left = usable(plan, "host") - max(oracle.peaks(plan, "host")) if "host" in measured_axes(plan) else 0
    for unit in oracle.residents(plan):
        component, stack, _ = unit.name
        on_cpu = is_on_cpu(plan, component)
        copies_allowed = on_cpu or unit.compute_pool != "host"
        if unit.home == "mapped" and copies_allowed and not asked & {component, f"{component}.{stack}"}:
            assert unit.packed > left


@given(fitting_cases())
def test_i2_what_was_copied_fits(case: Case) -> None:
    plan = fitting(case)
    copied = sum(unit.packed for unit in oracle.residents(plan) if is_copy(plan, unit))
    if copied:
        assert copied <= usable(plan, "host")
    if plan.policy.copies is Copies.never and not plan.policy.overrides:
        assert copied == 0


@given(fitting_cases())
def test_i3_every_unit_stands_in_exactly_one_segment(case: Case) -> None:
    plan = fitting(case)
    expected: Counter[oracle.Name] = Counter()
    for component in case.pipeline.components:
        expected.update(oracle.unit_sizes(component).keys())
    assert Counter(unit.name for unit in oracle.residents(plan)) == expected


@given(fitting_cases())
def test_i3_segments_add_up_to_the_checkpoint(case: Case) -> None:
    plan = fitting(case)
    stored = {part.name: part.checkpoint.files[0].size_bytes for part in plan.pipeline.components}
    for placement in plan.placements:
        assert sum(segment.bytes for segment in placement.segments) == stored[placement.component]
    units = oracle.residents(plan)
    segments = [segment for placement in plan.placements for segment in placement.segments]
    assert sum(segment.packed_bytes for segment in segments) == sum(unit.packed for unit in units)


@given(cases(overridden=False), st.data())
def test_i7_infinite_budget_is_all_resident(case: Case, data: st.DataObject) -> None:
    plan = case.on(endless(case.machine)).under(auto_like(data, case)).compile()
    assert isinstance(plan.verdict, Fits)
    assert {(unit.home, unit.hold) for unit in oracle.residents(plan)} <= {("device", "always")}


@given(cases(), st.data())
def test_i12_order_of_registration_is_no_matter(case: Case, data: st.DataObject) -> None:
    shuffled = Pipeline(
        name=case.pipeline.name,
        components=tuple(
            part.model_copy(update={"stacks": tuple(data.draw(st.permutations(part.stacks)))})
            for part in data.draw(st.permutations(case.pipeline.components))
        ),
        edges=tuple(data.draw(st.permutations(case.pipeline.edges))),
    )
    asked = tuple(data.draw(st.permutations(case.policy.overrides)))
    other = Case(
        pipeline=shuffled,
        machine=case.machine,
        policy=case.policy.model_copy(update={"overrides": asked}),
        workload=case.workload,
    )
    assert other.compile().model_dump_json() == case.compile().model_dump_json()


@given(cases(), st.data())
def test_i16_compute_device_is_independent_of_where_parameters_rest(case: Case, data: st.DataObject) -> None:
    by_select = {override.select: override for override in case.policy.overrides}
    for part in case.pipeline.components:
        old = by_select.get(part.name)
        if data.draw(st.booleans()):
            wish = data.draw(st.sampled_from(("device", "mapped", "pageable")))
            device = old.compute_device if old is not None else None
            by_select[part.name] = Override.model_validate_json(
                f'{{"select": "{part.name}", "home": "{wish}"}}'
            ).model_copy(update={"compute_device": device})
    plan = case.under(
        case.policy.model_copy(update={"overrides": tuple(by_select.values())})
    ).compile()
    first = case.machine.accelerators[0].device if case.machine.accelerators else "cpu"
    moved = {override.select: override.compute_device for override in case.policy.overrides}
    for placement in plan.placements:
        assert placement.compute_device == (moved.get(placement.component) or first)

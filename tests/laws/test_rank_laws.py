"""Laws of ranks that share a host, and of drift."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from placewise.planner.compile import compile_plan
from placewise.planner.worth import with_available
from placewise.plans.document import Fits, Plan
from placewise.plans.drift import drift
from placewise.plans.machine import Machine, Measured
from placewise.plans.pipeline import Component
from placewise.plans.policy import Home, Override, Shard

from .. import oracle
from ..questions import Case
from ..strategies import cases, fitting_plans


def with_ranks(case: Case, ranks: int) -> Plan:
    workload = case.workload.model_copy(update={"ranks": ranks})
    return compile_plan(case.pipeline, case.machine, case.policy, workload, version="0")


@given(case=cases(), ranks=st.integers(1, 8))
def test_i15_ranks_together_stay_in_the_hosts_budget(case: Case, ranks: int) -> None:
    """Hard bytes are each rank's own; mapped pages of one file are there once, and are not hard."""
    plan = with_ranks(case, ranks)
    host = case.machine.host.available
    if not isinstance(plan.verdict, Fits) or not isinstance(host, Measured):
        return
    reserve = next(budget.reserve_bytes for budget in plan.budgets if budget.axis == "host")
    available = next(budget.available_bytes or 0 for budget in plan.budgets if budget.axis == "host")
    peak = max(oracle.peaks(plan, "host"))
    assert peak == 0 or ranks * peak < available - reserve


@given(case=cases(), ranks=st.integers(2, 8))
def test_more_ranks_never_fit_where_fewer_do_not(case: Case, ranks: int) -> None:
    if isinstance(with_ranks(case, ranks).verdict, Fits):
        assert isinstance(with_ranks(case, 1).verdict, Fits)


@given(case=cases(overridden=False), ranks=st.integers(2, 8), data=st.data())
def test_i15_ranks_that_share_a_component_stay_in_every_budget(case: Case, ranks: int, data: st.DataObject) -> None:
    """Parts of any size, on the device or on the host; every plan passes the independent check before it is here."""
    on_device = bool(case.machine.accelerators)
    homes = st.sampled_from(
        [None, Home.pageable] if on_device and isinstance(case.machine.host.available, Measured) else [None]
    )
    parted = [in_parts(each, ranks) for each in case.pipeline.components]
    wishes = [
        Override(select=each.name, home=data.draw(homes), shard=data.draw(st.sampled_from(Shard)))
        for each in parted
        if not each.transforms
    ]
    case = replace(case, pipeline=case.pipeline.model_copy(update={"components": tuple(parted)}))
    plan = with_ranks(case.under(case.policy.model_copy(update={"overrides": tuple(wishes)})), ranks)
    if isinstance(plan.verdict, Fits):
        asked = {wish.select for wish in wishes if wish.shard is Shard.always}
        assert asked <= {placement.component for placement in plan.placements if placement.sharding is not None}


def in_parts(component: Component, ranks: int) -> Component:
    """The component, with what each rank would hold of it."""
    stacks = [
        stack.model_copy(
            update={
                "sizes": tuple(
                    size.model_copy(update={"part_bytes": -(-size.packed_bytes // ranks // 64) * 64})
                    for size in stack.sizes
                )
            }
        )
        for stack in component.stacks
    ]
    fixed = -(-component.fixed_packed_bytes // ranks // 64) * 64
    return component.model_copy(update={"stacks": tuple(stacks), "fixed_part_bytes": fixed})


@given(plan=fitting_plans())
def test_i13_nothing_has_changed_on_the_same_machine(plan: Plan) -> None:
    assert drift(plan, plan.pipeline, plan.machine) == ()


@given(plan=fitting_plans(), data=st.data())
def test_i13_every_changed_file_is_named(plan: Plan, data: st.DataObject) -> None:
    components = list(plan.pipeline.components)
    changed = data.draw(st.sets(st.sampled_from(range(len(components))), min_size=1))
    what = data.draw(st.sampled_from(("size_bytes", "mtime_ns", "header_sha256")))
    for index in changed:
        checkpoint = components[index].checkpoint
        file = checkpoint.files[0]
        value: object = "f" * 64 if what == "header_sha256" else getattr(file, what) + 1
        files = (file.model_copy(update={what: value}), *checkpoint.files[1:])
        checkpoint = checkpoint.model_copy(update={"files": files})
        components[index] = components[index].model_copy(update={"checkpoint": checkpoint})
    found = drift(plan, plan.pipeline.model_copy(update={"components": tuple(components)}), plan.machine)
    names = {
        f"component {components[index].name}, file {components[index].checkpoint.files[0].path}, {what}"
        for index in changed
    }
    assert {change.fact for change in found} == names


@given(plan=fitting_plans())
def test_i13_memory_that_is_gone_is_named_where_the_plan_needs_it(plan: Plan) -> None:
    for axis in oracle.measured_axes(plan):
        needed = max(oracle.peaks(plan, axis))
        facts = {change.fact for change in drift(plan, plan.pipeline, emptied(plan.machine, axis))}
        # What may be pinned is a share of the host's memory, which holds what is pinned too.
        named = "host" if axis == "pinned" else axis
        assert (f"{named}, available" in facts) == (
            needed > 0 or (named != axis and max(oracle.peaks(plan, named)) > 0)
        )


def emptied(machine: Machine, axis: str) -> Machine:
    """The machine with nothing left on an axis."""
    return with_available(machine, axis, 0)

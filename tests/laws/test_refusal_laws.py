"""Laws of refusal: zero is zero, unknown is not zero, and what a refusal says is true and sufficient."""

from hypothesis import assume, given
from hypothesis import strategies as st
from placewise.plans.document import Fits, Plan, Refused
from placewise.plans.machine import Reading

from .. import oracle
from ..questions import HUGE, Case, accelerator_of, fits, host_of, measured, packed_units, refused, with_memory
from ..strategies import cases, unmeasured


def must_be_there(case: Case) -> bool:
    """Whether some pass needs memory at all."""
    return any(
        any(packed_units(part)) or (part.activations.kind == "given" and part.activations.peak_bytes)
        for part in case.pipeline.components
    )


def short_plan(case: Case) -> Refused:
    """A refusal for want of memory alone."""
    verdict = case.compile().verdict
    assume(isinstance(verdict, Refused) and not verdict.broken)
    assert isinstance(verdict, Refused)
    return verdict


def nearest(verdict: Refused) -> dict[str, int]:
    """The changes by pool. What may be pinned is a share of the host's memory, which the larger change grows."""
    changes: dict[str, int] = {}
    for change in verdict.nearest:
        pool = pool_of(change.axis)
        changes[pool] = max(changes.get(pool, 0), change.to_available_bytes)
    return changes


def pool_of(axis: str) -> str:
    return "host" if axis == "pinned" else axis


def pools(verdict: Refused) -> set[str]:
    return {pool_of(short.axis) for short in verdict.short}


@given(cases())
def test_i18_the_stated_changes_make_it_fit(case: Case) -> None:
    fits(case.on(with_memory(case.machine, nearest(short_plan(case)).items())).compile())


@given(cases(), st.data())
def test_i18_one_byte_less_of_any_axis_does_not(case: Case, data: st.DataObject) -> None:
    changes = nearest(short_plan(case))
    axis = data.draw(st.sampled_from(sorted(changes)))
    less = {**changes, axis: changes[axis] - 1}
    again = refused(case.on(with_memory(case.machine, less.items())).compile())
    # With several devices the least that is missing may now be on another one.
    assert pools(again) == {axis} or len(case.machine.accelerators) > 1


@given(cases(), st.data())
def test_i18_short_names_exactly_the_exhausted_axes(case: Case, data: st.DataObject) -> None:
    """An axis is exhausted if all memory of every other one does not help. With a choice of devices another would."""
    assume(len(case.machine.accelerators) <= 1)
    axes = sorted({pool_of(axis) for axis in oracle.axes(case.compile())})
    axis = data.draw(st.sampled_from(axes))
    named = pools(short_plan(case))
    alone = case.on(with_memory(case.machine, [(other, HUGE) for other in axes if other != axis])).compile()
    assert (axis in named) == isinstance(alone.verdict, Refused)


@given(cases())
def test_a_refusal_states_what_it_needs_and_what_there_is(case: Case) -> None:
    verdict, plan = short_plan(case), case.compile()
    assert [change.axis for change in verdict.nearest] == [short.axis for short in verdict.short]
    for short in verdict.short:
        assert short.have_bytes == oracle.usable(plan, short.axis) < short.need_bytes
        assert short.component in {part.name for part in plan.pipeline.components}


@given(cases())
def test_a_refused_plan_places_nothing(case: Case) -> None:
    plan = case.compile()
    if isinstance(plan.verdict, Refused):
        assert (plan.placements, plan.phases, plan.decisions) == ((), (), ())
        assert plan.verdict.short or plan.verdict.broken


@given(cases(overridden=False))
def test_i8_zero_device_memory_is_zero(case: Case) -> None:
    machine = case.machine.model_copy(update={"accelerators": (accelerator_of("cuda:0", measured(0)),)})
    plan = case.on(machine).compile()
    if must_be_there(case):
        assert [short.axis for short in refused(plan).short] == ["cuda:0"]
        assert refused(plan).short[0].have_bytes == 0
    else:
        fits(plan)


@given(cases(overridden=False))
def test_i8_zero_host_memory_copies_nothing(case: Case) -> None:
    machine = case.machine.model_copy(update={"host": host_of(measured(0))})
    assert_nothing_copied(case.on(machine).compile())


@given(cases(), unmeasured)
def test_i8_an_unknown_host_is_not_spent(case: Case, unknown: Reading) -> None:
    machine = case.machine.model_copy(update={"host": host_of(unknown)})
    assert_nothing_copied(case.on(machine).compile())


def assert_nothing_copied(plan: Plan) -> None:
    """No bytes rest on the host, but for those of a unified device, whose own memory was measured."""
    for unit in oracle.residents(plan):
        if "host" in unit.pools and oracle.available(plan, "host") in (None, 0):
            assert unit.packed == 0


@given(cases(overridden=False), unmeasured, st.booleans())
def test_i8_unknown_device_memory_is_refused_by_rule(case: Case, unknown: Reading, unified: bool) -> None:  # noqa: FBT001
    device = accelerator_of("cuda:0", unknown, unified=unified)
    plan = case.on(case.machine.model_copy(update={"accelerators": (device,)})).compile()
    assert refused(plan).short == ()
    assert [(broken.rule, broken.subject) for broken in refused(plan).broken] == [
        ("device-memory-is-known", name) for name in sorted(part.name for part in case.pipeline.components)
    ]


@given(cases(overridden=False))
def test_i8_unknown_activations_lower_the_confidence(case: Case) -> None:
    verdict = case.compile().verdict
    if isinstance(verdict, Fits):
        unknown = any(part.activations.kind == "unknown" for part in case.pipeline.components)
        rated = case.machine.calibration is not None
        known = ("bytes-only", "calibrated") if rated else ("bytes-only",)
        assert verdict.confidence in (("activations-unknown",) if unknown else known)

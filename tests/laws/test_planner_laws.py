"""Laws of the planner: what of its question decides the plan, and what may not."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from placewise.plans.codec import plan_to_json
from placewise.plans.document import Fits, Plan
from placewise.plans.pipeline import Pipeline
from placewise.plans.policy import Hold, Home, Override
from placewise.policies.presets import load_preset

from .. import oracle
from ..questions import (
    BARE,
    HUGE,
    Case,
    component_of,
    cuda,
    fits,
    machine_of,
    plan_of,
    policy_of,
    stack_of,
    with_memory,
)
from ..strategies import byte_counts, cases


def everywhere(case: Case, size: int) -> dict[str, int]:
    return {"host": size} | {accelerator.device: size for accelerator in case.machine.accelerators}


def have(plan: Plan) -> dict[str, int]:
    return {axis: oracle.available(plan, axis) or 0 for axis in oracle.measured_axes(plan)}


@given(cases())
def test_i4_equal_questions_give_equal_bytes(case: Case) -> None:
    again = Case(
        pipeline=Pipeline.model_validate_json(case.pipeline.model_dump_json()),
        machine=type(case.machine).model_validate_json(case.machine.model_dump_json()),
        policy=type(case.policy).model_validate_json(case.policy.model_dump_json()),
        workload=type(case.workload).model_validate_json(case.workload.model_dump_json()),
    )
    assert plan_to_json(again.compile()) == plan_to_json(case.compile())


PLAN_FROM_STDIN = """
import sys
from placewise.planner.compile import compile_plan
from placewise.plans.codec import plan_from_json, plan_to_json
plan = plan_from_json(sys.stdin.buffer.read())
again = compile_plan(plan.pipeline, plan.machine, plan.policy, plan.workload, version=plan.made_by.version)
sys.stdout.buffer.write(plan_to_json(again).encode())
"""


def test_i4_in_another_process_with_other_hashes_too() -> None:
    names = ("text_encoder", "text_encoder_2", "transformer", "vae", "audio_vae")
    parts = [component_of(name, stack_of("b", 9, 9), stack_of("a", 7), fixed=5, passes=2) for name in names]
    edges = [(name, "transformer") for name in names[:2]] + [("transformer", name) for name in names[3:]]
    plan = plan_of(machine_of(99, cuda(60), cuda(60, index=1)), *parts, policy=policy_of("auto", **BARE), edges=edges)
    assert len({decision.rule for decision in plan.decisions}) > 2
    written = plan_to_json(plan).encode()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", PLAN_FROM_STDIN],
            input=written,
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert run.stdout == written


@given(cases(), st.dictionaries(st.sampled_from(["host", "cuda:0", "cuda:1"]), byte_counts))
def test_more_memory_never_turns_fits_into_refused(case: Case, more: dict[str, int]) -> None:
    plan = case.compile()
    if isinstance(plan.verdict, Fits):
        grown = {axis: size + more.get(axis, 0) for axis, size in have(plan).items()}
        fits(case.on(with_memory(case.machine, grown.items())).compile())


@given(cases(overridden=False))
def test_i7_infinite_budget_is_all_resident(case: Case) -> None:
    endless = with_memory(case.machine, everywhere(case, HUGE).items())
    plan = case.on(endless).under(load_preset("auto")).compile()
    fits(plan)
    assert {(unit.home, unit.hold) for unit in oracle.residents(plan)} <= {("device", "always")}
    assert all(placement.staging is None for placement in plan.placements)


@given(cases(), st.data())
def test_i12_order_of_registration_is_no_matter(case: Case, data: st.DataObject) -> None:
    components = [
        part.model_copy(update={"stacks": tuple(data.draw(st.permutations(part.stacks)))})
        for part in data.draw(st.permutations(case.pipeline.components))
    ]
    edges = tuple(data.draw(st.permutations(case.pipeline.edges)))
    overrides = tuple(data.draw(st.permutations(case.policy.overrides)))
    shuffled = Case(
        pipeline=Pipeline(name=case.pipeline.name, components=tuple(components), edges=edges),
        machine=case.machine,
        policy=case.policy.model_copy(update={"overrides": overrides}),
        workload=case.workload,
    )
    assert plan_to_json(shuffled.compile()) == plan_to_json(case.compile())


@given(cases())
def test_i12_each_component_follows_what_it_needs(case: Case) -> None:
    order = [part.name for part in case.compile().pipeline.components]
    assert sorted(order) == sorted(part.name for part in case.pipeline.components)
    for source, target in case.pipeline.edges:
        assert order.index(source) < order.index(target)


@given(cases(), st.data())
def test_i16_compute_device_is_independent_of_where_parameters_rest(case: Case, data: st.DataObject) -> None:
    moved = {override.select: override.compute_device for override in case.policy.overrides}
    asked: list[Override] = []
    for part in case.pipeline.components:
        home, hold = data.draw(
            st.sampled_from([(None, None), (Home.device, None), (Home.mapped, None), (None, Hold.always)])
        )
        wish = Override(select=part.name, home=home, hold=hold, compute_device=moved.get(part.name))
        if wish != Override(select=part.name):
            asked.append(wish)
    plan = case.under(case.policy.model_copy(update={"overrides": tuple(asked)})).compile()
    devices = [accelerator.device for accelerator in case.machine.accelerators] or ["cpu"]
    for placement in plan.placements:
        asked_for = moved.get(placement.component)
        assert placement.compute_device in ([asked_for] if asked_for else devices)

"""Plans on paper for many hosts: one for each, made once for equal facts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placewise.planner import hosts
from placewise.planner.compile import compile_plan
from placewise.planner.hosts import plan_hosts
from placewise.plans.document import Plan
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Pipeline, Workload
from placewise.plans.policy import Policy
from placewise.plans.units import GIB

from .questions import component_of, machine_of, policy_of, stack_of
from .strategies import machines, pipelines, policies, workloads


def test_many_hosts_are_planned_by_several_processes_with_the_same_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "available_cores", lambda: 2.5)
    pipeline = Pipeline(name="p", components=(component_of("a", stack_of("blocks", *[GIB] * 4)),), edges=())
    policy, workload = policy_of("auto"), Workload()
    named = {str(number): machine_of((8 + number) * GIB) for number in range(64)}
    told: list[int] = []
    plans = plan_hosts(pipeline, named, policy, workload, version="0", progress=told.append)
    assert list(plans) == list(named)
    assert plans == {name: compile_plan(pipeline, each, policy, workload, version="0") for name, each in named.items()}
    assert told == [1] * 64


@settings(max_examples=30)
@given(data=st.data(), pipeline=pipelines(), policy=policies, workload=workloads)
def test_every_host_has_the_plan_that_it_would_have_alone(
    data: st.DataObject, pipeline: Pipeline, policy: Policy, workload: Workload
) -> None:
    kinds = data.draw(st.lists(machines(pipeline), min_size=1, max_size=3))
    drawn = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    named = {str(number): each for number, each in enumerate(drawn)}
    made: list[Machine] = []

    def compiled(*args: Any, **how: Any) -> Plan:
        made.append(args[1])
        return compile_plan(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "compile_plan", compiled)
        plans = plan_hosts(pipeline, named, policy, workload, version="0")
    assert plans == {name: compile_plan(pipeline, each, policy, workload, version="0") for name, each in named.items()}
    assert len(made) == len(set(drawn))

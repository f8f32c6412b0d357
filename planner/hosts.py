"""Plans on paper for many hosts: one for each, made once for hosts whose facts are equal."""

from collections.abc import Callable, Mapping

from ..plans.document import Plan
from ..plans.machine import Machine
from ..plans.pipeline import Pipeline, Workload
from ..plans.policy import Policy
from .compile import compile_plan


def plan_hosts(
    pipeline: Pipeline,
    machines: Mapping[str, Machine],
    policy: Policy,
    workload: Workload,
    *,
    version: str,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Plan]:
    """The plan of each machine, by the machine's name. Those with equal facts share one.

    Args:
        pipeline: what is placed, on each of them.
        machines: facts by name.
        policy: as for a plan.
        workload: as for a plan; its ranks are those of one host.
        version: Placewise's own, for the plans' mark.
        progress: told after every machine.

    Raises:
        InputError: as for a plan.
    """
    made: dict[Machine, Plan] = {}
    plans: dict[str, Plan] = {}
    for name, machine in machines.items():
        if machine not in made:
            made[machine] = compile_plan(pipeline, machine, policy, workload, version=version)
        plans[name] = made[machine]
        if progress is not None:
            progress(1)
    return plans

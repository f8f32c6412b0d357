"""Plans on paper for many hosts: one for each, made once for hosts whose facts are equal."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from ..plans.document import Plan
from ..plans.machine import Machine
from ..plans.pipeline import Pipeline, Workload
from ..plans.policy import Policy
from .compile import compile_plan
from .measuring.cores import available_cores

_PER_PROCESS = 32
"""Fewer plans than this are made before another process has started."""


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
        progress: told how many more machines have their plan.

    Raises:
        InputError: as for a plan.
    """
    make = partial(compile_plan, pipeline, policy=policy, workload=workload, version=version)
    hosts = Counter(machines.values())
    made: dict[Machine, Plan] = {}
    for machine, plan in zip(hosts, _in_processes(make, list(hosts)), strict=True):
        made[machine] = plan
        if progress is not None:
            progress(hosts[machine])
    return {name: made[machine] for name, machine in machines.items()}


def _in_processes(make: Callable[[Machine], Plan], machines: Sequence[Machine]) -> Iterator[Plan]:
    """The plans in the machines' order, made by a process for each core where there are many."""
    workers = min(int(available_cores()), len(machines) // _PER_PROCESS)
    if workers < 2:
        yield from map(make, machines)
        return
    # Spawned, for a process that has begun threads, as torch does, cannot be forked safely.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(make, machines, chunksize=_PER_PROCESS // 2)

"""The trade-off of memory and time: the plan's cost over a grid of device and host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..plans.document import Fits
from ..plans.errors import InputError
from ..plans.machine import Machine, Measured
from ..plans.pipeline import Pipeline, Workload
from ..plans.policy import Policy
from .budgets import HOST
from .compile import compile_plan
from .worth import moved_bytes, request_seconds, transfer_seconds, with_available


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One machine of the grid. `device_bytes` is null without an accelerator; figures are null where nothing fits."""

    device_bytes: int | None
    host_bytes: int
    fits: bool
    seconds: float | None
    transfer_s: float | None
    moved_bytes: int | None


def frontier(
    pipeline: Pipeline,
    machine: Machine,
    policy: Policy,
    workload: Workload,
    *,
    steps: int = 8,
    version: str,
    progress: Callable[[int], None] | None = None,
) -> tuple[Point, ...]:
    """Plan on a grid up to the machine's own memory: device memory in `steps` equal parts, host memory halved twice.

    Args:
        pipeline: what is placed.
        machine: with known host memory, and known memory of its first accelerator if it has one.
        policy: as for a plan.
        workload: as for a plan.
        steps: how many device sizes.
        version: Placewise's own, for the plans' mark.
        progress: told after every plan.

    Raises:
        InputError: the memory of the host or of the accelerator is not known.
    """
    points: list[Point] = []
    for host_bytes in _host_sizes(machine):
        for device_bytes in _device_sizes(machine, steps):
            there = with_available(machine, HOST, host_bytes)
            if device_bytes is not None:
                there = with_available(there, machine.accelerators[0].device, device_bytes)
            plan = compile_plan(pipeline, there, policy, workload, version=version)
            fits = isinstance(plan.verdict, Fits)
            points.append(
                Point(
                    device_bytes=device_bytes,
                    host_bytes=host_bytes,
                    fits=fits,
                    seconds=request_seconds(plan) if fits else None,
                    transfer_s=transfer_seconds(plan) if fits else None,
                    moved_bytes=moved_bytes(plan) if fits else None,
                )
            )
            if progress is not None:
                progress(1)
    return tuple(points)


def grid_size(machine: Machine, steps: int) -> int:
    """How many plans the frontier makes."""
    return len(_host_sizes(machine)) * len(_device_sizes(machine, steps))


def _host_sizes(machine: Machine) -> Sequence[int]:
    available = machine.host.available
    if not isinstance(available, Measured):
        raise InputError("the host's memory is not known", hint="give it with --host-memory")
    return sorted({available.value // 4, available.value // 2, available.value})


def _device_sizes(machine: Machine, steps: int) -> Sequence[int | None]:
    if not machine.accelerators:
        return (None,)
    free = machine.accelerators[0].free
    if not isinstance(free, Measured):
        raise InputError(
            f"the memory of {machine.accelerators[0].device} is not known", hint="give it with --device-memory"
        )
    return [free.value * step // steps for step in range(1, steps + 1)]

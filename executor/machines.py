"""The machines that a plan's devices name."""

from collections.abc import Mapping

from ..plans.document import Plan
from ..plans.errors import ExecutionError
from ..plans.machine import Measured, MemoryKind
from .machine import Capabilities, Machine
from .machine_cpu import CpuMachine
from .machine_torch import TorchMachine
from .simulation.accelerator import simulated_device
from .simulation.device import DEVICE_TYPE, DEVICES, SimulatedDevice
from .simulation.machine import SimulatedMachine

CPU = "cpu"


def open_machines(plan: Plan, given: Mapping[str, Machine]) -> dict[str, Machine]:
    """A machine for each compute device of a plan, and for the CPU.

    A simulated device is made with the free memory that the plan was told. Those that are given are taken as they are.

    Raises:
        ExecutionError: this process has no such device.
    """
    wanted = sorted({CPU, *(placement.compute_device for placement in plan.placements)})
    return {device: given[device] if device in given else _open(device, plan) for device in wanted}


def _open(device: str, plan: Plan) -> Machine:
    if device == CPU:
        return CpuMachine()
    if device.startswith(f"{DEVICE_TYPE}:"):
        facts = next((each for each in plan.machine.accelerators if each.device == device), None)
        unified = facts is not None and facts.memory is MemoryKind.unified
        pinned = facts is not None and facts.pinned_memory and not unified
        return SimulatedMachine(
            _simulated(_index(device), _capacity(device, plan)),
            capabilities=Capabilities(pinned_memory=pinned, streams=not unified, unified=unified),
        )
    return TorchMachine(device)


def _simulated(index: int, capacity_bytes: int) -> SimulatedDevice:
    """The device, made anew; one of that capacity that something else is on already is shared, as a real one is."""
    present = DEVICES.get(index)
    if present is not None and present.capacity_bytes == capacity_bytes and present.allocated_bytes:
        return present
    return simulated_device(index, capacity_bytes=capacity_bytes)


def _index(device: str) -> int:
    number = device.partition(":")[2]
    if not number.isdecimal():
        raise ExecutionError(
            f"'{device}' is no simulated device", hint=f"they are called {DEVICE_TYPE}:0, {DEVICE_TYPE}:1"
        )
    return int(number)


def _capacity(device: str, plan: Plan) -> int:
    for accelerator in plan.machine.accelerators:
        if accelerator.device == device and isinstance(accelerator.free, Measured):
            return accelerator.free.value
    raise ExecutionError(f"the plan does not say how much memory {device} has", hint="plan with --device-memory")

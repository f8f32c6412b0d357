"""Axes and their budgets: how much of the host and of each device a plan may use.

Two axes are parts of the host: what may be page-locked for a device's copies, and what this process may lock.
"""

from ..plans.document import Budget
from ..plans.machine import Machine, Measured, MemoryKind
from ..plans.policy import Home, Policy
from ..policies.admission import pins

HOST, PINNED, LOCKED = "host", Home.pinned.value, Home.locked.value

_MOST = 1 << 62
"""More than any machine has: cgroups mean no limit by it."""


def axis_of(device: str, machine: Machine) -> str:
    """The pool that a device's memory comes from. The CPU and devices with unified memory draw on the host."""
    for accelerator in machine.accelerators:
        if accelerator.device == device and accelerator.memory is MemoryKind.separate:
            return device
    return HOST


def budgets_of(machine: Machine, policy: Policy, *, ranks: int = 1) -> dict[str, Budget]:
    """The budget of every axis: the host's, and one per device with memory of its own.

    Ranks on one host share it: what is usable is divided among their hard bytes. Mapped pages are shared as they are.
    """
    host = machine.host.available
    available = host.value if isinstance(host, Measured) else None
    for accelerator in machine.accelerators:
        # One pool, two figures for it: the smaller one is safe.
        if accelerator.memory is MemoryKind.unified and isinstance(accelerator.free, Measured):
            available = min(available, accelerator.free.value) if available is not None else accelerator.free.value
    budgets = {HOST: _budget(HOST, available, policy, ranks)}
    if any(map(pins, machine.accelerators)):
        budgets[PINNED] = _budget(PINNED, available, policy, ranks)
    if isinstance(machine.host.memlock, Measured):
        # The limit is each process's own, and so is the locking, though the pages are shared.
        budgets[LOCKED] = _budget(LOCKED, machine.host.memlock.value, policy, 1)
    for accelerator in machine.accelerators:
        if accelerator.memory is MemoryKind.separate:
            free = accelerator.free.value if isinstance(accelerator.free, Measured) else None
            budgets[accelerator.device] = _budget(accelerator.device, free, policy, 1)
    return budgets


def usable_bytes(axis: str, available: int, policy: Policy, ranks: int = 1) -> int:
    """The most that one rank may spend. A host copy of `available - reserve` bytes does not fit: one byte less does."""
    reserve = reserve_bytes(axis, available, policy)
    return max(0, available - reserve - (1 if axis == HOST else 0)) // (ranks if axis in (HOST, PINNED) else 1)


def reserve_bytes(axis: str, available: int, policy: Policy) -> int:
    """What is kept free of an axis."""
    if axis == HOST:
        return min(policy.reserve_bytes, available * policy.reserve_max_percent // 100)
    if axis == PINNED:
        return available - available * policy.pinned_max_percent // 100
    if axis == LOCKED:
        return 0
    return min(policy.device_reserve_bytes, available * policy.device_reserve_max_percent // 100)


def available_for(axis: str, need: int, policy: Policy, ranks: int = 1) -> int:
    """The least available bytes of an axis with which each rank may spend `need` bytes.

    For the pinned axis they are the host's. A policy that pins nothing has no such figure: then the most is given.
    """
    if need == 0:
        return 0
    low, high = need, _MOST
    while low < high:
        middle = (low + high) // 2
        if usable_bytes(axis, middle, policy, ranks) >= need:
            high = middle
        else:
            low = middle + 1
    return low


def _budget(axis: str, available: int | None, policy: Policy, ranks: int) -> Budget:
    return Budget(
        axis=axis,
        available_bytes=available,
        reserve_bytes=0 if available is None else reserve_bytes(axis, available, policy),
        usable_bytes=0 if available is None else usable_bytes(axis, available, policy, ranks),
    )

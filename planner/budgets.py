"""Axes and their budgets: how much of the host and of each device a plan may use.

Two axes are parts of the host: what may be page-locked for a device's copies, and what this process may lock.
"""

from collections.abc import Iterable

from ..plans.document import Budget
from ..plans.heap import gaps_matter
from ..plans.machine import Machine, Measured, MemoryKind
from ..plans.pipeline import Component, activations_are_known, most_activation_bytes
from ..plans.policy import Copies, Home, Policy
from ..plans.units import MIB
from ..policies.admission import pins

HOST, PINNED, LOCKED = "host", Home.pinned.value, Home.locked.value

_MOST = 1 << 62
"""More than any machine has: cgroups mean no limit by it."""

LEAST_RESERVE_BYTES = 24 * MIB
"""What a small host's share is raised to: kernels' scratch memory, Python's growth, the pages of a file being read."""

LEAST_MAPPED_RESERVE_BYTES = 48 * MIB
"""The same where weights may stay mapped: with less page cache a process starves on read-ahead, or is killed."""

_KEPT_PART = 4
"""One part in so many of the reserve is kept from mapped pages, for what else takes memory: classes that loading
imports, other processes."""


def axis_of(device: str, machine: Machine) -> str:
    """The pool that a device's memory comes from. The CPU and devices with unified memory draw on the host."""
    for accelerator in machine.accelerators:
        if accelerator.device == device and accelerator.memory is MemoryKind.separate:
            return device
    return HOST


def budgets_of(machine: Machine, policy: Policy, *, copied_bytes: int, ranks: int = 1) -> dict[str, Budget]:
    """The budget of every axis: the host's, and one per device with memory of its own.

    Ranks on one host share it: what is usable is divided among their hard bytes. Mapped pages are shared as they are.
    `copied_bytes` are those of a rank that leaves nothing mapped.
    """
    host = machine.host.available
    available = host.value if isinstance(host, Measured) else None
    for accelerator in machine.accelerators:
        # One pool, two figures for it: the smaller one is safe.
        if accelerator.memory is MemoryKind.unified and isinstance(accelerator.free, Measured):
            available = min(available, accelerator.free.value) if available is not None else accelerator.free.value
    budgets = {HOST: _budget(HOST, available, policy, copied_bytes, ranks)}
    if any(map(pins, machine.accelerators)):
        budgets[PINNED] = _budget(PINNED, available, policy, 0, ranks)
    if isinstance(machine.host.memlock, Measured):
        # The limit is each process's own, and so is the locking, though the pages are shared.
        budgets[LOCKED] = _budget(LOCKED, machine.host.memlock.value, policy, 0, 1)
    for accelerator in machine.accelerators:
        if accelerator.memory is MemoryKind.separate:
            free = accelerator.free.value if isinstance(accelerator.free, Measured) else None
            budgets[accelerator.device] = _budget(accelerator.device, free, policy, 0, 1)
    return budgets


def copied_bytes_of(components: Iterable[Component]) -> int:
    """What the host holds of components, all their weights copied there, and the most that a pass adds."""
    components = tuple(components)
    return sum(map(whole_bytes, components)) + most_activation_bytes(components)


def whole_bytes(component: Component) -> int:
    """All weights of a component, packed."""
    sizes = (size for stack in component.stacks for size in stack.sizes)
    return component.fixed_packed_bytes + sum(size.packed_bytes * (size.layers[1] - size.layers[0]) for size in sizes)


def gives_back(host: Budget, policy: Policy, components: Iterable[Component], copied_bytes: int, ranks: int) -> bool:
    """Whether the executor will give freed activations back at once, as far as is known before weights are placed."""
    activations = most_activation_bytes(components)
    most = copied_bytes if policy.copies is Copies.when_they_fit else activations
    peak = ranks * min(host.usable_bytes, most)
    return gaps_matter(host.available_bytes, peak=peak, activations=ranks * activations)


def cacheable_bytes(host: Budget, components: Iterable[Component], ranks: int) -> int:
    """The most that one rank's hard bytes and the mapped pages that stay cached may take of the host together.

    The kernel drops such pages when it has to, so they may take most of the reserve; not where that has to cover
    activations that are unknown. Nothing stays, not even nothing at all, on a host that was not measured: -1.
    """
    if host.available_bytes is None:
        return -1
    if not activations_are_known(components):
        return host.usable_bytes
    kept = max(LEAST_MAPPED_RESERVE_BYTES, host.reserve_bytes // _KEPT_PART)
    return host.usable_bytes + max(0, host.reserve_bytes - kept) // ranks


def usable_bytes(axis: str, available: int, policy: Policy, copied_bytes: int, ranks: int = 1) -> int:
    """The most that one rank may spend. A host copy of `available - reserve` bytes does not fit: one byte less does."""
    left = available - reserve_bytes(axis, available, policy, copied_bytes, ranks)
    return max(0, left - (1 if axis == HOST else 0)) // (ranks if axis in (HOST, PINNED) else 1)


def reserve_bytes(axis: str, available: int, policy: Policy, copied_bytes: int, ranks: int = 1) -> int:
    """What is kept free of an axis: more of a small host where `copied_bytes` do not fit, and weights stay mapped."""
    if axis == PINNED:
        return available - available * policy.pinned_max_percent // 100
    if axis == LOCKED:
        return 0
    if axis != HOST:
        return min(policy.device_reserve_bytes, available * policy.device_reserve_max_percent // 100)
    share = available * policy.reserve_max_percent // 100
    least, mapped = (
        min(available, policy.reserve_bytes, max(share, floor))
        for floor in (LEAST_RESERVE_BYTES, LEAST_MAPPED_RESERVE_BYTES)
    )
    return least if copied_bytes * ranks < available - least else mapped


def available_for(axis: str, need: int, policy: Policy, copied_bytes: int, ranks: int = 1) -> int:
    """The least available bytes of an axis with which each rank may spend `need` bytes, if the policy lets it at all.

    Those of the pinned axis are the host's.
    """
    if need == 0:
        return 0
    low, high = need, _MOST
    while low < high:
        middle = (low + high) // 2
        if usable_bytes(axis, middle, policy, copied_bytes, ranks) >= need:
            high = middle
        else:
            low = middle + 1
    return low


def _budget(axis: str, available: int | None, policy: Policy, copied_bytes: int, ranks: int) -> Budget:
    if available is None:
        return Budget(axis=axis, available_bytes=None, reserve_bytes=0, usable_bytes=0)
    return Budget(
        axis=axis,
        available_bytes=available,
        reserve_bytes=reserve_bytes(axis, available, policy, copied_bytes, ranks),
        usable_bytes=usable_bytes(axis, available, policy, copied_bytes, ranks),
    )

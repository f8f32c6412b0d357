"""The accelerators that torch sees, and machines that are given instead of measured."""

import sys
from pathlib import Path
from typing import Any

from ...plans.machine import Accelerator, Host, Machine, Measured, MemoryKind, Reading, Unmeasurable

_DEVICE_NODES = ("nvidiactl", "nvidia0", "kfd", "dxg", "accel", "davinci_manager", "dri")
"""What the kernel shows under /dev when there is hardware that torch could drive."""

_UNIFIED_KINDS = frozenset({"mps"})
_PINNED_KINDS = frozenset({"cuda", "xpu", "hpu", "npu"})
_STREAM_KINDS = _PINNED_KINDS | {"sim"}


def measure_accelerators(root: Path = Path("/")) -> tuple[Accelerator, ...]:
    """Every device that torch can compute on, besides the CPU.

    Torch is imported only where there may be one: on Linux that is told by the device nodes, which is some 2 s quicker.
    """
    if sys.platform == "linux" and not any((root / "dev" / node).exists() for node in _DEVICE_NODES):
        return ()
    import torch

    if not torch.accelerator.is_available():
        return ()
    current = torch.accelerator.current_accelerator()
    kind = current.type if current is not None else "unknown"
    backend = torch.get_device_module(kind)
    return tuple(_measured(kind, index, backend) for index in range(torch.accelerator.device_count()))


def given_accelerator(device: str, memory_bytes: int) -> Accelerator:
    """An accelerator that is not here, with all its memory free. What it can do follows from its kind."""
    kind = device.partition(":")[0]
    figure = Measured(value=memory_bytes, source="given")
    return Accelerator(
        device=device,
        kind=kind,
        name=f"given {kind}",
        memory=MemoryKind.unified if kind in _UNIFIED_KINDS else MemoryKind.separate,
        total=figure,
        free=figure,
        pinned_memory=kind in _PINNED_KINDS,
        streams=kind in _STREAM_KINDS,
    )


def given_host(memory_bytes: int) -> Host:
    """A host that is not here, of which this much is available."""
    figure = Measured(value=memory_bytes, source="given")
    unknown = Unmeasurable(why="the host was given, not measured")
    return Host(
        platform="given", available=figure, total=figure, binding="given", memlock=unknown, shared_memory=unknown
    )


def with_given(machine: Machine, *, host: Host | None, accelerators: tuple[Accelerator, ...] | None) -> Machine:
    """The machine with parts of it replaced by given ones; null leaves what was measured."""
    changes: dict[str, object] = {}
    if host is not None:
        changes["host"] = host
    if accelerators is not None:
        changes["accelerators"] = accelerators
    return machine.model_copy(update=changes)


def _measured(kind: str, index: int, backend: Any) -> Accelerator:
    free, total = _memory(kind, index, backend)
    return Accelerator(
        device=f"{kind}:{index}",
        kind=kind,
        name=_name(kind, index, backend),
        memory=MemoryKind.unified if _is_unified(kind, index, backend) else MemoryKind.separate,
        total=total,
        free=free,
        pinned_memory=kind in _PINNED_KINDS,
        streams=kind in _STREAM_KINDS,
    )


def _name(kind: str, index: int, backend: Any) -> str:
    get_name = getattr(backend, "get_device_name", None)
    return str(get_name(index)) if get_name is not None else kind


def _is_unified(kind: str, index: int, backend: Any) -> bool:
    """Integrated GPUs answer that they are; on Apple silicon there is nothing else."""
    if kind in _UNIFIED_KINDS:
        return True
    properties = getattr(backend, "get_device_properties", None)
    return properties is not None and bool(getattr(properties(index), "is_integrated", False))


def _memory(kind: str, index: int, backend: Any) -> tuple[Reading, Reading]:
    """Free and total bytes; unmeasurable with the reason where the backend does not tell."""
    if kind == "mps":
        # What Metal recommends to stay within, less what this process holds; the host's own figure bounds it too.
        total, used = int(backend.recommended_max_memory()), int(backend.driver_allocated_memory())
        source = "torch.mps.recommended_max_memory"
        return Measured(value=max(0, total - used), source=source), Measured(value=total, source=source)
    query = getattr(backend, "mem_get_info", None)
    if query is None:
        unknown = Unmeasurable(why=f"torch.{kind} has no mem_get_info")
        return unknown, unknown
    try:
        free, total = query(index)
    except RuntimeError as error:
        unknown = Unmeasurable(why=f"torch.{kind}.mem_get_info: {error}")
        return unknown, unknown
    source = f"torch.{kind}.mem_get_info"
    return Measured(value=int(free), source=source), Measured(value=int(total), source=source)

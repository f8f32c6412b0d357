"""Plans of one stack with any mixture of homes, holds and readers, made by hand, and modules that show every byte."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from placewise.executor.dtypes import torch_layout
from placewise.planner.draft import read_slot_bytes
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.document import Plan, Reader, Segment, Staging
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Cast, Deinterleave, Transform, Transpose
from placewise.plans.policy import Hold, Home
from placewise.plans.units import GIB, MIB
from torch import nn

from .modules import plan_for

Fate = tuple[Home, Hold]
Shape = tuple[torch.dtype, tuple[int, ...]]
Steps = tuple[Transform, ...]
DEVICE = "sim:2"
"""A simulated device of these tests alone, for what they leave to the garbage collection."""


def transformed(stored: torch.Tensor, steps: Iterable[Transform]) -> torch.Tensor:
    """A stored tensor as the module has it, made by whole copies."""
    for step in steps:
        match step:
            case Deinterleave(groups=groups, parts=parts):
                chunks = stored.chunk(groups * parts) if len(stored) else [stored] * groups * parts
                stored = torch.cat([chunk for part in range(parts) for chunk in chunks[part::parts]])
            case Transpose():
                stored = stored.transpose(-1, -2).contiguous()
            case Cast(dtype=dtype):
                stored = stored.to(torch_layout(dtype, ())[0])
    return stored


class Shown(nn.Module):
    """A layer whose output is what went in, and after it every element of its weights.

    Weights are of these shapes before each is transformed by its steps.
    """

    def __init__(self, shapes: Sequence[Shape], steps: Sequence[Steps] = ()) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(1))
        stored = [torch.randn(shape).to(dtype) for dtype, shape in shapes]
        each = steps or [()] * len(shapes)
        self.parts = nn.ParameterList(nn.Parameter(transformed(*pair)) for pair in zip(stored, each, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, *(part.reshape(-1).to(torch.float64) for part in (self.own, *self.parts))])


class Stacked(nn.Module):
    """Layers of such, and a fixed weight, to which a weight of the first layer may be tied."""

    def __init__(
        self, shapes: Sequence[Shape], *, layers: int, tied: bool = False, steps: Sequence[Steps] = (), last: Steps = ()
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shown(shapes, steps) for _ in range(layers)])
        self.last = nn.Parameter(transformed(torch.randn(3), last))
        if tied:
            self.blocks[0].get_submodule("parts").register_parameter("0", self.last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.cat([x, self.last.to(torch.float64)])


def plan_of(
    path: Path,
    fates: Sequence[Fate],
    fixed: Fate,
    *,
    reader: Reader = Reader.mapping,
    chunk_bytes: int = MIB,
    depth: int = 2,
    slots: int = 2,
    ahead: int = 1,
    on_device: bool = False,
    pinned: bool = True,
    device: str = DEVICE,
    transforms: Sequence[Transform] = (),
) -> Plan:
    """A plan in which each layer has its own fate, on the CPU or on a device."""
    given = (given_accelerator(device, GIB).model_copy(update={"pinned_memory": pinned}),) if on_device else ()
    plan = plan_for(path, Machine(host=given_host(GIB), accelerators=given), passes=3, transforms=transforms)
    placement, stack = plan.placements[0], plan.pipeline.components[0].stacks[0]
    reads = reader is not Reader.mapping
    staging = Staging(
        device=placement.compute_device,
        reader=reader,
        slots=slots,
        slot_bytes=max(1, *(read_slot_bytes(size, stack.extents) for size in stack.sizes)),
        chunk_bytes=chunk_bytes if reads else None,
        depth=depth if reads else None,
        prefetch_layers=ahead,
    )
    segments = [_segment(None, (), fixed)]
    segments += [_segment(stack.name, ((number, number + 1),), fate) for number, fate in enumerate(fates)]
    placed = placement.model_copy(update={"staging": staging, "segments": tuple(segments)})
    return plan.model_copy(update={"placements": (placed,)})


def _segment(stack: str | None, layers: tuple[tuple[int, int], ...], fate: Fate) -> Segment:
    return Segment(stack=stack, layers=layers, home=fate[0], hold=fate[1], bytes=0, packed_bytes=0)


def shift(path: Path, spaces: int) -> None:
    """Move a file's data by padding its header, as writers did that did not align it."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length] + b" " * spaces
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def locked_bytes() -> int:
    """What this process has locked, by the kernel's count."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmLck:"))


def open_files(folder: Path) -> int:
    """How many descriptors of this process are of files in a folder."""
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum(os.path.realpath(link).startswith(f"{folder.resolve()}/") for link in links)


def reader_threads() -> set[threading.Thread]:
    """Threads of readers: of this test, and of pipelines that earlier ones left to the garbage collection."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("placewise-read")}


def are_gone(threads: set[threading.Thread]) -> bool:
    """Whether threads end; those of a pool that is gone do so on their own, a little later."""
    end = time.monotonic() + 5
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)

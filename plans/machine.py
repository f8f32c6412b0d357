"""What was measured of a machine: the host this process may use, its accelerators, its disks."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from .calibration import Calibration
from .record import Record


class Measured(Record):
    """A figure that was read, and where."""

    kind: Literal["measured"] = "measured"
    value: NonNegativeInt
    source: str


class Unlimited(Record):
    """There is no limit, and that was read."""

    kind: Literal["unlimited"] = "unlimited"
    source: str


class Unmeasurable(Record):
    """This platform does not tell."""

    kind: Literal["unmeasurable"] = "unmeasurable"
    why: str


class Malformed(Record):
    """The source is there but does not make sense; never read as zero and never as no limit."""

    kind: Literal["malformed"] = "malformed"
    source: str
    why: str


Reading = Annotated[Measured | Unlimited | Unmeasurable | Malformed, Field(discriminator="kind")]


class CapKind(StrEnum):
    """Which file set the cap. `high` throttles instead of killing, and is planned with as a cap all the same."""

    limit = "limit"
    high = "high"


class Cap(Record):
    """One cgroup, this process's own or an ancestor, that caps memory.

    `headroom_bytes` is `limit_bytes - (usage_bytes - reclaimable_bytes)`, never below zero. Reclaimable are
    the file pages on the LRU lists: without shared memory and without locked pages.
    """

    hierarchy: Literal["v1", "v2"]
    path: str
    kind: CapKind
    limit_bytes: NonNegativeInt
    usage_bytes: NonNegativeInt
    reclaimable_bytes: NonNegativeInt
    headroom_bytes: NonNegativeInt


class Host(Record):
    """The host as this process may use it.

    `available` is the smallest of what the kernel says is available and of every cap's headroom; `binding`
    names which one that was. `total` is the machine's memory or the smallest cap's limit. Swap does not count.
    `memlock` is RLIMIT_MEMLOCK, `shared_memory` the size of /dev/shm.
    """

    platform: str
    available: Reading
    total: Reading
    binding: str
    caps: tuple[Cap, ...] = ()
    memlock: Reading
    shared_memory: Reading
    notes: tuple[str, ...] = ()


class MemoryKind(StrEnum):
    """Whether the accelerator has memory of its own or shares the host's."""

    separate = "separate"
    unified = "unified"


class Accelerator(Record):
    """One compute device other than the CPU. `device` is torch's name for it, such as `cuda:0`."""

    device: str
    kind: str
    name: str
    memory: MemoryKind
    total: Reading
    free: Reading
    pinned_memory: bool
    streams: bool


class Disk(Record):
    """The file system that holds the checkpoint. On a network one, page faults are the slowest way to read."""

    filesystem: str
    network: bool


class Machine(Record):
    """Everything measured, or given, that a plan was made for."""

    host: Host
    accelerators: tuple[Accelerator, ...] = ()
    disk: Disk | None = None
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        """Devices name the axes of a plan, beside those of the host."""
        names = ["cpu", "host", "page_cache", "pinned", "locked"]
        for accelerator in self.accelerators:
            if accelerator.device in names:
                raise ValueError(f"the device name '{accelerator.device}' is taken")
            names.append(accelerator.device)
        return self

"""Rates that were measured on one machine: what the planner's time model needs. Never used for another machine."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from .record import Record


class ReadMode(StrEnum):
    """How a file is read: through the page cache, around it, or by touching the pages of a mapping."""

    buffered = "buffered"
    direct = "direct"
    faults = "faults"


class DiskRate(Record):
    """Cold reads of one file system. `depth` is how many reads of `chunk_bytes` are under way at once.

    `cpu_s_per_gib` is the processor time that they cost, which compute on the CPU then lacks.
    """

    mode: ReadMode
    chunk_bytes: PositiveInt
    depth: PositiveInt
    bytes_per_s: PositiveFloat
    cpu_s_per_gib: NonNegativeFloat | None = None


class LinkRate(Record):
    """Copies from a host home to a device, with the weights already in memory."""

    device: str
    source: Literal["pageable", "pinned", "mapped"]
    bytes_per_s: PositiveFloat


class ComputeRate(Record):
    """Matrix products on a device, by the file format's dtype names (`F32`, `BF16`).

    `rows` are those of the operand that meets the weights: tokens, mostly. With few of them the weights' way from
    memory decides, and not the arithmetic. Null is a square product, as large as the device likes.
    """

    device: str
    dtype: str
    rows: PositiveInt | None = None
    flops_per_s: PositiveFloat


class Calibration(Record):
    """All rates of one machine, with the day they were measured and the machine's fingerprint.

    `given` marks rates that were stated for a machine that is not here. Rates that were not measured are absent, and
    what depends on them is unknown. `pin_s_per_gib` is null without pinned memory. `cores` are those that this process
    might use, of which a quota may leave a fraction. `touch_s_per_gib` is what fresh memory costs, page by page.
    """

    measured_at: str
    fingerprint: str
    given: bool = False
    cores: PositiveFloat | None = Field(default=None, exclude_if=lambda cores: cores is None)
    memory_copy_bytes_per_s: PositiveFloat | None = None
    disks: tuple[DiskRate, ...] = ()
    links: tuple[LinkRate, ...] = ()
    compute: tuple[ComputeRate, ...] = ()
    pin_s_per_gib: NonNegativeFloat | None = None
    touch_s_per_gib: NonNegativeFloat | None = Field(default=None, exclude_if=lambda seconds: seconds is None)
    notes: tuple[str, ...] = ()

"""The rates that the simulator and the solver reckon with: one device's view of a calibration."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..plans.calibration import Calibration, DiskRate, ReadMode
from ..plans.units import MIB
from ..policies.admission import CPU

_AS_FAST = 2 / 3
"""Rates of one disk in one minute differ by more than a fifth without any cause that could be planned for, and of some
by a factor of two."""

_UNDER_WAY_BYTES = 32 * MIB
"""With fewer bytes under way a disk idles beside the compute; more gain nothing, and take buffers (decision 0009)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What moves and computes how fast. None is unknown, and what depends on it is unknown too.

    Attributes:
        device: the compute device.
        disk: the way of cold reads into slots, with its mode, chunk and depth: the fastest around the page cache, or
            through it where there is none around it. What is read so does not stay in the cache, which has no room for
            it; to push it through all the same takes up to twice as long under a memory cap.
        buffered: the fastest cold reads through the page cache.
        faults: page faults by as few threads as were measured, for a fault stops the thread that computes.
        link_pageable_bytes_per_s: copies from host memory to the device.
        link_pinned_bytes_per_s: the same from page-locked memory.
        link_mapped_bytes_per_s: the same from a mapped file in the page cache; as pageable where not measured.
        memory_copy_bytes_per_s: copies from host memory to host memory.
        pin_s_per_gib: what it costs to page-lock memory.
        touch_s_per_gib: what fresh memory costs the CPU, where activations take it and not what the heap has kept.
        cores: processor cores that compute and reads share.
        flops: operations per second of matrix products, by dtype name and rows; null rows are a square product.
    """

    device: str
    disk: DiskRate | None = None
    buffered: DiskRate | None = None
    faults: DiskRate | None = None
    link_pageable_bytes_per_s: float | None = None
    link_pinned_bytes_per_s: float | None = None
    link_mapped_bytes_per_s: float | None = None
    memory_copy_bytes_per_s: float | None = None
    pin_s_per_gib: float | None = None
    touch_s_per_gib: float | None = None
    cores: float | None = None
    flops: tuple[tuple[str, int | None, float], ...] = ()

    @property
    def disk_bytes_per_s(self) -> float | None:
        """Cold reads by the fastest way."""
        return None if self.disk is None else self.disk.bytes_per_s

    @property
    def buffered_bytes_per_s(self) -> float | None:
        """Cold reads through the page cache."""
        return None if self.buffered is None else self.buffered.bytes_per_s

    @property
    def fault_bytes_per_s(self) -> float | None:
        """Cold reads by touching the pages of a mapping.

        No faster than the reads into slots: where they were, the disk had a better moment; and with a full cache they
        are slower than where they were measured.
        """
        if self.faults is None:
            return None
        return min(self.faults.bytes_per_s, self.disk_bytes_per_s or self.faults.bytes_per_s)

    def flops_per_s(self, dtype: str, rows: int | None = None) -> float | None:
        """Operations per second in this dtype, by the file format's name; None where that was not measured.

        Between measured rows the rate is taken from the nearest two, evenly on logarithmic scales; beyond the last it
        is that of a square product.
        """
        square = next((rate for name, found, rate in self.flops if (name, found) == (dtype, None)), None)
        if rows is None or square is None:
            return square
        known = sorted((found, rate) for name, found, rate in self.flops if name == dtype and found is not None)
        above = next((point for point in known if point[0] >= rows), None)
        below = next((point for point in reversed(known) if point[0] <= rows), None)
        if above is None:
            return square
        (high, fast) = above
        if below is None:
            return fast * rows / high  # fewer rows still fetch all the weights
        (low, slow) = below
        part = math.log(rows / low) / math.log(high / low) if high > low else 1.0
        return math.exp(math.log(slow) * (1 - part) + math.log(fast) * part)


def rates_of(calibration: Calibration | None, device: str, *, fresh: bool = False) -> Rates:
    """The rates for one compute device such as `cuda:0` or `cpu`; all unknown without a calibration.

    `fresh`: whether freed activations are given back at once, so that the next ones take fresh memory.
    The result does not depend on the order of the records.
    """
    if calibration is None:
        return Rates(device=device)
    links = {link.source: link.bytes_per_s for link in calibration.links if link.device == device}
    reads = [rate for rate in calibration.disks if rate.mode is not ReadMode.faults]
    buffered = _fastest(rate for rate in reads if rate.mode is ReadMode.buffered)
    faults = [rate for rate in calibration.disks if rate.mode is ReadMode.faults]
    return Rates(
        device=device,
        disk=_fastest(rate for rate in reads if rate.mode is ReadMode.direct) or buffered,
        buffered=buffered,
        faults=min(faults, key=lambda rate: (rate.depth, rate.chunk_bytes), default=None),
        link_pageable_bytes_per_s=links.get("pageable"),
        link_pinned_bytes_per_s=links.get("pinned"),
        link_mapped_bytes_per_s=links.get("mapped", links.get("pageable")),
        memory_copy_bytes_per_s=calibration.memory_copy_bytes_per_s,
        pin_s_per_gib=calibration.pin_s_per_gib,
        touch_s_per_gib=calibration.touch_s_per_gib if fresh and device == CPU else None,
        cores=calibration.cores,
        flops=tuple((rate.dtype, rate.rows, rate.flops_per_s) for rate in calibration.compute if rate.device == device),
    )


def _fastest(rates: Iterable[DiskRate]) -> DiskRate | None:
    """Of the ways that are as fast as can be told apart, that with most bytes under way, but no more than is of use.

    A disk that few reads keep as busy as many may have been at its limit just then; in a faster moment they leave it
    idle between one's end and the next one's begin, and the more so beside the compute.
    """
    known = list(rates)
    enough = _AS_FAST * max((rate.bytes_per_s for rate in known), default=0.0)
    near = (rate for rate in known if rate.bytes_per_s >= enough)
    return max(near, key=usefulness, default=None)


def usefulness(rate: DiskRate) -> tuple[int, int, int]:
    """Highest for what is preferred of ways that are as fast: most bytes under way up to 32 MiB, then the fewest."""
    under_way = rate.chunk_bytes * rate.depth
    return min(under_way, _UNDER_WAY_BYTES), -under_way, rate.depth

"""Measure the rates of this machine in some seconds, or state those of one that is not here."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ...plans.calibration import Calibration, ComputeRate, DiskRate, LinkRate, ReadMode
from ...plans.errors import InputError
from ...plans.machine import Accelerator, Disk, Machine, Measured
from ...plans.units import MIB
from ...policies.admission import CPU
from ..measuring.cores import available_cores
from ..measuring.disk import disk_of
from ..measuring.host import measure_host
from .cache import fingerprint_of
from .compute import here, measure_copy, measure_links, measure_products
from .disk import DiskMeasurement
from .effort import USUAL, Effort
from .files import checkpoint_files, open_sources

GIVEN = "given"

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_DISK_SHARE = 0.7

Progress = Callable[[str, float], None]
"""Hears what is measured now, and which part of the whole is done, from 0 to 1."""


def calibrate(
    model: Path,
    accelerators: tuple[Accelerator, ...],
    *,
    progress: Progress | None = None,
    effort: Effort = USUAL,
    scratch: Path | None = None,
) -> Calibration:
    """Measure the disk that holds `model`, memory, the links to the accelerators, and matrix products.

    Parts of the checkpoint that no process maps leave the page cache, so that reads are cold; nothing in it changes.
    Where its files are small or have holes, a file is written in their place and goes again. Rates that could not be
    measured are absent, and the notes say why. Other work on the machine meanwhile makes rates lower.

    Args:
        model: the checkpoint, a file or a folder.
        accelerators: those of the facts. Simulated ones, and those that are not here, are left out.
        progress: told what is measured, and which part is done.
        effort: how much is read, copied and computed.
        scratch: a folder of the same file system in which a file may be written, instead of the model's own.

    Raises:
        InputError: `model` does not exist or cannot be read.
    """
    told = progress or _silent
    machine = Machine(host=measure_host(), accelerators=accelerators, disk=disk_of(model))
    fingerprint = fingerprint_of(machine, model)
    files = checkpoint_files(model)
    available = machine.host.available
    effort = effort.within(available.value) if isinstance(available, Measured) else effort
    disks, disk_notes = _measure_disk(
        model, machine.disk, effort, scratch, lambda part: told("disk", _DISK_SHARE * part)
    )
    told("memory", _DISK_SHARE)
    copy_bytes_per_s = measure_copy(effort)
    real = here(accelerators)
    told("links", 0.8)
    links = measure_links(real, files[0] if files else None, effort)
    told("matrix products", 0.85)
    products = measure_products((CPU, *(each.device for each in real)), effort)
    told("done", 1.0)
    absent = [each.device for each in accelerators if each not in real]
    absent_notes = [f"{device} is simulated or not here: its link and products were not measured" for device in absent]
    return Calibration(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        cores=available_cores(),
        memory_copy_bytes_per_s=copy_bytes_per_s,
        disks=disks,
        links=links.rates,
        compute=products.rates,
        pin_s_per_gib=links.pin_s_per_gib,
        notes=(*disk_notes, *absent_notes, *links.notes, *products.notes),
    )


def given_calibration(
    *,
    disk_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
    device: str | None = None,
    flops_per_s: float | None = None,
) -> Calibration:
    """Rates of a machine that is not here. What is not given stays unknown.

    Args:
        disk_bytes_per_s: cold reads, taken as direct ones of 4 MiB, four at a time. Page faults stay unknown.
        link_bytes_per_s: copies to `device`, from pageable, pinned and mapped memory alike.
        device: the accelerator; the link needs it.
        flops_per_s: matrix products on `device`, or on the CPU without one; for F32, BF16 and F16 alike.

    Raises:
        InputError: a rate is not above zero, or there is a link without a device.
    """
    for name, rate in (("disk", disk_bytes_per_s), ("link", link_bytes_per_s), ("compute", flops_per_s)):
        if rate is not None and not 0 < rate < float("inf"):
            raise InputError(f"the {name} rate {rate:g} is not a number above zero", hint="leave out what is not known")
    if link_bytes_per_s is not None and device in (None, CPU):
        raise InputError("a link rate needs the accelerator that the link leads to", hint="name it, such as cuda:0")
    disk = disk_bytes_per_s
    disks = () if disk is None else (DiskRate(mode=ReadMode.direct, chunk_bytes=4 * MIB, depth=4, bytes_per_s=disk),)
    links = () if link_bytes_per_s is None or device is None else _given_links(device, link_bytes_per_s)
    compute = () if flops_per_s is None else _given_products(device or CPU, flops_per_s)
    return Calibration(measured_at=GIVEN, fingerprint=GIVEN, given=True, disks=disks, links=links, compute=compute)


def _measure_disk(
    model: Path, disk: Disk | None, effort: Effort, scratch: Path | None, progress: Callable[[float], None]
) -> tuple[tuple[DiskRate, ...], tuple[str, ...]]:
    if sys.platform != "linux":
        return (), (f"disk rates are measured on Linux alone, not on {sys.platform}",)
    if disk is not None and disk.filesystem in _IN_MEMORY:
        return (), (f"the model is on {disk.filesystem}, which is memory: no disk was measured",)
    network = disk is not None and disk.network
    notes: tuple[str, ...] = ()
    if disk is not None and disk.network:
        notes = (
            f"{disk.filesystem} is a network or FUSE file system: rates vary with what others do there, and page "
            "faults, the slowest way to read it, were not measured",
        )
    with open_sources(
        model, least_bytes=effort.least_file_bytes, temporary_bytes=effort.temporary_bytes, scratch=scratch
    ) as sources:
        if not sources.files:
            return (), (*notes, *sources.notes)
        measurement = DiskMeasurement(files=sources.files, effort=effort, faults=not network)
        measurement.run(progress)
        return measurement.rates, (*notes, *sources.notes, *measurement.notes)


def _given_links(device: str, rate: float) -> tuple[LinkRate, ...]:
    return tuple(
        LinkRate(device=device, source=source, bytes_per_s=rate) for source in ("pageable", "pinned", "mapped")
    )


def _given_products(device: str, rate: float) -> tuple[ComputeRate, ...]:
    return tuple(ComputeRate(device=device, dtype=dtype, flops_per_s=rate) for dtype in ("F32", "BF16", "F16"))


def _silent(label: str, part: float) -> None:
    pass

"""Measure the rates of this machine in some seconds."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ...plans.calibration import Calibration, DiskRate
from ...plans.machine import Accelerator, Disk, Machine, Measured
from ...policies.admission import CPU
from ..measuring.cores import available_cores
from ..measuring.disk import disk_of
from ..measuring.host import measure_host
from .cache import fingerprint_of
from .compute import here, measure_copy, measure_links, measure_products, measure_touch
from .disk import DiskMeasurement
from .effort import USUAL, Effort
from .files import checkpoint_files, open_sources

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
    copy_bytes_per_s, touch_s_per_gib = measure_copy(effort), measure_touch(effort)
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
        touch_s_per_gib=touch_s_per_gib,
        notes=(*disk_notes, *absent_notes, *links.notes, *products.notes),
    )


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


def _silent(label: str, part: float) -> None:
    pass

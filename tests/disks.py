"""Small files on a real disk, and how little a test reads of them."""

import os
from pathlib import Path

import pytest
from placewise.planner.calibrating.effort import Effort
from placewise.planner.measuring.disk import disk_of
from placewise.plans.units import KIB, MIB

LITTLE = Effort(
    region_bytes=256 * KIB,
    chunk_bytes=(64 * KIB, 128 * KIB),
    depths=(1, 2),
    disk_s=0.5,
    finals=1,
    final_bytes=256 * KIB,
    least_file_bytes=4 * MIB,
    temporary_bytes=4 * MIB,
    copy_bytes=1 * MIB,
    matmul_size=256,
    compute_s=0.01,
    repeats=1,
)


def dense(file: Path, size: int) -> Path:
    with file.open("wb") as opened:
        opened.write(os.urandom(size))
        opened.flush()
        os.fsync(opened.fileno())
    return file


def sparse(file: Path, size: int) -> Path:
    file.touch()
    os.truncate(file, size)
    return file


def on_a_disk(folder: Path) -> Path:
    """The folder; where it is in memory, the test is skipped."""
    disk = disk_of(folder)
    if disk is None or disk.filesystem == "tmpfs":
        pytest.skip("the folder of temporary files is in memory")
    return folder

"""How far a disk is read ahead of a page fault: the kernel's setting, told and, for a benchmark, set.

It is 128 KiB where nobody changed it (`VM_READAHEAD_PAGES`, include/linux/mm.h); distributions and clouds do.
"""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from placewise.plans.units import KIB


@contextlib.contextmanager
def read_ahead(path: Path, wanted_bytes: int | None) -> Generator[int | None]:
    """Set the read-ahead of the disk that holds `path`, and set it back at the end; files opened meanwhile have it.

    Args:
        path: a file or a folder.
        wanted_bytes: what is set; null leaves it as it is.

    Yields:
        what is in force, in bytes; null where the kernel does not tell.

    Raises:
        SystemExit: it cannot be set.
    """
    file = _setting(path)
    if file is None:
        if wanted_bytes is not None:
            raise SystemExit(f"{path}: the kernel tells no read-ahead of its disk; leave --read-ahead out")
        yield None
        return
    before = file.read_text()
    if wanted_bytes is not None:
        try:
            file.write_text(str(wanted_bytes // KIB))
        except PermissionError:
            raise SystemExit(f"{file} cannot be written to; run as root") from None
    try:
        yield int(file.read_text()) * KIB
    finally:
        if wanted_bytes is not None:
            file.write_text(before)


def _setting(path: Path) -> Path | None:
    """Where the kernel keeps it, of the whole disk if `path` is on a partition."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    places = (each / "queue" / "read_ahead_kb" for each in (block, block.parent))
    return next((each for each in places if each.is_file()), None)

"""Which addresses are backed by a file: one snapshot of the process's mappings, then a binary search per question."""

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MapsSnapshot:
    """File-backed address ranges at one moment, ascending. A later mapping is not seen."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    files: tuple[str, ...]

    def file_at(self, address: int) -> str | None:
        """The file behind an address; null for anonymous memory and for a null pointer."""
        index = bisect_right(self.starts, address) - 1
        if address == 0 or index < 0 or address >= self.stops[index]:
            return None
        return self.files[index]


def snapshot_maps(source: Path = Path("/proc/self/maps")) -> MapsSnapshot | None:
    """Read the mappings once. Null where the platform has no such file: then nobody knows what backs an address."""
    try:
        text = source.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    ranges = sorted(found for line in text.splitlines() if (found := _file_range(line)) is not None)
    return MapsSnapshot(
        starts=tuple(start for start, _, _ in ranges),
        stops=tuple(stop for _, stop, _ in ranges),
        files=tuple(file for _, _, file in ranges),
    )


def _file_range(line: str) -> tuple[int, int, str] | None:
    """`start-stop perms offset device inode path`; only those with an inode and a path are of a file."""
    fields = line.split(maxsplit=5)
    if len(fields) < 6 or fields[4] == "0":
        return None
    start, stop = fields[0].split("-")
    return int(start, 16), int(stop, 16), fields[5]

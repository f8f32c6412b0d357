"""How much a calibration reads, copies and computes."""

from dataclasses import dataclass, replace

from ...plans.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Accuracy against seconds; as it stands, some 13 s on a machine with a local disk.

    Attributes:
        region_bytes: read in one measurement of the disk, or `chunk * depth` where that is more.
        chunk_bytes: sizes of one read, each a multiple of the page size.
        depths: how many reads are under way at once.
        disk_s: after this time the disk is not measured further. Each way is measured once, in about this time at most.
        finalists: of each mode so many of the fastest ways are measured again, for the best of many is often mere luck.
        finals: how often at most.
        final_bytes: read in each of these measurements: so much that begin and end, when few reads are under way, are
            a small part of it.
        least_file_bytes: smaller files of the checkpoint are not read.
        temporary_bytes: the size of a file that is written where the checkpoint's own cannot be read.
        copy_bytes: copied in one measurement of memory or of a link.
        matmul_size: rows and columns of the largest matrix product on the CPU; accelerators take twice that.
        rows: of the products of few rows.
        compute_s: the longest that a single matrix product is meant to take.
        repeats: of copies and matrix products, of which the best counts.
    """

    region_bytes: int = 64 * MIB
    chunk_bytes: tuple[int, ...] = (1 * MIB, 4 * MIB, 16 * MIB)
    depths: tuple[int, ...] = (1, 4, 8)
    disk_s: float = 8.0
    finalists: int = 3
    finals: int = 24
    final_bytes: int = 256 * MIB
    least_file_bytes: int = 256 * MIB
    temporary_bytes: int = 512 * MIB
    copy_bytes: int = 256 * MIB
    matmul_size: int = 2048
    rows: tuple[int, ...] = (1, 8, 64, 512)
    compute_s: float = 0.2
    repeats: int = 3

    def within(self, available_bytes: int) -> "Effort":
        """The same with no more memory at once than a host has to spare: it must not be killed for being measured."""
        copy_bytes = min(self.copy_bytes, max(MIB, available_bytes // 8))
        fitting = (chunk for chunk in self.chunk_bytes if chunk * max(self.depths) <= available_bytes // 4)
        return replace(self, copy_bytes=copy_bytes, chunk_bytes=tuple(fitting) or self.chunk_bytes[:1])


USUAL = Effort()
"""What a calibration takes where nothing else is said."""

"""The safetensors header: names, dtypes, shapes and offsets, read without touching the data.

The rules are those of the format: an 8-byte little-endian header length, JSON of that length, then data that the
tensors' `data_offsets` cover completely, in some order, without overlap.
"""

import hashlib
import os
import stat
import struct
from dataclasses import dataclass, field
from io import FileIO
from operator import itemgetter
from pathlib import Path

import msgspec

from ..plans.errors import CheckpointError

DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of one element, by the format's own dtype names (safetensors 0.8)."""

PACK_ALIGNMENT = 64
"""Each tensor of a packed unit begins at a multiple of this many bytes: a cache line, and torch's own alignment."""

READ_ALIGNMENT = 4096
"""Reads around the page cache begin, end and land at multiples of a disk's logical block, which is at most this."""

# A pipe with nobody at its other end would be waited for; Windows has no such pipes, and text files.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_MAX_HEADER_BYTES = 100_000_000  # The format's own cap.
_NOT_SAFETENSORS = "this is not a complete safetensors file: download or save it again"


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor. `data_offsets` are [begin, end) in bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


def part_of_rank(entry: TensorEntry, rank: int, ranks: int) -> TensorEntry:
    """One rank's part of a tensor that is divided along its first axis; all of it where that does not divide.

    Rows lie one after another in the file, so a part is a range of its bytes.
    """
    if not entry.shape or entry.shape[0] % ranks or entry.nbytes % ranks:
        return entry
    begin, nbytes = entry.data_offsets[0], entry.nbytes // ranks
    return TensorEntry(
        dtype=entry.dtype,
        shape=(entry.shape[0] // ranks, *entry.shape[1:]),
        data_offsets=(begin + rank * nbytes, begin + (rank + 1) * nbytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One file's identity and tensors. `aliases` maps names that were dropped as duplicates to the stored one."""

    path: Path
    size_bytes: int
    mtime_ns: int
    header_sha256: str
    data_start: int
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def alignment(self) -> int:
        """The largest power of two, up to 4096, at which every tensor's data begins in the file."""
        offsets = 4096
        for entry in self.tensors.values():
            offsets |= self.data_start + entry.data_offsets[0]
        return offsets & -offsets


def packed_bytes(nbytes: int) -> int:
    """What a tensor of `nbytes` takes in a packed unit."""
    return -(-nbytes // PACK_ALIGNMENT) * PACK_ALIGNMENT


def slot_bytes_for_reads(nbytes: int, extents: int) -> int:
    """The most that `nbytes` in so many file ranges take when each range is read in whole blocks of the disk.

    A range begins and ends within a block, and the buffer's own begin is moved to a block's.
    """
    return -(-nbytes // READ_ALIGNMENT) * READ_ALIGNMENT + (2 * extents + 1) * READ_ALIGNMENT


def read_header(path: Path) -> Header:
    """Read and check one file's header. The file is opened once and its data is not read.

    Raises:
        CheckpointError: the file cannot be opened, is truncated, or breaks a rule of the format.
    """
    try:
        with FileIO(os.open(path, _OPEN_FLAGS)) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise CheckpointError(f"{path}: not a regular file", hint="give a safetensors file")
            raw = _raw_header(path, file, facts.st_size)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", hint="give a safetensors file that can be read") from None
    entries, metadata = _decode(path, raw)
    data_start = 8 + len(raw)
    _check_entries(path, entries, facts.st_size - data_start)
    return Header(
        path=path,
        size_bytes=facts.st_size,
        mtime_ns=facts.st_mtime_ns,
        header_sha256=hashlib.sha256(raw).hexdigest(),
        data_start=data_start,
        tensors=entries,
        aliases={name: kept for name, kept in metadata.items() if kept in entries and name not in entries},
    )


def _raw_header(path: Path, file: FileIO, size: int) -> bytes:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {size} bytes, too short for a header", hint=_NOT_SAFETENSORS)
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        raise CheckpointError(
            f"{path}: the header's length is {length} bytes, but only {size - 8} follow",
            hint=_NOT_SAFETENSORS,
        )
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header's length is {length} bytes; the format allows {_MAX_HEADER_BYTES}",
            hint=_NOT_SAFETENSORS,
        )
    raw = bytearray()
    while len(raw) < length:
        part = file.read(length - len(raw))
        if not part:
            raise CheckpointError(f"{path}: ends in its header, after {8 + len(raw)} bytes", hint=_NOT_SAFETENSORS)
        raw += part
    return bytes(raw)


_entry_decoder = msgspec.json.Decoder(TensorEntry)


def _decode(path: Path, raw: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The entries by name, and the free-form metadata, which holds text only."""
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not a JSON object: {error}", hint=_NOT_SAFETENSORS) from None
    name = "__metadata__"
    try:
        metadata = msgspec.json.decode(parts.pop(name, msgspec.Raw(b"{}")), type=dict[str, str] | None) or {}
        entries: dict[str, TensorEntry] = {}
        for name, part in parts.items():
            entries[name] = _entry_decoder.decode(part)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: tensor '{name}': {error}", hint=_NOT_SAFETENSORS) from None
    return entries, metadata


def _check_entries(path: Path, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    """Every dtype known, every size what its shape says, and the data covered without holes or overlap."""
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        bits = DTYPE_BITS.get(entry.dtype)
        if bits is None:
            raise CheckpointError(
                f"{path}: tensor '{name}': unknown dtype '{entry.dtype}'",
                hint=f"known are {', '.join(sorted(DTYPE_BITS))}",
            )
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= data_bytes:
            raise CheckpointError(
                f"{path}: tensor '{name}': offsets [{begin}, {end}) are out of the file's {data_bytes} bytes of data",
                hint=_NOT_SAFETENSORS,
            )
        if _elements(entry.shape) * bits != (end - begin) * 8:
            raise CheckpointError(
                f"{path}: tensor '{name}': shape {list(entry.shape)} of {entry.dtype} "
                f"does not take {end - begin} bytes",
                hint=_NOT_SAFETENSORS,
            )
        spans.append((begin, end, name))
    _check_cover(path, spans, data_bytes)


def _elements(shape: tuple[int, ...]) -> int:
    """How many; -1 where an extent is negative, or where it or the count leaves the format's 64 bits."""
    count = 1
    for extent in shape:
        count *= extent
        if not 0 <= extent < 1 << 64 or count >= 1 << 64:
            return -1
    return count


def _check_cover(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    spans.sort(key=itemgetter(0, 1))
    covered, before = 0, "the header"
    for begin, end, name in spans:
        if begin != covered:
            fault = "overlaps" if begin < covered else f"leaves a hole of {begin - covered} bytes after"
            raise CheckpointError(
                f"{path}: tensor '{name}': its data at [{begin}, {end}) {fault} that of '{before}'",
                hint=_NOT_SAFETENSORS,
            )
        covered, before = end, name
    if covered != data_bytes:
        raise CheckpointError(
            f"{path}: the tensors end at byte {covered} of {data_bytes} bytes of data", hint=_NOT_SAFETENSORS
        )

"""Cold reads of a file system, timed: through the page cache, around it, and by page faults. Linux only."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, harmonic_mean

from ...plans.calibration import DiskRate, ReadMode
from ...plans.units import MIB
from ..rates import usefulness
from .effort import Effort
from .files import Source
from .timed_reads import Region, Sample, Way, is_cached, timed_read

_NOTE_CACHED = "the page cache keeps the file (in use or locked): {mode} reads"
_NOTE_REFUSED = "the file system refuses O_DIRECT: direct reads"
_NOTE_SMALL = "the files are small: {mode} reads of large chunks many at a time"
_NOTE_AGAIN = "parts of the files were read more than once, which a disk with a cache answers faster"
_NOTE_SLOW = "the disk is slow: {mode} reads of large chunks many at a time"
_SMALL_PARTS = 8
_FOLIO_BYTES = 4 * MIB
_PAUSES_S = (0.0, 0.001, 0.01)


@dataclass(slots=True, kw_only=True)
class DiskMeasurement:
    """All ways of reading some files, measured in turn; no part of a file is read twice while others are left.

    `notes` tell which ways were left out and why, and `rates` what the others gave.
    """

    files: tuple[Source, ...]
    effort: Effort
    faults: bool = True
    _samples: dict[Way, list[Sample]] = field(default_factory=dict[Way, list[Sample]])
    _notes: dict[str, None] = field(default_factory=dict[str, None])
    _file: int = 0
    _offset: int = 0
    _again: bool = False

    def ways(self) -> tuple[Way, ...]:
        """What is measured at least once. The chunk matters little to page faults, so they have one."""
        chunks, depths = self.effort.chunk_bytes, self.effort.depths
        reads = [
            Way(mode=mode, chunk_bytes=chunk, depth=depth)
            for chunk in chunks
            for depth in depths
            for mode in (ReadMode.buffered, ReadMode.direct)
        ]
        middle = sorted(chunks)[len(chunks) // 2]
        touched = [Way(mode=ReadMode.faults, chunk_bytes=middle, depth=depth) for depth in depths]
        return (*reads, *(touched if self.faults else ()))

    def run(self, progress: Callable[[float], None]) -> None:
        """Measure until the turns or the time are spent. `progress` hears which part of it is done.

        The best of many measurements is often luck, and a disk's rate goes up and down by the second. So most of the
        time goes to the ways that a plan would reckon with: those that are it by then.
        """
        ways, effort, begun = self.ways(), self.effort, time.perf_counter()
        limit_s, turns = effort.disk_s / len(ways), 1 + effort.finals
        for turn in range(turns):
            chosen = self._reckoned_with() if turn else ways
            for index, way in enumerate(chosen):
                spent = (time.perf_counter() - begun) / effort.disk_s
                if turn and spent > 1:
                    return
                progress(max(min(spent, 1.0), (turn + index / len(chosen)) / turns))
                self._measure(way, limit_s, again=turn > 0)

    def _reckoned_with(self) -> tuple[Way, ...]:
        """By what is known now, of each mode the fastest reads and those that are preferred to all that are as fast.

        And page faults of the fewest threads.
        """
        known = self.rates
        chosen: list[DiskRate] = []
        for mode in (ReadMode.buffered, ReadMode.direct):
            rates = sorted((rate for rate in known if rate.mode is mode), key=lambda rate: -rate.bytes_per_s)
            preferred = max(rates, key=usefulness, default=None)
            chosen += [rate for place, rate in enumerate(rates) if place < self.effort.finalists or rate is preferred]
        chosen += sorted((rate for rate in known if rate.mode is ReadMode.faults), key=lambda rate: rate.depth)[:1]
        return tuple(Way(mode=rate.mode, chunk_bytes=rate.chunk_bytes, depth=rate.depth) for rate in chosen)

    @property
    def rates(self) -> tuple[DiskRate, ...]:
        """Of each way that could be measured the harmonic mean: slow moments count for the time that they take."""
        return tuple(
            DiskRate(
                mode=way.mode,
                chunk_bytes=way.chunk_bytes,
                depth=way.depth,
                bytes_per_s=harmonic_mean([sample.bytes_per_s for sample in samples]),
                cpu_s_per_gib=fmean(sample.cpu_s_per_gib for sample in samples),
            )
            for way, samples in sorted(
                self._samples.items(), key=lambda each: (each[0].mode, each[0].chunk_bytes, each[0].depth)
            )
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, and what makes a rate doubtful."""
        left_out = (f"{note} were not measured" for note in self._notes)
        return (*left_out, *((_NOTE_AGAIN,) if self._again else ()))

    def _length(self, way: Way, *, again: bool) -> int | None:
        """How much one measurement reads: less where the files hold no whole round; None where it is too much."""
        total, flying = sum(file.size_bytes for file in self.files), way.chunk_bytes * way.depth
        if total >= _bytes_of(self.ways(), self.effort):
            return max(self.effort.final_bytes if again else self.effort.region_bytes, flying)
        if flying * _SMALL_PARTS > total:
            return None
        return max(flying, min(self.effort.region_bytes, max(self.effort.chunk_bytes)))

    def _measure(self, way: Way, limit_s: float, *, again: bool) -> None:
        flying = way.chunk_bytes * way.depth
        known = [sample.bytes_per_s for samples in self._samples.values() for sample in samples]
        if known and flying > max(known) * 2 * limit_s:
            self._notes[_NOTE_SLOW.format(mode=way.mode)] = None
            return
        length = self._length(way, again=again)
        if length is None:
            self._notes[_NOTE_SMALL.format(mode=way.mode)] = None
            return
        region = self._next(length, way.chunk_bytes)
        descriptor = region.source.direct if way.mode is ReadMode.direct else region.source.buffered
        if descriptor is None:
            self._notes[_NOTE_REFUSED] = None
            return
        if not _is_forgotten(region) and way.mode is not ReadMode.direct:
            self._notes[_NOTE_CACHED.format(mode=way.mode)] = None
            return
        try:
            sample = timed_read(way, region, descriptor, limit_s, most_bytes=self.effort.copy_bytes)
        except OSError as error:
            # Some file systems open a file for direct reads and then refuse them.
            self._samples.pop(way, None)
            self._notes[f"{error.strerror}: {way.mode} reads"] = None
        else:
            self._samples.setdefault(way, []).append(sample)

    def _next(self, length: int, chunk: int) -> Region:
        """The part of the files after the last one; from the start again where all has been read."""
        for _ in self.files:
            source = self.files[self._file]
            if self._offset + length <= source.size_bytes:
                break
            self._file = (self._file + 1) % len(self.files)
            self._again |= self._file == 0
            self._offset = 0
        source = self.files[self._file]
        # Whole chunks, and at least one: direct reads of a file's ragged end would be refused.
        fitting = max(chunk, min(length, source.size_bytes) // chunk * chunk)
        region = Region(source=source, offset=self._offset, length=fitting)
        self._offset += fitting
        return region


def _bytes_of(ways: Iterable[Way], effort: Effort) -> int:
    """What one measurement of each way reads."""
    return sum(max(effort.region_bytes, way.chunk_bytes * way.depth) for way in ways)


def _is_forgotten(region: Region) -> bool:
    """Drop a region from the page cache, and tell whether it is gone.

    A little around it goes too: pages that are cached as one are dropped as one. Those that another thread has in hand
    just then stay, and go a moment later.
    """
    start = region.offset // _FOLIO_BYTES * _FOLIO_BYTES
    end = -(-(region.offset + region.length) // _FOLIO_BYTES) * _FOLIO_BYTES
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        os.posix_fadvise(region.source.buffered, start, end - start, os.POSIX_FADV_DONTNEED)
        if not is_cached(region):
            return True
    return False

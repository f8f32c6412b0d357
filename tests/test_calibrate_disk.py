import mmap
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from placewise.planner.calibrating import disk
from placewise.planner.calibrating.disk import DiskMeasurement
from placewise.planner.calibrating.effort import Effort
from placewise.planner.calibrating.files import Source, checkpoint_files, has_holes, open_sources
from placewise.planner.calibrating.timed_reads import Region, Sample, Way, timed_read
from placewise.plans.calibration import ReadMode
from placewise.plans.units import KIB, MIB

from .disks import LITTLE, dense, on_a_disk, sparse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="disk rates are measured on Linux alone")

WAYS = 3 * 2 + 2 * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return on_a_disk(tmp_path)


@pytest.fixture
def model(folder: Path) -> Path:
    return dense(folder / "model.safetensors", 8 * MIB)


def modes(measurement: DiskMeasurement) -> set[ReadMode]:
    return {rate.mode for rate in measurement.rates}


def measured(*files: Source, effort: Effort = LITTLE, faults: bool = True) -> DiskMeasurement:
    measurement = DiskMeasurement(files=files, effort=effort, faults=faults)
    measurement.run(lambda _: None)
    return measurement


def test_which_files_have_holes(folder: Path) -> None:
    whole, hollow = dense(folder / "whole", MIB), sparse(folder / "hollow", MIB)
    partly = sparse(dense(folder / "partly", MIB), 4 * MIB)
    reserved = folder / "reserved"
    with reserved.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, MIB)
    empty = sparse(folder / "empty", 0)
    for file, expected in ((whole, False), (hollow, True), (partly, True), (reserved, True), (empty, False)):
        with file.open("rb") as opened:
            assert has_holes(opened.fileno()) is expected, file.name


def test_a_small_checkpoint_is_replaced_by_a_written_file(folder: Path) -> None:
    dense(folder / "model.safetensors", MIB)
    with open_sources(folder, least_bytes=4 * MIB, temporary_bytes=2 * MIB) as sources:
        assert [file.size_bytes for file in sources.files] == [2 * MIB]
        assert sources.notes[0].startswith("the checkpoint has no file of 4.00 MiB: 2.00 MiB were written and read;")
        assert len(list(folder.iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_said(folder: Path) -> None:
    locked = folder / "locked"
    locked.mkdir(mode=0o500)
    model = sparse(folder / "model.safetensors", 8 * MIB)
    with open_sources(model, least_bytes=MIB, temporary_bytes=MIB, scratch=locked) as sources:
        assert sources.files == ()
        assert sources.notes == (
            f"the checkpoint has holes: {locked} cannot be written to (Permission denied), so no disk was measured",
        )


def test_a_folder_that_is_not_there_is_said(folder: Path) -> None:
    model = sparse(folder / "model.safetensors", 8 * MIB)
    with open_sources(model, least_bytes=MIB, temporary_bytes=MIB, scratch=folder / "absent") as sources:
        assert sources.notes == (
            f"the checkpoint has holes: {folder}/absent cannot be written to (No such file or directory), so no disk "
            "was measured",
        )


def test_a_folder_without_room_is_said(folder: Path) -> None:
    model = sparse(folder / "model.safetensors", 8 * MIB)
    with open_sources(model, least_bytes=MIB, temporary_bytes=1 << 60) as sources:
        assert sources.files == ()
        assert sources.notes[0].endswith(" free, so no disk was measured")


def test_a_folder_on_another_file_system_is_not_used(folder: Path) -> None:
    model = sparse(folder / "model.safetensors", 8 * MIB)
    with open_sources(model, least_bytes=MIB, temporary_bytes=1, scratch=Path("/proc")) as sources:
        assert sources.notes == ("the checkpoint has holes: /proc is on another file system, so no disk was measured",)


def test_the_files_of_a_checkpoint_are_the_largest_first(folder: Path) -> None:
    (folder / "vae").mkdir()
    index, config = folder / "model.safetensors.index.json", folder / "vae" / "config.json"
    index.write_text("{}")
    config.write_text("")
    (folder / "dangling").symlink_to("nowhere")
    first, second = dense(folder / "vae" / "b.safetensors", 3), dense(folder / "a.safetensors", 4)
    assert checkpoint_files(folder) == (second, first, index, config)
    assert checkpoint_files(index) == checkpoint_files(folder)
    assert checkpoint_files(second) == (second,)


def test_every_way_is_measured_and_nothing_is_read_twice(model: Path) -> None:
    with open_sources(model, least_bytes=MIB, temporary_bytes=MIB) as sources:
        measurement = measured(*sources.files)
    direct = sources.files[0].direct is not None
    assert modes(measurement) == set(ReadMode) - (set() if direct else {ReadMode.direct})
    assert len(measurement.ways()) == WAYS
    assert measurement.notes == () if direct else ("the file system refuses O_DIRECT: direct reads were not measured",)


def test_several_files_are_read_one_after_the_other(folder: Path) -> None:
    dense(folder / "a", 3 * MIB)
    dense(folder / "b", 3 * MIB)
    with open_sources(folder, least_bytes=MIB, temporary_bytes=MIB) as sources:
        assert len(sources.files) == 2
        measurement = measured(*sources.files)
    assert modes(measurement) >= {ReadMode.buffered, ReadMode.faults}
    assert not [note for note in measurement.notes if "more than once" in note]


def test_small_files_leave_out_what_does_not_fit(folder: Path) -> None:
    dense(folder / "a", MIB)
    with open_sources(folder, least_bytes=MIB, temporary_bytes=MIB) as sources:
        measurement = measured(*sources.files)
    assert {(rate.chunk_bytes, rate.depth) for rate in measurement.rates if rate.mode is ReadMode.buffered} == {
        (64 * KIB, 1),
        (64 * KIB, 2),
        (128 * KIB, 1),
    }
    assert "the files are small: buffered reads of large chunks many at a time were not measured" in measurement.notes


def test_without_direct_reads_the_others_are_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    with open_sources(model, least_bytes=MIB, temporary_bytes=MIB) as sources:
        measurement = measured(*sources.files)
    assert modes(measurement) == {ReadMode.buffered, ReadMode.faults}
    assert measurement.notes == ("the file system refuses O_DIRECT: direct reads were not measured",)


def test_direct_reads_that_fail_later_are_left_out(model: Path) -> None:
    unreadable = os.open(model, os.O_WRONLY)
    with model.open("rb") as opened:
        measurement = measured(Source(buffered=opened.fileno(), direct=unreadable, size_bytes=8 * MIB))
    os.close(unreadable)
    assert modes(measurement) == {ReadMode.buffered, ReadMode.faults}
    assert measurement.notes == ("Bad file descriptor: direct reads were not measured",)


def test_a_file_that_stays_in_the_page_cache_is_not_taken_for_a_disk(model: Path) -> None:
    with model.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert len(mapping[:: mmap.PAGESIZE]) > 0
        measurement = measured(Source(buffered=opened.fileno(), direct=None, size_bytes=8 * MIB))
    assert measurement.rates == ()
    assert "the page cache keeps the file (in use or locked): buffered reads were not measured" in measurement.notes


def test_a_file_cut_short_before_is_said(model: Path) -> None:
    with model.open("rb") as opened:
        source = Source(buffered=opened.fileno(), direct=None, size_bytes=8 * MIB)
        os.truncate(model, 0)
        measurement = measured(source)
    assert measurement.rates == ()
    assert {note for note in measurement.notes if "No data" in note} == {
        "No data available: buffered reads were not measured",
        "No data available: faults reads were not measured",
    }


def test_a_file_cut_short_meanwhile_is_an_error_and_no_crash(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = mmap.mmap

    def shrinking(descriptor: int, length: int, *, access: int, offset: int) -> mmap.mmap:
        mapping = mapped(descriptor, length, access=access, offset=offset)
        os.truncate(model, 0)
        return mapping

    monkeypatch.setattr(mmap, "mmap", shrinking)
    way = Way(mode=ReadMode.faults, chunk_bytes=64 * KIB, depth=2)
    with model.open("rb") as opened:
        source = Source(buffered=opened.fileno(), direct=None, size_bytes=8 * MIB)
        region = Region(source=source, offset=0, length=256 * KIB)
        with pytest.raises(OSError, match="Bad address"):
            timed_read(way, region, opened.fileno(), 1.0)


def test_one_lucky_measurement_does_not_choose_the_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lucky = Way(mode=ReadMode.direct, chunk_bytes=LITTLE.chunk_bytes[0], depth=LITTLE.depths[0])
    seen: Counter[Way] = Counter()

    def read(way: Way, *_: object, **__: object) -> Sample:
        seen[way] += 1
        steady = {ReadMode.buffered: 2e9, ReadMode.direct: 1e9, ReadMode.faults: 5e8}[way.mode]
        return Sample(bytes_per_s=9e9 if way == lucky and seen[way] == 1 else steady, cpu_s_per_gib=0.0)

    monkeypatch.setattr(disk, "timed_read", read)
    with open_sources(model, least_bytes=MIB, temporary_bytes=MIB) as sources:
        found = measured(*sources.files, effort=replace(LITTLE, finals=3, finalists=1, region_bytes=64 * KIB))
    assert max(found.rates, key=lambda rate: rate.bytes_per_s).mode is ReadMode.buffered
    assert seen[lucky] > 1
    # Of ways that are as fast, the one with most bytes under way would be taken.
    assert seen[Way(mode=ReadMode.direct, chunk_bytes=LITTLE.chunk_bytes[-1], depth=LITTLE.depths[-1])] > 1
    # A plan reckons with page faults of one thread, which no choice depends on.
    assert [seen[way] > 1 for way in found.ways() if way.mode is ReadMode.faults] == [True, False]

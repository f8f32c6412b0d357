import os
from pathlib import Path

import pytest
from placewise import api
from placewise.planner.calibrating.cache import (
    default_cache_dir,
    fingerprint_of,
    load_calibration,
    save_calibration,
)
from placewise.planner.calibrating.given import given_calibration
from placewise.planner.measuring.accelerators import given_accelerator
from placewise.planner.measuring.cores import available_cores
from placewise.plans.calibration import Calibration, ComputeRate, DiskRate, ReadMode
from placewise.plans.errors import InputError
from placewise.plans.machine import Disk, Host, Machine, Measured, Unmeasurable
from placewise.plans.units import GIB

from .hosts import HostTree

FIRST, SECOND = "sha256:" + "1" * 64, "sha256:" + "2" * 64
REMEDY = "hint: delete the file and run `placewise calibrate` again"


def calibration(fingerprint: str = FIRST) -> Calibration:
    return Calibration(
        measured_at="2026-01-01T00:00:00+00:00",
        fingerprint=fingerprint,
        disks=(DiskRate(mode=ReadMode.direct, chunk_bytes=4096, depth=1, bytes_per_s=1e9, cpu_s_per_gib=0.5),),
        compute=(ComputeRate(device="cpu", dtype="F32", flops_per_s=1.25e11),),
        notes=("a note",),
    )


def machine(*, available: int = 8 * GIB, total: int = 16 * GIB, filesystem: str = "ext4", device: int = GIB) -> Machine:
    unknown = Unmeasurable(why="not asked")
    host = Host(
        platform="linux",
        available=Measured(value=available, source="psutil"),
        total=Measured(value=total, source="psutil"),
        binding="psutil",
        memlock=unknown,
        shared_memory=unknown,
    )
    return Machine(
        host=host,
        accelerators=(given_accelerator("cuda:0", device),),
        disk=Disk(filesystem=filesystem, network=False),
    )


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.write("/proc/cpuinfo", "processor : 0\nmodel name\t: Some Processor\n")
    return tree


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    file = save_calibration(calibration(), folder)
    assert file.parent == folder
    assert load_calibration(FIRST, folder) == calibration()
    assert [entry.name for entry in folder.iterdir()] == [file.name]


def test_there_is_none_before_one_is_saved(tmp_path: Path) -> None:
    assert load_calibration(FIRST, tmp_path / "absent") is None


def test_each_fingerprint_has_its_own(tmp_path: Path) -> None:
    save_calibration(calibration(FIRST), tmp_path)
    assert load_calibration(SECOND, tmp_path) is None
    save_calibration(calibration(SECOND), tmp_path)
    assert load_calibration(FIRST, tmp_path) == calibration(FIRST)


def test_the_later_one_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    save_calibration(calibration(), tmp_path)
    later = calibration().model_copy(update={"measured_at": "2026-02-02T00:00:00+00:00"})
    save_calibration(later, tmp_path)
    assert load_calibration(FIRST, tmp_path) == later


def test_a_file_of_another_fingerprint_is_refused(tmp_path: Path) -> None:
    file = save_calibration(calibration(FIRST), tmp_path)
    other = file.with_name(file.name.replace("1", "2"))
    file.rename(other)
    with pytest.raises(InputError) as caught:
        load_calibration(SECOND, tmp_path)
    assert str(caught.value) == f"{other}: it holds the calibration of another machine\n{REMEDY}"


def test_another_version_is_refused_as_such(tmp_path: Path) -> None:
    file = save_calibration(calibration(), tmp_path)
    file.write_text('{"format_version": 2, "rates": []}')
    with pytest.raises(InputError) as caught:
        load_calibration(FIRST, tmp_path)
    assert str(caught.value) == f"{file}: format_version 2; this is a reader of 1\n{REMEDY}"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"format_version": "1"}', '{"format_version": 1}', '{"calibration": {}}', "\x00"],
)
def test_a_malformed_file_is_named_with_the_remedy(tmp_path: Path, content: str) -> None:
    file = save_calibration(calibration(), tmp_path)
    file.write_text(content)
    with pytest.raises(InputError) as caught:
        load_calibration(FIRST, tmp_path)
    assert caught.value.message.startswith(f"{file}: ")
    assert str(caught.value).endswith(f"\n{REMEDY}")


def test_a_rate_of_zero_is_malformed(tmp_path: Path) -> None:
    file = save_calibration(calibration(), tmp_path)
    file.write_text(file.read_text().replace("1000000000.0", "0.0"))
    with pytest.raises(InputError) as caught:
        load_calibration(FIRST, tmp_path)
    assert str(caught.value) == (
        f"{file}: Input should be greater than 0 in 'calibration.disks[0].bytes_per_s'\n{REMEDY}"
    )


@pytest.mark.parametrize("fingerprint", ["given", "", "../../escape", "sha256:1", FIRST + "\n"])
def test_only_a_fingerprint_names_a_file(tmp_path: Path, fingerprint: str) -> None:
    with pytest.raises(InputError, match="is not a machine's fingerprint"):
        load_calibration(fingerprint, tmp_path)


def test_given_rates_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        save_calibration(given_calibration(disk_bytes_per_s=1e9), tmp_path)
    assert str(caught.value) == (
        "'given' is not a machine's fingerprint, so no calibration is kept for it\n"
        "hint: only measured calibrations are kept: run `placewise calibrate`"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        save_calibration(calibration(), tmp_path / "file")
    assert str(caught.value) == (
        f"{tmp_path}/file/{FIRST.replace(':', '-')}.json: File exists\nhint: give a cache folder that can be written to"
    )


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "placewise/calibration"
    save_calibration(calibration())
    assert load_calibration(FIRST) == calibration()


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="other platforms keep caches elsewhere")
@pytest.mark.parametrize("stated", ["", "relative/folder"])
def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stated: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", stated)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache/placewise/calibration"


def test_the_fingerprint_does_not_change_with_what_is_free(tree: HostTree) -> None:
    first = fingerprint_of(machine(), tree.root, root=tree.root)
    assert first == fingerprint_of(machine(available=GIB), tree.root, root=tree.root)
    free = machine().accelerators[0].model_copy(update={"free": Measured(value=1, source="given")})
    less = machine().model_copy(update={"accelerators": (free,)})
    assert first == fingerprint_of(less, tree.root, root=tree.root)


def test_the_fingerprint_does_not_depend_on_the_file_within_a_disk(tree: HostTree) -> None:
    model = tree.write("/someone/model.safetensors", "x")
    assert fingerprint_of(machine(), model, root=tree.root) == fingerprint_of(machine(), tree.root, root=tree.root)


def test_the_fingerprint_changes_with_each_fact(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    def now(facts: Machine) -> str:
        return fingerprint_of(facts, tree.root, root=tree.root)

    seen = [now(machine())]
    seen.append(now(machine(total=32 * GIB)))
    seen.append(now(machine(filesystem="xfs")))
    seen.append(now(machine(device=2 * GIB)))
    seen.append(now(machine().model_copy(update={"accelerators": ()})))
    seen.append(now(machine().model_copy(update={"disk": None})))
    seen.append(fingerprint_of(machine(), Path("/proc"), root=tree.root))
    tree.write("/proc/cpuinfo", "model name : Another Processor\n")
    seen.append(now(machine()))
    _affinity(monkeypatch, 7777)
    seen.append(now(machine()))
    assert len(set(seen)) == len(seen)
    load_calibration(seen[0], tree.root)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        fingerprint_of(machine(), tmp_path / "absent")
    assert str(caught.value) == (
        f"{tmp_path}/absent: No such file or directory\nhint: give the path of a checkpoint that can be read"
    )


def _affinity(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    def answer(_process: int) -> set[int]:
        return set(range(count))

    monkeypatch.setattr(os, "sched_getaffinity", answer)


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    _affinity(monkeypatch, 64)


@pytest.mark.usefixtures("many_cores")
class TestCores:
    def test_without_cgroups_the_affinity_counts(self, tmp_path: Path) -> None:
        assert available_cores(tmp_path) == 64

    def test_the_smallest_quota_above_counts(self, tree: HostTree) -> None:
        tree.member_of("0::/a/b")
        tree.mount("/sys/fs/cgroup", "cgroup2")
        tree.write("/sys/fs/cgroup/a/cpu.max", "250000 100000\n")
        tree.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
        assert available_cores(tree.root) == 2.5

    def test_the_first_version_has_two_files(self, tree: HostTree) -> None:
        tree.member_of("5:cpu,cpuacct:/job", "0::/")
        tree.mount("/sys/fs/cgroup/cpu", "cgroup", options="rw,cpu,cpuacct")
        tree.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
        tree.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
        assert available_cores(tree.root) == 64
        tree.write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "400000\n")
        tree.write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
        assert available_cores(tree.root) == 4

    def test_in_a_container_the_top_in_sight_counts(self, tree: HostTree) -> None:
        tree.member_of("0::/../elsewhere")
        tree.mount("/sys/fs/cgroup", "cgroup2", root="/box")
        tree.write("/sys/fs/cgroup/cpu.max", "300000 100000\n")
        assert available_cores(tree.root) == 3

    @pytest.mark.parametrize("content", ["", "nonsense", "0 100000", "1 0", "-5 100000", "1 2 3"])
    def test_a_quota_that_makes_no_sense_is_none(self, tree: HostTree, content: str) -> None:
        tree.member_of("0::/")
        tree.mount("/sys/fs/cgroup", "cgroup2")
        tree.write("/sys/fs/cgroup/cpu.max", content)
        assert available_cores(tree.root) == 64


def test_measuring_for_a_model_takes_its_rates_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = api.measure(tmp_path)
    assert found.calibration is None
    saved = calibration(fingerprint_of(found, tmp_path))
    save_calibration(saved)
    assert api.measure(tmp_path).calibration == saved
    assert api.measure().calibration is None
    assert api.measure(tmp_path / "absent").calibration is None

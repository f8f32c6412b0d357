import os
import subprocess
import sys
from pathlib import Path

import pytest
from placewise.plans.machine import Cap, CapKind, Host, Malformed, Measured, Unlimited, Unmeasurable

from .hosts import (
    GIB,
    HYBRID_MOUNT,
    V1_MOUNT,
    V1_NO_CAP,
    V2_MOUNT,
    HostTree,
    Use,
    available,
    total,
    v1_tree,
    v2_tree,
)


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


class TestOneCap:
    def test_v2(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", limit=32 * GIB, use=Use(anonymous=5 * GIB, inactive_file=GIB))
        host = tree.measure()
        assert host.caps == (
            Cap(
                hierarchy="v2",
                path="/job",
                kind=CapKind.limit,
                limit_bytes=32 * GIB,
                usage_bytes=6 * GIB,
                reclaimable_bytes=GIB,
                headroom_bytes=27 * GIB,
            ),
        )
        assert host.available == Measured(value=27 * GIB, source="cgroup v2 /job (limit)")
        assert host.total == Measured(value=32 * GIB, source="cgroup v2 /job (limit)")
        assert host.binding == "cgroup v2 /job (limit)"
        assert host.notes == ()

    def test_v1(self, tree: HostTree) -> None:
        v1_tree(tree, "/job").v1("/job", limit=32 * GIB, use=Use(anonymous=5 * GIB, active_file=GIB))
        host = tree.measure()
        assert (available(host), total(host)) == (27 * GIB, 32 * GIB)
        assert host.binding == "cgroup v1 /job (limit)"
        assert host.notes == ()

    def test_hybrid_reads_v1_where_the_controller_is(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/job", "0::/user.slice")
        tree.mount_v1()
        tree.mount_v2(point=HYBRID_MOUNT)
        tree.v1("/")
        tree.v1("/job", limit=8 * GIB)
        tree.v2("/user.slice", limit=GIB, point=HYBRID_MOUNT)
        host = tree.measure()
        assert available(host) == 8 * GIB
        assert [cap.hierarchy for cap in host.caps] == ["v1"]

    def test_v1_named_but_only_v2_mounted(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/job", "0::/job")
        tree.mount_v2()
        tree.v2("/job", limit=8 * GIB)
        assert available(tree.measure()) == 8 * GIB

    def test_memory_high_is_a_cap(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", limit=32 * GIB, high=16 * GIB, use=Use(anonymous=GIB))
        host = tree.measure()
        assert [(cap.kind, cap.headroom_bytes) for cap in host.caps] == [
            (CapKind.limit, 31 * GIB),
            (CapKind.high, 15 * GIB),
        ]
        assert host.binding == "cgroup v2 /job (high)"

    def test_memory_high_alone(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", high=16 * GIB)
        assert (available(tree.measure()), total(tree.measure())) == (16 * GIB, 16 * GIB)

    @pytest.mark.parametrize("limit", [V1_NO_CAP, 2**63 - 4096, 2**63 - 65536, 2**62, 2**63 - 1, 2**64 - 1])
    def test_v1_no_cap(self, tree: HostTree, limit: int) -> None:
        v1_tree(tree, "/job").v1("/job", limit=limit, use=Use(anonymous=GIB))
        assert tree.measure().caps == ()
        assert tree.measure().available == Measured(value=200 * GIB, source="psutil")

    def test_just_below_the_no_cap_figure_is_a_cap(self, tree: HostTree) -> None:
        v1_tree(tree, "/job").v1("/job", limit=2**62 - 1)
        assert [cap.limit_bytes for cap in tree.measure().caps] == [2**62 - 1]

    def test_v2_no_cap(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", use=Use(anonymous=GIB))
        assert tree.measure().caps == ()
        assert tree.measure().binding == "psutil"

    def test_a_limit_of_zero_is_a_limit(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", limit=0)
        assert (available(tree.measure()), total(tree.measure())) == (0, 0)

    def test_the_cap_wins_over_a_larger_machine(self, tree: HostTree) -> None:
        v1_tree(tree, "/job").v1("/job", limit=1117 * GIB)
        assert available(tree.measure(total=2016 * GIB, available=2015 * GIB)) == 1117 * GIB

    def test_the_machine_wins_over_a_larger_cap(self, tree: HostTree) -> None:
        v1_tree(tree, "/job").v1("/job", limit=64 * GIB)
        host = tree.measure(total=32 * GIB, available=20 * GIB)
        assert (available(host), total(host), host.binding) == (20 * GIB, 32 * GIB, "psutil")

    def test_usage_beyond_the_limit_leaves_zero(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", high=2 * GIB, use=Use(anonymous=3 * GIB))
        assert available(tree.measure()) == 0


class TestWhatCanBeTakenBack:
    @pytest.mark.parametrize("version", ["v1", "v2"])
    def test_a_container_full_of_page_cache_is_not_full(self, tree: HostTree, version: str) -> None:
        use = Use(anonymous=GIB, inactive_file=60 * GIB, active_file=9 * GIB - GIB // 2)
        if version == "v1":
            v1_tree(tree, "/job").v1("/job", limit=70 * GIB, use=use)
        else:
            v2_tree(tree, "/job").v2("/job", limit=70 * GIB, use=use)
        assert available(tree.measure()) == 69 * GIB

    @pytest.mark.parametrize("version", ["v1", "v2"])
    def test_shared_and_locked_pages_stay(self, tree: HostTree, version: str) -> None:
        use = Use(anonymous=GIB, inactive_file=3 * GIB, shmem=4 * GIB, unevictable=8 * GIB)
        if version == "v1":
            v1_tree(tree, "/job").v1("/job", limit=32 * GIB, use=use)
        else:
            v2_tree(tree, "/job").v2("/job", limit=32 * GIB, use=use)
        assert available(tree.measure()) == 32 * GIB - (1 + 4 + 8) * GIB

    def test_v1_counts_the_page_cache_of_descendants(self, tree: HostTree) -> None:
        use = Use(anonymous=GIB, inactive_file=20 * GIB)
        v1_tree(tree, "/job").v1("/job", limit=32 * GIB, use=use, own=Use())
        assert available(tree.measure()) == 31 * GIB

    def test_v1_without_totals(self, tree: HostTree) -> None:
        v1_tree(tree, "/job").v1("/job", limit=32 * GIB, use=Use(anonymous=GIB, inactive_file=20 * GIB))
        tree.write(f"{V1_MOUNT}/job/memory.stat", f"inactive_file {20 * GIB}\nactive_file 0\n")
        assert available(tree.measure()) == 31 * GIB

    def test_never_more_than_is_used(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", limit=32 * GIB, use=Use(inactive_file=2 * GIB))
        tree.write(f"{V2_MOUNT}/job/memory.current", f"{GIB}\n")
        (cap,) = tree.measure().caps
        assert (cap.reclaimable_bytes, cap.headroom_bytes) == (GIB, 32 * GIB)


class TestAncestors:
    def test_the_child_is_tighter(self, tree: HostTree) -> None:
        v2_tree(tree, "/pod/job").v2("/pod", limit=64 * GIB)
        tree.v2("/pod/job", limit=16 * GIB)
        host = tree.measure()
        assert host.binding == "cgroup v2 /pod/job (limit)"
        assert [cap.path for cap in host.caps] == ["/pod/job", "/pod"]

    def test_the_ancestor_is_tighter(self, tree: HostTree) -> None:
        v1_tree(tree, "/pod/job").v1("/pod", limit=16 * GIB)
        tree.v1("/pod/job", limit=64 * GIB)
        assert tree.measure().binding == "cgroup v1 /pod (limit)"

    def test_the_smallest_headroom_wins_not_the_smallest_limit(self, tree: HostTree) -> None:
        # A sibling has taken 56 GiB of the pod's 64.
        v2_tree(tree, "/pod/job").v2("/pod", limit=64 * GIB, use=Use(anonymous=58 * GIB))
        tree.v2("/pod/job", limit=16 * GIB, use=Use(anonymous=2 * GIB))
        host = tree.measure()
        assert (available(host), host.binding) == (6 * GIB, "cgroup v2 /pod (limit)")
        assert host.total == Measured(value=16 * GIB, source="cgroup v2 /pod/job (limit)")

    def test_a_sibling_is_no_ancestor(self, tree: HostTree) -> None:
        v2_tree(tree, "/pod/job").v2("/pod", limit=64 * GIB)
        tree.v2("/pod/job", limit=32 * GIB)
        tree.v2("/pod/other", limit=GIB)
        assert available(tree.measure()) == 32 * GIB

    def test_an_ancestor_without_the_controller_is_passed_over(self, tree: HostTree) -> None:
        # v2 hands the controller down level by level; the process itself may sit below the last of them.
        v2_tree(tree, "/pod/job/leaf").v2("/pod", limit=8 * GIB)
        tree.write(f"{V2_MOUNT}/pod/job/leaf/cgroup.procs", "1\n")
        assert available(tree.measure()) == 8 * GIB

    def test_v1_without_hierarchy_does_not_charge_parents(self, tree: HostTree) -> None:
        v1_tree(tree, "/pod/job").v1("/pod", limit=GIB)
        tree.v1("/pod/job", limit=16 * GIB)
        tree.write(f"{V1_MOUNT}/pod/memory.use_hierarchy", "0\n")
        tree.write(f"{V1_MOUNT}/pod/job/memory.use_hierarchy", "0\n")
        assert available(tree.measure()) == 16 * GIB

    def test_v1_tells_of_a_cap_above_what_is_mounted(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/pod/job")
        tree.mount_v1(root="/pod/job")
        tree.v1("/", hierarchical=16 * GIB, use=Use(anonymous=GIB, inactive_file=GIB))
        host = tree.measure()
        assert (available(host), host.binding) == (15 * GIB, "cgroup v1 above /pod/job (limit)")

    def test_v1_tells_the_mounted_cap_once(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/pod/job")
        tree.mount_v1(root="/pod/job")
        tree.v1("/", limit=16 * GIB, hierarchical=16 * GIB)
        assert [cap.path for cap in tree.measure().caps] == ["/pod/job"]


class TestNothingToRead:
    def test_no_cgroups(self, tree: HostTree) -> None:
        host = tree.measure()
        assert host.available == Measured(value=200 * GIB, source="psutil")
        assert host.notes == (f"no cgroup was read: {tree.root}/proc/self/cgroup does not exist",)

    def test_no_mountinfo(self, tree: HostTree) -> None:
        tree.member_of("0::/job")
        host = tree.measure()
        assert host.binding == "psutil"
        assert host.notes == (f"no cgroup was read: {tree.root}/proc/self/mountinfo does not exist",)

    def test_not_mounted_is_said(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/job", "0::/")
        tree.mount("/proc", "proc")
        assert tree.measure().notes == ("the memory cgroup /job is not mounted: no cap was read",)

    @pytest.mark.parametrize("platform", ["darwin", "win32"])
    def test_other_platforms_have_psutil_alone(self, tree: HostTree, platform: str) -> None:
        v2_tree(tree, "/job").v2("/job", limit=GIB)
        host = tree.measure(platform=platform)
        assert (host.platform, host.binding, available(host)) == (platform, "psutil", 200 * GIB)
        assert host.notes == (f"{platform} has no cgroups: available memory is psutil's word alone",)
        assert host.shared_memory == Unmeasurable(why=f"{platform} has no /dev/shm")

    def test_windows_has_no_memlock(self, tree: HostTree) -> None:
        assert tree.measure(platform="win32").memlock == Unmeasurable(why="Windows has no RLIMIT_MEMLOCK")

    @pytest.mark.parametrize(
        "memory", [Unmeasurable(why="psutil: no"), Malformed(source="psutil", why="KeyError('MemTotal')")]
    )
    def test_a_cap_alone_does_not_make_up_for_psutil(self, tree: HostTree, memory: Unmeasurable | Malformed) -> None:
        v2_tree(tree, "/job").v2("/job", limit=GIB)
        host = tree.measure(memory=memory)
        assert host.available == host.total == memory
        assert host.binding == "psutil"
        assert len(host.caps) == 1


def test_shared_memory_is_read_where_it_is(tree: HostTree) -> None:
    assert tree.measure().shared_memory == Unmeasurable(why=f"{tree.root}/dev/shm does not exist")
    (tree.root / "dev/shm").mkdir(parents=True)
    figures = os.statvfs(tree.root)
    size = figures.f_blocks * figures.f_frsize
    assert tree.measure().shared_memory == Measured(value=size, source=f"{tree.root}/dev/shm")


def test_shared_memory_without_a_size_is_unlimited(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_blocks(_path: Path) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", no_blocks)
    assert tree.measure().shared_memory == Unlimited(source=f"{tree.root}/dev/shm")


def test_memlock_is_the_soft_limit(tree: HostTree) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
        assert tree.measure().memlock == Measured(value=65536, source="RLIMIT_MEMLOCK")
        if before[1] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, before[1:] * 2)
            assert tree.measure().memlock == Unlimited(source="RLIMIT_MEMLOCK")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_the_facts_go_through_json(tree: HostTree) -> None:
    v2_tree(tree, "/job").v2("/job", limit=GIB, high=GIB)
    host = tree.measure()
    assert Host.model_validate_json(host.model_dump_json()) == host


def test_import_costs_no_torch() -> None:
    code = "import sys; from placewise.planner.measuring import disk, host; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / ".src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0

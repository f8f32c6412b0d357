"""Container views, where `proc/self/cgroup` and the mounts do not agree; and files that make no sense."""

import os
from pathlib import Path

import pytest
from placewise.plans.machine import Host, Malformed

from .hosts import GIB, V1_MOUNT, V2_MOUNT, HostTree, Use, available, malformed, v1_tree, v2_tree


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


class TestContainerViews:
    def test_the_mount_shows_the_containers_own_folder(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/docker/8f2a")
        tree.mount_v1(root="/docker/8f2a")
        tree.v1("/", limit=16 * GIB)
        host = tree.measure()
        assert (available(host), host.notes) == (16 * GIB, ())
        assert host.binding == "cgroup v1 /docker/8f2a (limit)"

    def test_a_child_of_the_containers_own_folder(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/docker/8f2a/job")
        tree.mount_v1(root="/docker/8f2a")
        tree.v1("/", limit=16 * GIB, use=Use(anonymous=12 * GIB))
        tree.v1("/job", limit=8 * GIB)
        host = tree.measure()
        assert [cap.path for cap in host.caps] == ["/docker/8f2a/job", "/docker/8f2a"]
        assert available(host) == 4 * GIB

    def test_the_mounts_folder_is_matched_by_whole_names(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/docker/8f2abc")
        tree.mount_v1(root="/docker/8f2a")
        tree.v1("/", limit=16 * GIB)
        assert len(tree.measure().notes) == 1

    def test_a_cgroup_namespace(self, tree: HostTree) -> None:
        tree.member_of("0::/")
        tree.mount_v2()
        tree.v2("/", limit=16 * GIB)
        host = tree.measure()
        assert (available(host), host.binding, host.notes) == (16 * GIB, "cgroup v2 / (limit)", ())

    def test_a_namespace_whose_mount_begins_above_it(self, tree: HostTree) -> None:
        tree.member_of("0::/../../job")
        tree.mount_v2(root="/../..")
        tree.v2("/", limit=32 * GIB)
        tree.v2("/job", limit=16 * GIB)
        host = tree.measure()
        assert [cap.path for cap in host.caps] == ["/../../job", "/../.."]
        assert host.notes == ()

    def test_a_process_outside_its_namespace(self, tree: HostTree) -> None:
        tree.member_of("0::/../sibling")
        tree.mount_v2()
        tree.v2("/../sibling", limit=GIB)
        tree.v2("/", limit=16 * GIB)
        host = tree.measure()
        assert available(host) == 16 * GIB
        assert host.notes == ("the cgroup /../sibling is not below /sys/fs/cgroup: the caps of / and above were read",)

    def test_a_path_that_is_missing_below_the_mount(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/docker/8f2a")
        tree.mount_v1()
        tree.v1("/", limit=16 * GIB)
        host = tree.measure()
        assert available(host) == 16 * GIB
        assert host.notes == (
            "the cgroup /docker/8f2a is not below /sys/fs/cgroup/memory: the caps of / and above were read",
        )

    def test_what_is_left_of_the_path_is_tried_longest_first(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/kubepods/pod7/app/job")
        tree.mount_v1()
        tree.v1("/")
        tree.v1("/app", limit=32 * GIB)
        tree.v1("/app/job", limit=16 * GIB)
        tree.v1("/job", limit=GIB)
        host = tree.measure()
        assert [cap.path for cap in host.caps] == ["/app/job", "/app"]
        assert len(host.notes) == 1

    def test_of_two_views_the_one_with_more_ancestors(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/pod/job")
        tree.mount_v1(root="/pod/job")
        tree.v1("/", limit=64 * GIB)
        tree.mount_v1(point="/host/memory")
        for path, limit in (("", 2**63 - 4096), ("pod/", 16 * GIB), ("pod/job/", 64 * GIB)):
            tree.write(f"/host/memory/{path}memory.limit_in_bytes", f"{limit}\n")
            tree.write(f"/host/memory/{path}memory.usage_in_bytes", "0\n")
            tree.write(f"/host/memory/{path}memory.stat", "inactive_file 0\nactive_file 0\n")
        assert tree.measure().binding == "cgroup v1 /pod (limit)"

    def test_the_last_mount_on_a_point_hides_the_others(self, tree: HostTree) -> None:
        tree.member_of("4:memory:/job")
        tree.mount_v1(root="/elsewhere")
        tree.mount_v1()
        tree.v1("/")
        tree.v1("/job", limit=16 * GIB)
        host = tree.measure()
        assert (available(host), host.notes) == (16 * GIB, ())

    def test_escapes_and_odd_names(self, tree: HostTree) -> None:
        tree.member_of("0::/a b:c\\x2d")
        tree.mount("/sys/fs/c\\040g", "cgroup2")
        tree.v2("/a b:c\\x2d", limit=16 * GIB, point="/sys/fs/c g")
        host = tree.measure()
        assert (available(host), host.caps[0].path) == (16 * GIB, "/a b:c\\x2d")

    def test_names_that_are_not_utf8_go_to_json(self, tree: HostTree) -> None:
        name = os.fsdecode(b"/job\xff")
        v2_tree(tree, name).v2(name, limit=16 * GIB)
        host = tree.measure()
        assert host.binding == "cgroup v2 /job\\xff (limit)"
        assert Host.model_validate_json(host.model_dump_json()) == host


class TestMalformed:
    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ("lots\n", "'lots\\n' is not a number of bytes"),
            ("", "is empty"),
            ("\n", "is empty"),
            ("-1\n", "'-1\\n' is not a number of bytes"),
            ("1_000\n", "'1_000\\n' is not a number of bytes"),
            ("12 GiB\n", "'12 GiB\\n' is not a number of bytes"),
            ("9" * 50 + "\n", "'" + "9" * 40 + "…' is not a number of bytes"),
            (b"\xff\n", "'\\\\xff\\n' is not a number of bytes"),
        ],
    )
    @pytest.mark.parametrize("file", ["memory.max", "memory.high", "memory.current"])
    def test_a_figure(self, tree: HostTree, file: str, content: str | bytes, why: str) -> None:
        v2_tree(tree, "/job").v2("/job", limit=GIB)
        source = tree.write(f"{V2_MOUNT}/job/{file}", content)
        assert malformed(tree.measure()) == Malformed(source=str(source), why=why)

    def test_usage_cannot_be_max(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", limit=GIB)
        tree.write(f"{V2_MOUNT}/job/memory.current", "max\n")
        assert malformed(tree.measure()).why == "'max\\n' is not a number of bytes"

    def test_without_a_cap_usage_is_not_needed(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job")
        tree.write(f"{V2_MOUNT}/job/memory.current", "lots\n")
        assert available(tree.measure()) == 200 * GIB

    @pytest.mark.parametrize("file", ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"])
    def test_a_missing_file_of_v1(self, tree: HostTree, file: str) -> None:
        v1_tree(tree, "/job").v1("/job", limit=GIB)
        source = tree.root / V1_MOUNT.lstrip("/") / "job" / file
        source.unlink()
        assert malformed(tree.measure()) == Malformed(source=str(source), why="does not exist")

    def test_an_empty_folder_of_v1(self, tree: HostTree) -> None:
        v1_tree(tree, "/job").write(f"{V1_MOUNT}/job/tasks", "")
        assert malformed(tree.measure()).source.endswith("/job/memory.limit_in_bytes")

    @pytest.mark.parametrize("file", ["memory.max", "memory.current", "memory.stat"])
    def test_a_missing_file_of_v2(self, tree: HostTree, file: str) -> None:
        v2_tree(tree, "/job").v2("/job", limit=GIB, high=GIB)
        source = tree.root / V2_MOUNT.lstrip("/") / "job" / file
        source.unlink()
        assert malformed(tree.measure()) == Malformed(source=str(source), why="does not exist")

    def test_a_missing_line(self, tree: HostTree) -> None:
        v1_tree(tree, "/job").v1("/job", limit=GIB)
        source = tree.write(f"{V1_MOUNT}/job/memory.stat", "total_inactive_file 0\ninactive_file 0\n")
        why = "has no total_active_file or active_file"
        assert malformed(tree.measure()) == Malformed(source=str(source), why=why)

    def test_a_line_without_sense(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", limit=GIB)
        source = tree.write(f"{V2_MOUNT}/job/memory.stat", "inactive_file\nactive_file 0\n")
        assert malformed(tree.measure()) == Malformed(source=f"{source} (inactive_file)", why="is empty")

    @pytest.mark.parametrize("file", ["memory.max", "memory.current", "memory.stat"])
    def test_what_cannot_be_read(self, tree: HostTree, file: str) -> None:
        v2_tree(tree, "/job").v2("/job", limit=GIB)
        source = tree.root / V2_MOUNT.lstrip("/") / "job" / file
        source.unlink()
        source.mkdir()
        assert malformed(tree.measure()) == Malformed(source=str(source), why="cannot be read: Is a directory")

    def test_what_may_not_be_read(self, tree: HostTree) -> None:
        v2_tree(tree, "/job").v2("/job", limit=GIB)
        source = tree.root / V2_MOUNT.lstrip("/") / "job/memory.max"
        source.chmod(0)
        if os.access(source, os.R_OK):
            pytest.skip("this user may read everything")
        assert malformed(tree.measure()).why == "cannot be read: Permission denied"

    def test_an_ancestor_without_sense_is_not_passed_over(self, tree: HostTree) -> None:
        v2_tree(tree, "/pod/job").v2("/pod", limit="lots")
        tree.v2("/pod/job", limit=GIB)
        host = tree.measure()
        assert malformed(host).source.endswith("/pod/memory.max")
        assert [cap.path for cap in host.caps] == ["/pod/job"]

    def test_each_one_is_told(self, tree: HostTree) -> None:
        v2_tree(tree, "/pod/job").v2("/pod", limit="lots")
        tree.v2("/pod/job", limit="few")
        host = tree.measure()
        assert malformed(host).source.endswith("/pod/job/memory.max")
        assert host.notes == (f"{tree.root}/sys/fs/cgroup/pod/memory.max: 'lots\\n' is not a number of bytes",)

    @pytest.mark.parametrize("line", ["nonsense", "0:/job", "x::/job", "0::job"])
    def test_membership(self, tree: HostTree, line: str) -> None:
        v2_tree(tree, "/job").member_of(line)
        source = str(tree.root / "proc/self/cgroup")
        assert malformed(tree.measure()) == Malformed(source=source, why=f"{line!r} is not a cgroup")

    @pytest.mark.parametrize("line", ["nonsense", "22 1 0:22 / /sys rw", "22 1 0:22 / /sys rw - sysfs"])
    def test_mounts(self, tree: HostTree, line: str) -> None:
        v2_tree(tree, "/job")
        source = tree.write("/proc/self/mountinfo", line + "\n")
        assert malformed(tree.measure()) == Malformed(source=str(source), why=f"{line!r} is not a mount")

    def test_the_hidden_cap_of_v1(self, tree: HostTree) -> None:
        v1_tree(tree, "/")
        source = tree.write(f"{V1_MOUNT}/memory.stat", "hierarchical_memory_limit lots\n")
        assert malformed(tree.measure()) == Malformed(
            source=f"{source} (hierarchical_memory_limit)", why="'lots' is not a number of bytes"
        )

from pathlib import Path

import pytest
from placewise.planner.measuring.disk import disk_of
from placewise.plans.machine import Disk

from .hosts import HostTree


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.mount("/", "ext4")
    return tree


def test_the_longest_mount_point_holds_the_path(tree: HostTree) -> None:
    tree.mount("/data", "xfs")
    tree.mount("/data/shared", "nfs4")
    assert disk_of(Path("/data/model.safetensors"), tree.root) == Disk(filesystem="xfs", network=False)
    assert disk_of(Path("/data/shared/m"), tree.root) == Disk(filesystem="nfs4", network=True)
    assert disk_of(Path("/data/shared"), tree.root) == Disk(filesystem="nfs4", network=True)
    assert disk_of(Path("/home"), tree.root) == Disk(filesystem="ext4", network=False)


def test_mount_points_are_matched_by_whole_names(tree: HostTree) -> None:
    tree.mount("/data", "nfs")
    assert disk_of(Path("/database/m"), tree.root) == Disk(filesystem="ext4", network=False)


def test_the_last_mount_on_a_point_wins(tree: HostTree) -> None:
    tree.mount("/data", "nfs")
    tree.mount("/data", "xfs")
    assert disk_of(Path("/data/m"), tree.root) == Disk(filesystem="xfs", network=False)


def test_escapes_are_decoded(tree: HostTree) -> None:
    tree.mount("/my\\040models\\134\\011x", "cifs")
    assert disk_of(Path("/my models\\\tx/m"), tree.root) == Disk(filesystem="cifs", network=True)


def test_links_are_followed(tree: HostTree) -> None:
    tree.mount("/mnt", "lustre")
    (tree.root / "mnt").mkdir()
    (tree.root / "cache").symlink_to("mnt")
    assert disk_of(Path("/cache/m"), tree.root) == Disk(filesystem="lustre", network=True)


def test_a_mount_without_a_source(tree: HostTree) -> None:
    tree.write("/proc/self/mountinfo", "20 1 0:20 / / rw shared:1 master:2 - tmpfs  rw\n")
    assert disk_of(Path("/x"), tree.root) == Disk(filesystem="tmpfs", network=False)


@pytest.mark.parametrize(
    ("filesystem", "network"),
    [
        ("nfs", True),
        ("smb3", True),
        ("9p", True),
        ("virtiofs", True),
        ("ceph", True),
        ("glusterfs", True),
        ("beegfs", True),
        ("fuse", True),
        ("fuse.sshfs", True),
        ("fuse.gcsfuse", True),
        ("fuseblk", False),
        ("btrfs", False),
        ("overlay", False),
        ("zfs", False),
    ],
)
def test_which_are_slow_to_fault(tree: HostTree, filesystem: str, network: bool) -> None:  # noqa: FBT001 a case
    tree.mount("/data", filesystem)
    assert disk_of(Path("/data/m"), tree.root) == Disk(filesystem=filesystem, network=network)


def test_unknown_where_mounts_are_not_told(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    assert disk_of(Path("/data"), tree.root) is None
    tree.write("/proc/self/mountinfo", "nonsense\n")
    assert disk_of(Path("/data"), tree.root) is None


def test_unknown_where_the_path_leaves_the_tree(tree: HostTree) -> None:
    (tree.root / "out").symlink_to(tree.root.parent)
    assert disk_of(Path("/out/m"), tree.root) is None

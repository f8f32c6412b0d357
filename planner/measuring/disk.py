"""Which file system holds a path, and whether reading it means asking another machine or process."""

from pathlib import Path

from ...plans.machine import Disk
from .kernel_files import shown
from .mountinfo import read_mounts

# Without fuseblk: that is FUSE over a local block device (NTFS, exFAT), with the kernel's readahead.
# fmt: off
_REMOTE = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs",
    "vmhgfs", "wekafs",
})
# fmt: on


def disk_of(path: Path, root: Path = Path("/")) -> Disk | None:
    """The file system that holds `path` once its links are followed.

    `network` is true where a page fault waits for another machine or another process: network file systems
    and FUSE, but not FUSE over a local block device.

    Args:
        path: a file or folder as this process sees it; it need not exist.
        root: where the tree that holds `proc` begins.

    Returns:
        None where the platform has no readable `proc/self/mountinfo`: not known.
    """
    mounts = read_mounts(root)
    seen = _seen_from(root, path)
    if not isinstance(mounts, tuple) or seen is None:
        return None
    holding = [mount for mount in mounts if seen.is_relative_to(mount.point)]
    if not holding:
        return None
    filesystem = max(holding, key=lambda mount: len(mount.point)).filesystem
    return Disk(filesystem=shown(filesystem), network=filesystem in _REMOTE or filesystem.startswith("fuse."))


def _seen_from(root: Path, path: Path) -> Path | None:
    absolute = path.absolute()
    below, base = (root / absolute.relative_to(absolute.anchor)).resolve(), root.resolve()
    return Path("/") / below.relative_to(base) if below.is_relative_to(base) else None

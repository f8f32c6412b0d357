"""Real memory cgroups, made for a test and taken away after it. Only root on Linux can."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_REPOSITORY = Path(__file__).resolve().parent.parent
_serial = itertools.count()

# The shell enters the group and then becomes the program: all that this ever allocates is charged there.
_ENTER = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """One cgroup with a limit. Everything that `run` starts lives, and is charged, inside it."""

    folder: Path
    limit_bytes: int

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 60,
        cwd: Path = _REPOSITORY,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end with captured text output. A kill by the kernel shows as return code -9."""
        return subprocess.run(
            self._entering(argv),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            env=None if env is None else dict(env),
            check=False,
        )

    def start(self, argv: Sequence[str], *, stderr: IO[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a process that is talked with through pipes. It ends with the group at the latest."""
        return subprocess.Popen(
            self._entering(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=_REPOSITORY,
            env=dict(env),
        )

    def python(self, code: str, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run `code` with this repository's package importable."""
        env = {**os.environ, "PYTHONPATH": str(_REPOSITORY / ".src")}
        return self.run([sys.executable, "-c", code, *arguments], timeout=timeout, env=env)

    def stat(self) -> dict[str, int]:
        """The lines of memory.stat."""
        return _pairs(self.folder / "memory.stat")

    def hard_bytes(self) -> int:
        """Anonymous and locked bytes: what the kernel cannot drop. Anonymous bytes that are locked count twice."""
        stat = self.stat()
        return stat["rss" if _is_v1(self.folder) else "anon"] + stat["unevictable"]

    def peak_bytes(self) -> int:
        """The most that was ever charged at once. v2 tells this from Linux 5.19 on."""
        file = self.folder / ("memory.max_usage_in_bytes" if _is_v1(self.folder) else "memory.peak")
        return int(file.read_text())

    def oom_kills(self) -> int:
        """How many processes the kernel killed here for want of memory."""
        file = self.folder / ("memory.oom_control" if _is_v1(self.folder) else "memory.events")
        return _pairs(file)["oom_kill"]

    def _entering(self, argv: Sequence[str]) -> list[str]:
        return ["/bin/sh", "-c", _ENTER, str(self.folder / "cgroup.procs"), *argv]


@contextlib.contextmanager
def memory_cap(limit_bytes: int, *, parent: MemoryGroup | None = None) -> Generator[MemoryGroup]:
    """A cgroup below this process's own, or below `parent`, without swap; always removed."""
    above = _home() if parent is None else parent.folder
    folder = above / f"placewise-test-{os.getpid()}-{next(_serial)}"
    folder.mkdir()
    try:
        if parent is not None and not _is_v1(above):
            (above / "cgroup.subtree_control").write_text("+memory")
        _set_limit(folder, limit_bytes)
        yield MemoryGroup(folder=folder, limit_bytes=limit_bytes)
    finally:
        _remove(folder)


def live_reason() -> str | None:
    """Why no memory cgroup can be made here; None where one can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no cgroups"
    if os.geteuid() != 0:
        return "only root can make a cgroup"
    try:
        with memory_cap(1 << 30) as group:
            group.stat()
    except OSError as error:
        return f"no memory cgroup can be made: {error}"
    return None


def _home() -> Path:
    # v1 takes children anywhere. v2 takes them, with a memory controller, only where it was handed down.
    if _is_v1(_V1):
        own = _V1 / _own_path("memory")
        return own if _is_v1(own) else _V1
    own = _V2 / _own_path("")
    for folder in (own, *own.parents):
        control = folder / "cgroup.subtree_control"
        if control.is_file() and "memory" in control.read_text().split():
            return folder
        if folder == _V2:
            break
    raise FileNotFoundError(f"no memory controller is handed down at or below {_V2}")


def _set_limit(folder: Path, limit_bytes: int) -> None:
    # Without swap, or a host that has some would be slow where it ought to run out. Not all kernels count it.
    v1 = _is_v1(folder)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit_bytes))
    swap = folder / ("memory.memsw.limit_in_bytes" if v1 else "memory.swap.max")
    if swap.exists():
        swap.write_text(str(limit_bytes) if v1 else "0")


def _own_path(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _is_v1(folder: Path) -> bool:
    return (folder / "memory.limit_in_bytes").is_file()


def _pairs(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}


def _remove(folder: Path, *, patience_s: float = 5) -> None:
    end = time.monotonic() + patience_s
    while True:
        for process in (folder / "cgroup.procs").read_text().split():
            # A process of another namespace is shown as 0, which kill() would take for our own group.
            if int(process) > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        try:
            return folder.rmdir()
        except OSError:
            # A killed process leaves its group only once it is reaped.
            if time.monotonic() > end:
                raise
            time.sleep(0.02)

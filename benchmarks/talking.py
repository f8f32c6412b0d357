"""A process in a memory cgroup of its own that is told to go on line by line, and whose hard bytes are watched."""

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from placewise.tests.cgroup import MemoryGroup

PATIENCE_S = 300
_SAMPLE_S = 0.02


class EndedError(Exception):
    """A process ended, or did not answer; says how."""


class Talk:
    """Starts a process; leaving the context ends it.

    Args:
        group: the cgroup that it runs in.
        argv: what is run.
        env: its environment.
    """

    def __init__(self, group: MemoryGroup, argv: Sequence[str], env: Mapping[str, str] = os.environ) -> None:
        self.peak_bytes = 0
        self._group = group
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process: subprocess.Popen[str] = group.start(argv, stderr=self._errors, env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def ask(self) -> str:
        """Tell it to go on, and wait for its next line.

        Raises:
            EndedError: it did not survive.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> str:
        """The next line that it says; its memory is watched meanwhile.

        Raises:
            EndedError: there is none.
        """
        assert self._process.stdout is not None
        end = time.monotonic() + PATIENCE_S
        while not select.select([self._process.stdout], [], [], _SAMPLE_S)[0]:
            self.peak_bytes = max(self.peak_bytes, self._group.hard_bytes())
            if time.monotonic() > end:
                raise EndedError(f"no answer in {PATIENCE_S} s")
        if line := self._process.stdout.readline():
            return line
        code = self._process.wait()
        if self._group.oom_kills():
            raise EndedError("killed for want of memory")
        self._errors.seek(0)
        raise EndedError(f"ended with {code}: {self._errors.read().strip().rpartition(chr(10))[2]}")

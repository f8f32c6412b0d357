"""Runs a contender of the streaming benchmark in a cgroup of its own, and talks with it."""

import contextlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from placewise.tests.cgroup import memory_cap

from .checkpoints import drop_pages
from .streaming_child import CONTENDERS, OFFLOAD, Loaded, Pass
from .talking import PATIENCE_S, EndedError, Talk


@dataclass(slots=True, kw_only=True)
class Running:
    """A contender's process, and what it did so far. `ended` says how it did, if it did."""

    name: str
    variant: str
    talk: Talk
    loaded: Loaded | None = None
    passes: list[Pass] = field(default_factory=list[Pass])
    ended: str = ""

    @property
    def title(self) -> str:
        """The contender's, with the variant."""
        return CONTENDERS[self.name].title + (f", {self.variant}" if self.variant else "")

    @property
    def seconds(self) -> list[float]:
        """Of each pass."""
        return [each.seconds for each in self.passes]

    @property
    def peak_bytes(self) -> int:
        """The most hard bytes that were seen."""
        return self.talk.peak_bytes

    def turn(self) -> Pass:
        """Have it take a turn.

        Raises:
            EndedError: it did not survive.
        """
        return Pass.model_validate_json(self.talk.ask())

    @property
    def median_s(self) -> float:
        """Of the passes."""
        return statistics.median(self.seconds)


@contextlib.contextmanager
def running(name: str, variant: str, folder: Path, limit_bytes: int, env: Mapping[str, str]) -> Generator[Running]:
    """Start a contender in a cap of its own, with a cold cache, and end it afterwards."""
    for file in folder.glob("*.safetensors"):
        drop_pages(file)
    shutil.rmtree(folder / OFFLOAD, ignore_errors=True)
    argv = [sys.executable, "-m", "placewise.benchmarks.streaming_child", name, str(folder), variant, str(limit_bytes)]
    with memory_cap(limit_bytes) as group, Talk(group, argv, env) as talk:
        yield Running(name=name, variant=variant, talk=talk)


def begin(found: Running) -> Pass:
    """Have it load and take a first turn, which warms up.

    Raises:
        EndedError: it did not survive.
    """
    found.loaded = Loaded.model_validate_json(found.talk.answer())
    first = found.turn()
    say(f"{found.title}: loaded in {found.loaded.load_s:.2f} s, first turn {first.seconds:.2f} s")
    return first


def best_variant(name: str, start: Callable[[str], AbstractContextManager[Running]]) -> tuple[str | None, list[str]]:
    """The variant with the shortest of two turns, null if none survives; and what became of each.

    Where there is only one, it is not tried.
    """
    variants = CONTENDERS[name].variants
    if len(variants) == 1:
        return variants[0], []
    seconds: dict[str, float] = {}
    fates: list[str] = []
    for variant in variants:
        with start(variant) as found:
            try:
                seconds[variant] = min(begin(found).seconds, found.turn().seconds)
                fates.append(f"{found.title}: {seconds[variant]:.2f} s, the shorter of two turns.")
            except EndedError as error:
                fates.append(f"{found.title}: {error}.")
    return min(seconds, key=seconds.__getitem__, default=None), fates


def calibrated(folder: Path, limit_bytes: int, env: Mapping[str, str]) -> str:
    """Run `placewise calibrate` in a cap; says how that went."""
    with memory_cap(limit_bytes) as group:
        argv = [sys.executable, "-m", "placewise", "calibrate", str(folder)]
        started = time.perf_counter()
        ran = group.run(argv, timeout=PATIENCE_S, env=env)
        seconds = time.perf_counter() - started
        if group.oom_kills():
            return "Calibrating was killed for want of memory, so placewise planned without rates."
    if ran.returncode:
        raise SystemExit(f"placewise calibrate: {ran.stderr}")
    return f"Calibrating took {seconds:.1f} s."


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)

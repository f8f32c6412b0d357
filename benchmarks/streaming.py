"""A model larger than its memory cap, run pass after pass: placewise beside what the libraries do, in one run.

    sudo PYTHONPATH=.src .venv/bin/python -m benchmarks.streaming > benchmarks/results/streaming-$(date +%F).md

A model of the Llama class (4.06 GiB with 32 layers) is made once; each contender runs it in a process and a memory
cgroup of its own. All stay alive and take turns, so that whatever else the machine does meets them all. It is fair
since
- each has its own copy of the checkpoint: a page of the cache is charged to the cgroup that reads it first, and free
  for the others, so shared files would be read for some by others. Nobody's cache is dropped between turns: what a
  contender's cap keeps for it, it keeps; the caps together leave the machine's memory with room to spare;
- nothing is in the cache when it begins: the pages of each copy are dropped before its contender starts;
- a turn is two passes in a row, of which the second is measured: what the wait between turns is good for, such as
  reading ahead for the pass to come, the first pass uses up, and the second finds what a server's would;
- imports are not timed; the calibration is made before, as `placewise calibrate` in a cgroup of the same size, and is
  the only thing that placewise has and the others do not; of a library's variants the fastest is taken.

The disk is measured in every round, with direct reads of the model itself, at offsets that move on. Hard bytes are the
cgroup's anonymous and locked ones, without the page cache, read every 20 ms from the start of the process to the end.
"""

import argparse
import contextlib
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import psutil
from placewise.planner.calibrating.files import open_sources
from placewise.planner.calibrating.timed_reads import Region, Way, timed_read
from placewise.plans.calibration import ReadMode
from placewise.plans.units import GIB, MIB, format_bytes, parse_bytes
from placewise.tests.cgroup import MemoryGroup, memory_cap

from .checkpoints import drop_pages
from .header import print_header
from .streaming_child import CONTENDERS, OFFLOAD, TOKENS, Loaded, Pass
from .streaming_model import write_model

WAYS = tuple(
    Way(mode=ReadMode.direct, chunk_bytes=chunk * MIB, depth=depth)
    for chunk, depth in ((4, 4), (4, 8), (1, 8), (16, 4))
)
LIBRARIES = ("plain", "device_map", "group_offload")
PATIENCE_S = 300
_REGION_BYTES = 256 * MIB
_SAMPLE_S = 0.02
_REPOSITORY = Path(__file__).resolve().parent.parent


class EndedError(Exception):
    """A contender's process ended, or did not answer; says how."""


@dataclass(slots=True, kw_only=True)
class Running:
    """A contender's process, and what it did so far. `ended` says how it did, if it did."""

    name: str
    variant: str
    process: subprocess.Popen[str]
    group: MemoryGroup
    errors: IO[str]
    loaded: Loaded | None = None
    peak_bytes: int = 0
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
    def median_s(self) -> float:
        """Of the passes."""
        return statistics.median(self.seconds)

    def answer(self) -> str:
        """The next line that it says; its memory is watched meanwhile.

        Raises:
            EndedError: there is none.
        """
        assert self.process.stdout is not None
        end = time.monotonic() + PATIENCE_S
        while not select.select([self.process.stdout], [], [], _SAMPLE_S)[0]:
            self.peak_bytes = max(self.peak_bytes, self.group.hard_bytes())
            if time.monotonic() > end:
                raise EndedError(f"no answer in {PATIENCE_S} s")
        if line := self.process.stdout.readline():
            return line
        code = self.process.wait()
        if self.group.oom_kills():
            raise EndedError("killed for want of memory")
        self.errors.seek(0)
        raise EndedError(f"ended with {code}: {self.errors.read().strip().rpartition(chr(10))[2]}")

    def turn(self) -> Pass:
        """Have it take a turn.

        Raises:
            EndedError: it did not survive.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(file=self.process.stdin, flush=True)
        return Pass.model_validate_json(self.answer())


@contextlib.contextmanager
def running(name: str, variant: str, folder: Path, limit_bytes: int, env: Mapping[str, str]) -> Generator[Running]:
    """Start a contender in a cap of its own, with a cold cache, and end it afterwards."""
    for file in folder.glob("*.safetensors"):
        drop_pages(file)
    shutil.rmtree(folder / OFFLOAD, ignore_errors=True)
    argv = [sys.executable, "-m", "placewise.benchmarks.streaming_child", name, str(folder), variant, str(limit_bytes)]
    with memory_cap(limit_bytes) as group, tempfile.TemporaryFile("w+") as errors:
        process = group.start(argv, stderr=errors, env=env)
        try:
            yield Running(name=name, variant=variant, process=process, group=group, errors=errors)
        finally:
            process.kill()
            process.wait()


def begin(found: Running) -> Pass:
    """Have it load and take a first turn, which warms up.

    Raises:
        EndedError: it did not survive.
    """
    found.loaded = Loaded.model_validate_json(found.answer())
    first = found.turn()
    say(f"{found.title}: loaded in {found.loaded.load_s:.2f} s, first turn {first.seconds:.2f} s")
    return first


def best_variant(name: str, start: Callable[[str], AbstractContextManager[Running]]) -> tuple[str | None, list[str]]:
    """The variant whose first turn is the shortest, null if none survives; and what became of each."""
    seconds: dict[str, float] = {}
    fates: list[str] = []
    for variant in CONTENDERS[name].variants:
        with start(variant) as found:
            try:
                seconds[variant] = begin(found).seconds
                if variant:
                    fates.append(f"{found.title}: {seconds[variant]:.2f} s in a first turn.")
            except EndedError as error:
                fates.append(f"{found.title}: {error}.")
                say(fates[-1])
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


def disk_rates(model: Path, at: int) -> list[float]:
    """Bytes per second by each of `WAYS`, each of a region of its own: the `at`th of the largest file, around again."""
    with open_sources(model, least_bytes=_REGION_BYTES, temporary_bytes=0) as sources:
        source = sources.files[0]
        if source.direct is None:
            raise SystemExit(f"{model}: the file system refuses direct reads")
        places = source.size_bytes // _REGION_BYTES
        regions = (
            Region(source=source, offset=(at + number) % places * _REGION_BYTES, length=_REGION_BYTES)
            for number in range(len(WAYS))
        )
        return [
            timed_read(way, region, source.direct, limit_s=PATIENCE_S).bytes_per_s
            for way, region in zip(WAYS, regions, strict=True)
        ]


def take_turns(field: list[Running], model: Path, rounds: int) -> list[list[float]]:
    """Have everyone take a turn in each round; returns the disk's rates by round. A library that ends is passed over."""
    rates: list[list[float]] = []
    for number in range(rounds):
        rates.append(disk_rates(model, number * len(WAYS)))
        for each in field:
            if not each.ended:
                try:
                    each.passes.append(each.turn())
                except EndedError as error:
                    if each.name not in LIBRARIES:
                        raise SystemExit(f"{each.title}: {error}") from None
                    each.ended = f"{error}, in round {number + 1}"
        say(f"round {number + 1}: " + ", ".join(f"{each.name} {each.seconds[-1:]}" for each in field))
    return rates


def report_of(field: list[Running], rates: list[list[float]], weight_bytes: int) -> list[str]:
    """The tables and what follows from them, in Markdown."""
    by_name = {each.name: each for each in field}
    memory, ours = by_name["memory"], by_name["ours"]
    expected = {each.digest for each in memory.passes}
    lines = [
        "| contender | load, s | pass, s | least to most | of in memory | read per pass | hard bytes, peak | outputs |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
        *(_row(each, memory, expected) for each in field),
        "",
        "| direct reads | GB/s, median | least to most |",
        "|---|---:|---:|",
    ]
    by_way = list(zip(*rates, strict=True))
    for way, found in zip(WAYS, by_way, strict=True):
        median, least, most = (value / 1e9 for value in (statistics.median(found), min(found), max(found)))
        lines.append(f"| {way.depth} of {format_bytes(way.chunk_bytes)} | {median:.2f} | {least:.2f} to {most:.2f} |")
    best = max(by_way, key=statistics.median)
    assert ours.loaded is not None
    assert ours.loaded.placed is not None
    unheld = ours.loaded.placed.unheld_bytes
    lines += ["", "What placewise planned:", "", *(f"- {words}" for words in ours.loaded.placed.words)]
    lines += ["", "Medians of paired ratios, round by round:", ""]
    peers = [by_name["mapped"], *(each for each in field if each.name in LIBRARIES and each.passes)]
    lines += [f"- placewise over {each.title}: {_ratio(ours.seconds, each.seconds)}" for each in peers]
    floors = [max(compute, unheld / rate) for compute, rate in zip(memory.seconds, best, strict=True)]
    read = statistics.median(each.disk_bytes for each in ours.passes)
    share = f"{read / unheld:.3f}" if unheld else "nothing is to be read"
    lines += [
        f"- placewise over the longer of computing in memory and reading what it does not hold ({format_bytes(unheld)} "
        f"of {format_bytes(weight_bytes)}) at the disk's best: {_ratio(ours.seconds, floors)}",
        f"- bytes that placewise read per pass over those that it does not hold: {share}",
    ]
    return lines


def _row(each: Running, memory: Running, expected: set[str]) -> str:
    assert each.loaded is not None
    if not each.passes:
        return f"| {each.title} | {each.loaded.load_s:.2f} | {each.ended} | | | | {format_bytes(each.peak_bytes)} | |"
    same = "the reference" if each is memory else "the same bits"
    if {done.digest for done in each.passes} != expected or len(expected) > 1:
        same = "**differ**"
    cells = (
        each.title,
        f"{each.loaded.load_s:.2f}",
        f"{each.median_s:.2f}",
        f"{min(each.seconds):.2f} to {max(each.seconds):.2f}",
        _ratio(each.seconds, memory.seconds),
        format_bytes(int(statistics.median(done.disk_bytes for done in each.passes))),
        format_bytes(each.peak_bytes),
        f"{same}; {each.ended}" if each.ended else same,
    )
    return f"| {' | '.join(cells)} |"


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of ratios, with the least and the most. Rounds that one of them did not live to see are left out."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=False)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Make the model, let everyone run it, and print the report."""
    parser = argparse.ArgumentParser(description="Stream a model that is larger than its cap, beside the libraries.")
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "placewise-streaming", help="kept")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--limit", type=parse_bytes, default=5 * GIB // 2, help="the cap of each contender")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    say(f"making {chosen.model} if it is not there")
    write_model(chosen.model, chosen.layers)
    weight_bytes = sum(file.stat().st_size for file in chosen.model.glob("*.safetensors"))
    others = os.getloadavg()[0]
    # Beside the model, for the disk that is measured has to be the one that is read.
    with tempfile.TemporaryDirectory(dir=chosen.model.parent) as folder, ExitStack() as stack:
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(_REPOSITORY / ".src"),
            "XDG_CACHE_HOME": str(Path(folder) / "cache"),
        }
        field: list[Running] = []
        notes: list[str] = []
        for name in CONTENDERS:
            copy = Path(shutil.copytree(chosen.model, Path(folder) / name))
            limit_bytes = psutil.virtual_memory().total if name == "memory" else chosen.limit
            if name == "ours":
                notes.append(calibrated(copy, limit_bytes, env))
            start = partial(running, name, folder=copy, limit_bytes=limit_bytes, env=env)
            variant, fates = best_variant(name, start)
            notes += fates
            if variant is None and name not in LIBRARIES:
                raise SystemExit("\n".join(fates))
            if variant is not None:
                field.append(stack.enter_context(start(variant)))
                begin(field[-1])
        rates = take_turns(field, chosen.model, chosen.rounds)
        report = report_of(field, rates, weight_bytes)
    print_header("Streaming a model larger than its cap", " ".join(("python -m benchmarks.streaming", *sys.argv[1:])))
    print(
        f"Llama class, {chosen.layers} layers, {format_bytes(weight_bytes)} of bfloat16; a pass is one forward of ",
        end="",
    )
    print(f"{TOKENS} tokens. Caps of {format_bytes(chosen.limit)}, one each; {chosen.rounds} rounds, medians.")
    print(
        f"Load average of the machine before: {others:.1f}.",
        "",
        *(f"- {note}" for note in notes),
        "",
        *report,
        sep="\n",
    )


if __name__ == "__main__":
    main()

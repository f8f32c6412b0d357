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

How libraries fare depends on how far the kernel reads ahead of a page fault: the table tells it, and `--read-ahead`
sets it for the time of the run. The disk is measured in every round, with direct reads of the model itself, at offsets
that move on. Hard bytes are the cgroup's anonymous and locked ones, without the page cache, read every 20 ms from the
start of the process to the end.
The copies, and what the libraries write anew, take seven times the model's size beside it, and go when it is over.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import psutil
from placewise.planner.calibrating.files import open_sources
from placewise.planner.calibrating.timed_reads import Region, Way, timed_read
from placewise.plans.calibration import ReadMode
from placewise.plans.units import GIB, MIB, format_bytes, parse_bytes

from .header import print_header
from .read_ahead import read_ahead
from .streaming_child import CONTENDERS, TOKENS
from .streaming_model import write_model
from .streaming_run import Running, begin, best_variant, calibrated, running, say
from .talking import EndedError

WAYS = tuple(
    Way(mode=ReadMode.direct, chunk_bytes=chunk * MIB, depth=depth)
    for chunk, depth in ((4, 4), (4, 8), (1, 8), (16, 4))
)
LIBRARIES = {"plain", "device_map", "group_offload"}
"""They may end in their caps. Without the others there is nothing to compare."""

_REGION_BYTES = 256 * MIB
_REPOSITORY = Path(__file__).resolve().parent.parent


def disk_rates(model: Path, number: int) -> list[float]:
    """Bytes per second by each of `WAYS`, each of a region of its own: in the next round the regions are the next.

    Another way is the first in each round, for a disk may be faster after a rest.
    """
    with open_sources(model, least_bytes=_REGION_BYTES, temporary_bytes=0) as sources:
        regions = cycle(
            Region(source=source, offset=offset, length=_REGION_BYTES)
            for source in sources.files
            for offset in range(0, source.size_bytes - _REGION_BYTES + 1, _REGION_BYTES)
        )
        first = number % len(WAYS)
        rates: dict[Way, float] = {}
        for way, region in zip((*WAYS[first:], *WAYS[:first]), islice(regions, number * len(WAYS), None), strict=False):
            if region.source.direct is None:
                raise SystemExit(f"{model}: the file system refuses direct reads")
            rates[way] = timed_read(way, region, region.source.direct, limit_s=60).bytes_per_s
        return [rates[way] for way in WAYS]


def take_turns(field: list[Running], model: Path, rounds: int) -> list[list[float]]:
    """Have everyone take a turn in each round; returns the disk's rates by round.

    A library that ends is passed over from then on.

    Raises:
        SystemExit: another contender ended.
    """
    rates: list[list[float]] = []
    for number in range(rounds):
        rates.append(disk_rates(model, number))
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
    libraries = sorted(
        (each for each in field if each.name in LIBRARIES and each.passes), key=lambda each: each.median_s
    )
    peers = (by_name["mapped"], *libraries)
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


def main() -> None:
    """Make the model, let everyone run it, and print the report."""
    parser = argparse.ArgumentParser(description="Stream a model that is larger than its cap, beside the libraries.")
    default = Path(tempfile.gettempdir()) / "placewise-streaming"
    parser.add_argument("--model", type=Path, default=default, help="its folder; made where it is not there, and kept")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--limit", type=parse_bytes, default=5 * GIB // 2, help="the cap of each contender")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--read-ahead", type=parse_bytes, help="the kernel's, of the disk that holds the model; as it is without this"
    )
    chosen = parser.parse_args()
    say(f"making {chosen.model} if it is not there")
    write_model(chosen.model, chosen.layers)
    weight_bytes = sum(file.stat().st_size for file in chosen.model.glob("*.safetensors"))
    others = os.getloadavg()[0]
    # Beside the model, for the disk that is measured has to be the one that is read.
    with tempfile.TemporaryDirectory(dir=chosen.model.parent) as folder, ExitStack() as stack:
        ahead = stack.enter_context(read_ahead(chosen.model, chosen.read_ahead))
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
            if variant is not None:
                found = stack.enter_context(start(variant))
                try:
                    begin(found)
                    field.append(found)
                except EndedError as error:
                    notes.append(f"{found.title}: {error}.")
        if not {each.name for each in field} >= CONTENDERS.keys() - LIBRARIES:
            raise SystemExit("\n".join(notes))
        rates = take_turns(field, chosen.model, chosen.rounds)
        report = report_of(field, rates, weight_bytes)
    print_header("Streaming a model larger than its cap", " ".join(("python -m benchmarks.streaming", *sys.argv[1:])))
    print(
        f"Llama class, {chosen.layers} layers, {format_bytes(weight_bytes)} of bfloat16; a pass is one forward of ",
        end="",
    )
    print(f"{TOKENS} tokens. Caps of {format_bytes(chosen.limit)}, one each; {chosen.rounds} rounds, medians.")
    print(
        f"The kernel reads {'unknown' if ahead is None else format_bytes(ahead)} ahead of a page fault. "
        f"Load average of the machine before: {others:.1f}.",
        "",
        *(f"- {note}" for note in notes),
        "",
        *report,
        sep="\n",
    )


if __name__ == "__main__":
    main()

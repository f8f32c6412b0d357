"""Plans that were admitted, executed for real: random pipelines in memory cgroups and on simulated accelerators.

    sudo PYTHONPATH=.src .venv/bin/python -m benchmarks.soundness --count 200 --seed 0

Every case runs in a process and a cgroup of its own: it measures, plans, loads and passes twice through every
component, and its outputs are compared bit for bit with a plain run outside. A refused case is planned again with the
change that its refusal names, and that plan is run on the true memory. The rule `activations-are-known` is in force;
what it refuses is planned without it.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context

import torch
from placewise.plans.units import GIB, MIB, format_bytes

from .header import print_header
from .soundness_cases import Case, draw_cases
from .soundness_child import CAREFUL
from .soundness_run import ENDS, Result, bare_bytes, run_and_retry

_COUNTED = "sim, activations known"
"""Only there do counters see all that is predicted: nothing counts activations on a CPU."""


def _one_thread() -> None:
    torch.set_num_threads(1)


def run_cases(cases: Iterable[Case], jobs: int, bare: int) -> list[Result]:
    """Run every case, so many at a time; progress goes to stderr."""
    results: list[Result] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        for future in [pool.submit(run_and_retry, case, bare) for case in cases]:
            result = future.result()
            results.append(result)
            verdict = "admitted" if result.admitted else "refused"
            print(f"{len(results)}: {result.promised}: {verdict}, {result.end} {result.error}", file=sys.stderr)
    return results


def report_of(results: list[Result], bare: int) -> str:
    """The tables, in Markdown."""
    lines = [
        f"A bare process takes {format_bytes(bare)}. {_span('Weights', [r.prepared.weight_bytes for r in results])}",
        _span("Host budgets beyond it", [r.prepared.budget_bytes for r in results]),
        _span("Devices", [r.prepared.capacity_bytes for r in results if r.prepared.capacity_bytes is not None]),
        "",
        "Admitted plans, executed:",
        "",
        *_admitted([result for result in results if not result.planned_anyway]),
        "",
        f"Refused by the rule `{CAREFUL}`, planned without it, and executed. The reserve covers some of them:",
        "",
        *_admitted([result for result in results if result.planned_anyway]),
        "",
        "All of these by the host memory that was free when they were planned, and what those that died lacked:",
        "",
        *_by_free(results),
        "",
        _over(results),
        "",
        "Refused plans, each forced: planned with the change that the refusal names, run on the true memory. A need",
        "within the reserve is refused to keep the reserve, and may run; one beyond all the memory must not.",
        "",
        *_refused(results),
        "",
        "Homes and holds among admitted plans (a plan has several):",
        "",
        *_homes(results),
    ]
    return "\n".join(lines)


def _span(what: str, figures: list[int]) -> str:
    figures = sorted(figures)
    if not figures:
        return f"{what}: none."
    low, middle, high = (format_bytes(figure) for figure in (figures[0], figures[len(figures) // 2], figures[-1]))
    return f"{what}: {low} to {high}, median {middle}."


def _admitted(results: list[Result]) -> list[str]:
    rows = [f"| case | drawn | admitted | {' | '.join(ENDS)} | seconds |", "|---|" + "---:|" * (3 + len(ENDS))]
    for promised in sorted({result.promised for result in results}):
        mine = [result for result in results if result.promised == promised]
        ends = Counter(result.end for result in mine if result.admitted)
        figures = [len(mine), ends.total(), *(ends[end] for end in ENDS)]
        seconds = sum(result.seconds for result in mine)
        rows.append(f"| {promised} | {' | '.join(map(str, figures))} | {seconds:.0f} |")
    return rows


def _by_free(results: list[Result]) -> list[str]:
    bounds = (64 * MIB, 128 * MIB, 256 * MIB, GIB)
    rows = ["| free | admitted | ran | killed or starved | lacked |", "|---|---:|---:|---:|---|"]
    for low, high in zip((0, *bounds), bounds, strict=False):
        mine = [r for r in results if r.admitted and r.report is not None and low <= _host_free(r) < high]
        dead = [r for r in mine if r.end in ("killed", "starved")]
        lacked = Counter("more" if r.lacking_bytes is None else format_bytes(r.lacking_bytes) for r in dead)
        told = ", ".join(f"up to {size}: {n}" for size, n in sorted(lacked.items()))
        ran = sum(r.end == "ran" for r in mine)
        rows.append(f"| {format_bytes(low)} to {format_bytes(high)} | {len(mine)} | {ran} | {len(dead)} | {told} |")
    return rows


def _over(results: list[Result]) -> str:
    """How far the counted peaks went beyond the predicted ones where activations were known."""
    over = Counter[str]()
    for result in results:
        if result.admitted and result.end == "ran" and result.report is not None and result.promised == _COUNTED:
            for axis, peak in result.report.peak_bytes.items():
                over[axis] = max(over[axis], peak - result.report.predicted_bytes[axis])
    told = ", ".join(f"{axis} {format_bytes(count)}" for axis, count in sorted(over.items()))
    return f"The most that counted bytes went beyond the predicted peak, {_COUNTED}: {told or 'none'}."


def _host_free(result: Result) -> int:
    free = 0 if result.report is None else result.report.free_bytes
    return max(0, free - (result.prepared.capacity_bytes or 0))


def _refused(results: list[Result]) -> list[str]:
    ends: dict[str, Counter[str]] = {}
    for result in results:
        for short in result.report.short if result.report is not None else ():
            where = "beyond the memory" if short.need_bytes > short.available_bytes else "within the reserve"
            ends.setdefault(f"{short.axis}, {where}", Counter())[_ended(result, short.axis)] += 1
    unplanned = [result.end for result in results if result.report is None or result.report.stage == "measured"]
    rows = ["| short of | tried | ended |", "|---|---:|---|"]
    for axis, found in sorted(ends.items()):
        rows.append(f"| {axis} | {found.total()} | {', '.join(f'{end} {n}' for end, n in sorted(found.items()))} |")
    return [*rows, "", f"Ended before they were planned: {len(unplanned)}."]


def _ended(result: Result, axis: str) -> str:
    """An overflow counts for its axis alone."""
    if result.end != "overflowed":
        return result.end
    return "overflowed there" if result.error.startswith(f"{axis} is out of memory") else "overflowed elsewhere"


def _homes(results: list[Result]) -> list[str]:
    found: dict[str, Counter[str]] = {"cpu": Counter(), "sim": Counter()}
    mixed: Counter[str] = Counter()
    for result in results:
        if result.admitted and result.report is not None:
            kind = result.promised[:3]
            found[kind].update(result.report.homes)
            mixed[kind] += len(result.report.homes) > 1
    names = sorted({home for homes in found.values() for home in homes})
    rows = ["| home/hold | cpu | sim |", "|---|---:|---:|"]
    rows += [f"| {home} | {found['cpu'][home]} | {found['sim'][home]} |" for home in names]
    return [*rows, f"| two or more of them | {mixed['cpu']} | {mixed['sim']} |"]


def main() -> None:
    """Draw, run, and print the tables."""
    parser = argparse.ArgumentParser(description="Execute random admitted plans in real caps.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time; each computes with one thread")
    chosen = parser.parse_args()
    print_header("Soundness", f"python -m benchmarks.soundness --count {chosen.count} --seed {chosen.seed}")
    started = time.perf_counter()
    _one_thread()
    bare = bare_bytes()
    results = run_cases(draw_cases(chosen.count, chosen.seed), chosen.jobs, bare)
    print(f"Hypothesis {metadata.version('hypothesis')}; {time.perf_counter() - started:.0f} s.\n")
    print(report_of(results, bare))


if __name__ == "__main__":
    main()

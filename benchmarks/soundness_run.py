"""Runs one case of the soundness benchmark in a cgroup of its own, and says how it ended."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from placewise.plans.record import Record
from placewise.plans.units import GIB, MIB
from placewise.tests.cgroup import MemoryGroup, memory_cap

from .soundness_cases import Case, Prepared, prepare
from .soundness_child import WARM, Report

PATIENCE_S = 60
ENDS = ("ran", "killed", "starved", "overflowed", "differs", "failed")
RETRIES = tuple(count * MIB for count in (8, 16, 32, 64, 128))
"""Room that is given, unknown to the planner, to a plan that was admitted and did not live: how much was missing."""

_CHILD = "from placewise.benchmarks.soundness_child import main; main()"
_REPOSITORY = Path(__file__).resolve().parent.parent


class Result(Record):
    """One case: what became of it. `end` is one of ENDS; `starved` is alive and not done after the patience."""

    case: Case
    prepared: Prepared
    report: Report | None
    end: str
    error: str
    seconds: float
    lacking_bytes: int | None = None

    @property
    def admitted(self) -> bool:
        """Whether the plan fitted; what came to its end before planning was not admitted."""
        return self.report is not None and self.report.stage != "measured" and not self.report.forced

    @property
    def planned_anyway(self) -> bool:
        """Whether a rule refused it, and the plan without that rule fitted."""
        return self.admitted and self.report is not None and bool(self.report.broken)

    @property
    def promised(self) -> str:
        """What the plan knew of activations: unknown ones are promised to fit as far as the reserve covers them."""
        kind = "sim" if self.case.device_percent is not None else "cpu, exact heap" if self.case.exact_heap else "cpu"
        if self.case.activations_known:
            return f"{kind}, activations known"
        covered = self.report is not None and self.report.reserve_bytes >= max(self.prepared.activation_bytes.values())
        return f"{kind}, activations unknown, {'within' if covered else 'beyond'} the reserve"


def bare_bytes() -> int:
    """What a warm process takes before it plans."""
    with tempfile.TemporaryDirectory() as folder, memory_cap(2 * GIB) as cap:
        report, end, error = _run_in(cap, prepare(WARM, Path(folder), 0), Path(folder))
    if report is None or end != "ran":
        raise SystemExit(f"a bare process {end}: {error}")
    return 2 * GIB - report.free_bytes


def run_case(case: Case, bare: int, hidden: int = 0) -> Result:
    """Prepare a case, run it in its cap, and say how it ended.

    Args:
        case: as drawn.
        bare: what a process takes before it plans.
        hidden: room in the cap that the planner is not told of.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(case, Path(folder), bare).model_copy(update={"hidden_bytes": hidden})
        with memory_cap(bare + prepared.budget_bytes + (prepared.capacity_bytes or 0) + hidden) as cap:
            report, end, error = _run_in(cap, prepared, Path(folder))
    return Result(
        case=case,
        prepared=prepared.model_copy(update={"root": ""}),
        report=report,
        end=end,
        error=error,
        seconds=time.perf_counter() - started,
    )


def run_and_retry(case: Case, bare: int) -> Result:
    """Run a case; where an admitted plan did not live, find out how much it lacked."""
    result = run_case(case, bare)
    if result.admitted and result.end in ("killed", "starved"):
        for hidden in RETRIES:
            if run_case(case, bare, hidden).end == "ran":
                return result.model_copy(update={"lacking_bytes": hidden})
    return result


def _run_in(cap: MemoryGroup, prepared: Prepared, folder: Path) -> tuple[Report | None, str, str]:
    told = folder / "case.json"
    told.write_text(prepared.model_dump_json())
    said = folder / "report.jsonl"
    env = {**os.environ, "PYTHONPATH": str(_REPOSITORY / ".src"), "OMP_NUM_THREADS": "1"}
    if prepared.case.exact_heap:
        env["MALLOC_MMAP_THRESHOLD_"] = str(MIB // 8)
    argv = [sys.executable, "-c", _CHILD, str(told), str(said)]
    try:
        ran = cap.run(argv, timeout=PATIENCE_S, env=env)
        code, error = ran.returncode, ran.stderr[-2000:]
    except subprocess.TimeoutExpired:
        code, error = None, ""
    lines = said.read_text().splitlines() if said.exists() else []
    report = Report.model_validate_json(lines[-1]) if lines else None
    if cap.oom_kills():
        return report, "killed", error
    if code is None:
        return report, "starved", error
    if report is None or code or report.stage not in ("ran", "overflowed"):
        return report, "failed", error
    return report, "differs" if report.same is False else report.stage, report.error or ""

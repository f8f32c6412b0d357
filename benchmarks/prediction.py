"""Predicted against observed: the plan's peaks and seconds beside what a run in a real cap took, pair by pair.

    sudo PYTHONPATH=.src .venv/bin/python -m benchmarks.prediction > benchmarks/results/prediction-$(date +%F).md

Every pair of a model and a budget runs in a process and a memory cgroup of its own, on cold files: it measures, traces,
plans, loads and passes. Budgets are shares of the model's weights: of what the host has beyond a process that is ready
to load, and of a simulated device with a link. The host's peak is that of the process's anonymous bytes, less what was
there before loading, and less what the simulated device holds of them and the heap keeps of its freed blocks; the
device's is its own.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from placewise.planner.calibrating.calibrate import calibrate
from placewise.plans.calibration import Calibration, LinkRate
from placewise.plans.units import MIB, format_bytes
from placewise.tests.cgroup import memory_cap

from .checkpoints import drop_pages
from .header import print_header
from .prediction_child import DEVICE, Case, Outcome, Predicted
from .prediction_models import MODELS, write_model
from .talking import EndedError, Talk

SPARE_BYTES = 96 * MIB
"""Beyond a ready process and the budget: what the planner leaves for scratch memory and a least page cache."""

LINK_BYTES_PER_S = 1.5e9
HOST_SHARES = (3.0, 1.2, 0.7, 0.45, 0.25)
DEVICE_SHARES = ((1.6, 3.0), (0.7, 3.0), (0.4, 3.0), (0.7, 0.4))
"""Of the device and, beside it, of the host."""


def cases(name: str, folder: Path, calibration: Calibration) -> Iterator[Case]:
    """All budgets of one model."""
    common = {"model": name, "folder": str(folder), "calibration": calibration.model_dump_json()}
    for share in HOST_SHARES:
        yield Case.model_validate(common | {"host_share": share})
    for device, host in DEVICE_SHARES:
        yield Case.model_validate(common | {"host_share": host, "device_share": device, "link": LINK_BYTES_PER_S})


def with_link(calibration: Calibration) -> Calibration:
    """The calibration of this machine, with a simulated device that computes as its processor does."""
    links = tuple(
        LinkRate(device=DEVICE, source=source, bytes_per_s=LINK_BYTES_PER_S) for source in ("pageable", "mapped")
    )
    there = tuple(rate.model_copy(update={"device": DEVICE}) for rate in calibration.compute if rate.device == "cpu")
    return calibration.model_copy(update={"links": links, "compute": (*calibration.compute, *there)})


def run(case: Case, weight_bytes: int, ready_bytes: int) -> tuple[Predicted, Outcome] | str:
    """What was predicted and what was observed; or how it ended."""
    for file in Path(case.folder).glob("*.safetensors"):
        drop_pages(file)
    limit = ready_bytes + SPARE_BYTES + round((case.host_share + (case.device_share or 0)) * weight_bytes)
    argv = [sys.executable, "-m", "placewise.benchmarks.prediction_child", case.model_dump_json()]
    with memory_cap(limit) as group, Talk(group, argv) as talk:
        try:
            return Predicted.model_validate_json(talk.answer()), Outcome.model_validate_json(talk.ask())
        except EndedError as error:
            return str(error)


def ready_bytes(case: Case) -> int:
    """What a process takes that is ready to load, without a cap."""
    argv = [sys.executable, "-m", "placewise.benchmarks.prediction_child", case.model_dump_json()]
    with memory_cap(1 << 40) as group, Talk(group, argv) as talk:
        talk.answer()
        return group.hard_bytes()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    rows: list[str] = []
    time_errors: list[float] = []
    peak_errors: dict[str, list[float]] = {}
    unforeseen = 0
    with tempfile.TemporaryDirectory() as root:
        for name in options.models:
            folder = Path(root) / name
            weight_bytes = write_model(name, folder)
            calibration = with_link(calibrate(folder, ()))
            ready = 0
            for case in cases(name, folder, calibration):
                ready = ready or ready_bytes(case)
                found = run(case, weight_bytes, ready)
                print(f"{name} {case.host_share} {case.device_share}: {found}", file=sys.stderr)
                budget = f"{case.host_share:g}" + (f", device {case.device_share:g}" if case.device_share else "")
                if isinstance(found, str):
                    rows.append(f"| {name} | {budget} | {found} | | | | | |")
                    continue
                predicted, outcome = found
                cells: list[str] = []
                for axis in ("host", DEVICE):
                    told, seen = predicted.peak_bytes.get(axis), outcome.peak_bytes.get(axis, 0)
                    cells.append("" if told is None else f"{format_bytes(told)} / {format_bytes(seen)}")
                    if told == 0:
                        unforeseen = max(unforeseen, seen)
                    elif told is not None:
                        peak_errors.setdefault(axis, []).append(seen / told - 1)
                seconds = "unknown"
                if predicted.seconds is not None:
                    time_errors.append(outcome.seconds / predicted.seconds - 1)
                    seconds = f"{predicted.seconds:.2f} / {outcome.seconds:.2f}"
                rows.append(f"| {name} | {budget} | {predicted.words} | {' | '.join(cells)} | {seconds} |")
            for file in folder.iterdir():
                file.unlink()
    print_header("Predicted against observed", "python -m benchmarks.prediction")
    print(f"{len(rows)} pairs. Budgets are shares of the model's weights; figures are predicted / observed.")
    print(f"Beside {DEVICE} the host's peak is without what the process's heap keeps free: its tensors were there.\n")
    print(f"| model | budget: host | plan | host's peak | {DEVICE}'s peak | seconds of a request |")
    print("|---|---|---|---:|---:|---:|")
    print("\n".join(rows))
    print(f"\nSeconds: {_spread(time_errors)}.")
    for axis, errors in peak_errors.items():
        print(f"Peak of {axis}: {_spread(errors)}.")
    print(f"Where nothing was to be held, at most {format_bytes(unforeseen)} were.")


def _spread(errors: list[float]) -> str:
    """How far observed figures are from predicted ones."""
    if not errors:
        return "none"
    off = sorted(map(abs, errors))
    span = f"{min(errors):+.1%} to {max(errors):+.1%}, median {statistics.median(errors):+.1%}"
    off_by = f"{statistics.median(off):.1%} at the median, {off[-1]:.1%} at most"
    return f"observed less predicted {span}; off by {off_by}, in {len(off)} pairs"


if __name__ == "__main__":
    main()

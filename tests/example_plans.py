"""The example plans under plans/examples, and the dry runs of them in the documentation.

`make plans` writes them again; a test compares.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from placewise.benchmarks.checkpoints import video_pipeline
from placewise.models.pipeline import read_pipeline
from placewise.planner.calibrating.given import given_calibration
from placewise.planner.compile import compile_plan
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.codec import plan_to_json
from placewise.plans.document import Plan
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Workload
from placewise.plans.text import print_plan
from placewise.plans.units import GIB
from placewise.policies.presets import load_preset
from rich.console import Console

REPOSITORY = Path(__file__).resolve().parent.parent
PLANS = REPOSITORY / "plans" / "examples"
DRY_RUNS = REPOSITORY / "docs" / "dry-runs"

WORKLOAD = Workload(height=768, width=1344, frames=124, steps=50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One machine for the H3-sized pipeline."""

    name: str
    host_bytes: int
    device: str | None
    device_bytes: int = 0
    link_bytes_per_s: float | None = None


EXAMPLES = (
    Example(
        name="h3-12gib-device-32gib-host",
        host_bytes=32 * GIB,
        device="cuda:0",
        device_bytes=12 * GIB,
        link_bytes_per_s=12e9,
    ),
    Example(
        name="h3-24gib-device-64gib-host",
        host_bytes=64 * GIB,
        device="cuda:0",
        device_bytes=24 * GIB,
        link_bytes_per_s=12e9,
    ),
    Example(
        name="h3-80gib-device-256gib-host",
        host_bytes=256 * GIB,
        device="cuda:0",
        device_bytes=80 * GIB,
        link_bytes_per_s=50e9,
    ),
    Example(name="h3-unified-64gib", host_bytes=64 * GIB, device="mps:0", device_bytes=48 * GIB),
    Example(name="h3-cpu-32gib", host_bytes=32 * GIB, device=None),
    Example(name="h3-4gib-device-refused", host_bytes=32 * GIB, device="cuda:0", device_bytes=4 * GIB),
)
"""Rates are the usual ones of PCIe 3 (12 GB/s) and PCIe 5 (50 GB/s) with 16 lanes; two examples have none."""


def machine_of(example: Example) -> Machine:
    """The machine of an example. Those with a link have a disk of 3 GB/s too, as NVMe drives have."""
    accelerators = (given_accelerator(example.device, example.device_bytes),) if example.device else ()
    rates = None
    if example.link_bytes_per_s is not None:
        rates = given_calibration(
            disk_bytes_per_s=3e9, link_bytes_per_s=example.link_bytes_per_s, device=example.device
        )
    return Machine(host=given_host(example.host_bytes), accelerators=accelerators, calibration=rates)


def example_plans() -> Iterator[tuple[Example, Plan]]:
    """Every example, planned anew on sparse files."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "h3"
        video_pipeline(root)
        pipeline = read_pipeline(root, workload=WORKLOAD)
        for example in EXAMPLES:
            yield example, compile_plan(pipeline, machine_of(example), load_preset("auto"), WORKLOAD, version="0.1.0")


def dry_run(plan: Plan) -> str:
    """What the command line prints for a plan."""
    text = StringIO()
    print_plan(plan, Console(file=text, width=120, highlight=False))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def main() -> None:
    """Write all files again."""
    for folder in (PLANS, DRY_RUNS):
        folder.mkdir(exist_ok=True)
    for example, plan in example_plans():
        (PLANS / f"{example.name}.json").write_text(plan_to_json(plan))
        (DRY_RUNS / f"{example.name}.txt").write_text(dry_run(plan))


if __name__ == "__main__":
    main()

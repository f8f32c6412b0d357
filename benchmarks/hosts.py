"""Planning on paper for 1,000 simulated hosts of eight kinds: with equal figures, and with figures of their own.

    PYTHONPATH=.src .venv/bin/python -m benchmarks.hosts

The pipeline has the sizes of MiniMax-H3, in sparse files whose headers are read once. One process and one thread plan.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from placewise.models.pipeline import read_pipeline
from placewise.planner.calibrating.given import given_calibration
from placewise.planner.hosts import plan_hosts
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Workload
from placewise.plans.units import GIB, MIB
from placewise.policies.presets import load_preset

from .checkpoints import video_pipeline
from .header import print_header

HOSTS = 1_000
KINDS = tuple((host, device) for host in (32, 64, 128, 256) for device in (12, 24))
"""GiB of host and device memory."""


def fleet(spread: Callable[[], int]) -> dict[str, Machine]:
    """Hosts of all kinds in turn, each with so many bytes less than its kind."""
    rates = given_calibration(disk_bytes_per_s=3e9, link_bytes_per_s=12e9, device="cuda:0")
    return {
        f"host-{number:04}": Machine(
            host=given_host(host * GIB - spread()),
            accelerators=(given_accelerator("cuda:0", device * GIB - spread()),),
            calibration=rates,
        )
        for number, (host, device) in enumerate(KINDS[number % len(KINDS)] for number in range(HOSTS))
    }


def main() -> None:
    """Print the report."""
    print_header("Planning for 1,000 hosts", "python -m benchmarks.hosts")
    workload = Workload(height=768, width=1344, frames=124, steps=50)
    drawn = random.Random(0)
    fleets = {
        "equal within a kind": fleet(lambda: 0),
        "each its own, up to 512 MiB less": fleet(lambda: drawn.randrange(512 * MIB)),
    }
    print("| figures | hosts | different facts | s in all | ms per plan that was made |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        video_pipeline(Path(folder))
        pipeline = read_pipeline(Path(folder), workload=workload)
        for name, machines in fleets.items():
            started = time.perf_counter()
            plan_hosts(pipeline, machines, load_preset("auto"), workload, version="0")
            taken, different = time.perf_counter() - started, len(set(machines.values()))
            print(
                f"| {name} | {len(machines):,} | {different:,} | {taken:.2f} | {taken / different * 1e3:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Planning speed, whole process, beside accelerate's `infer_auto_device_map`, in one run.

    PYTHONPATH=.src .venv/bin/python -m benchmarks.planning

Ours is `placewise plan` on a sparse checkpoint, a process of its own: start, imports, headers, plan, text. Accelerate's
is timed inside its process, around the call alone, on a meta model of as many linear layers. A video pipeline of three
components and 128 layers with several fates each is what the program and its solver take longest for.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from placewise.models.pipeline import read_pipeline
from placewise.planner.calibrating.given import given_calibration
from placewise.planner.compile import compile_plan
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Workload
from placewise.plans.units import GIB
from placewise.policies.presets import load_preset

from .checkpoints import mixture_of_experts, video_pipeline, write_sparse
from .header import print_header

FLAT = (1_000, 2_000, 4_000, 8_000, 16_000)
LAYER_BYTES = 256 * 256 * 4
REPEATS = 3

_ACCELERATE = """
import sys, time
import torch
from accelerate import infer_auto_device_map
from torch import nn
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(int(sys.argv[1]))))
half = int(sys.argv[1]) * 256 * 256 * 2
started = time.perf_counter()
infer_auto_device_map(model, max_memory={0: half, "cpu": 4 * half})
print(time.perf_counter() - started)
"""


def ours(path: Path, device_bytes: int, *more: str, host: str = "64GiB") -> float:
    """Seconds of one `placewise plan` from start to end."""
    argv = [sys.executable, "-m", "placewise", "plan", str(path)]
    argv += ["--host-memory", host, "--device-memory", str(device_bytes), *more]
    started = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def accelerates(layers: int) -> float:
    """Seconds of accelerate's call on a flat model."""
    ran = subprocess.run([sys.executable, "-c", _ACCELERATE, str(layers)], check=True, capture_output=True, text=True)
    return float(ran.stdout)


def flat(path: Path, layers: int, *, equal: bool = True) -> None:
    """A checkpoint of a flat stack; of layers that all differ, if they are not to be equal."""
    rows = [256 if equal else 64 + number for number in range(layers)]
    write_sparse(path, [(f"layers.{number}.weight", "F32", (row, 256), row * 1024) for number, row in enumerate(rows)])


def video(folder: Path) -> None:
    """Print a table: the video pipeline on three machines, by the whole process and by the compilation alone."""
    path = folder / "video"
    video_pipeline(path, without="audio_vae")
    workload = Workload(steps=50)
    pipeline = read_pipeline(path, workload=workload)
    print("Three components with 128 layers, 126 GiB:\n")
    print("| device and host, GiB | whole process, s | compilation alone, s | seconds above the bound |")
    print("|---|---|---|---|")
    for device, host, link in ((12, 32, 12), (24, 64, 12), (80, 256, 50)):
        wishes = ("--steps", "50", "--disk", "3GB/s", "--link", f"{link}GB/s")
        machine = Machine(
            host=given_host(host * GIB),
            accelerators=(given_accelerator("cuda:0", device * GIB),),
            calibration=given_calibration(disk_bytes_per_s=3e9, link_bytes_per_s=link * 1e9, device="cuda:0"),
        )
        make = partial(compile_plan, pipeline, machine, load_preset("auto"), workload, version="benchmark")
        plan = make()
        whole: list[float] = []
        alone: list[float] = []
        for _ in range(REPEATS + 2):
            whole.append(ours(path, device * GIB, *wishes, host=f"{host}GiB"))
            started = time.perf_counter()
            make()
            alone.append(time.perf_counter() - started)
        because = plan.decisions[0].because
        seconds, bound = because["microseconds"] or 0, because.get("bound_microseconds") or 0
        above = "proven" if because["proven_optimal"] else f"{seconds / bound - 1:.2%}"
        print(
            f"| {device} + {host} | {statistics.median(whole):.2f} ({min(whole):.2f} to {max(whole):.2f}) "
            f"| {statistics.median(alone):.2f} | {above} |",
            flush=True,
        )


def main() -> None:
    """Print the report."""
    print_header("Planning speed", "python -m benchmarks.planning")
    with tempfile.TemporaryDirectory() as folder:
        experts = Path(folder) / "moe"
        mixture_of_experts(experts)
        taken = [ours(experts, 24 << 30) for _ in range(REPEATS + 2)]
        figures = f"median {statistics.median(taken):.2f} s, least {min(taken):.2f}, most {max(taken):.2f}"
        print(f"100,000 tensors in 163 shards, whole process: {figures}.\n")
        print("| flat layers | placewise, whole process, s | accelerate, the call alone, s |")
        print("|---|---|---|")
        for layers in FLAT:
            path = Path(folder) / f"flat-{layers}.safetensors"
            flat(path, layers)
            # Alternating; accelerate's largest runs once.
            half, times = layers * LAYER_BYTES // 2, 1 if layers > 8_000 else REPEATS
            pairs = [(ours(path, half), accelerates(layers)) for _ in range(times)]
            more = [ours(path, half) for _ in range(REPEATS - times)]
            our_s = statistics.median([pair[0] for pair in pairs] + more)
            print(f"| {layers:,} | {our_s:.2f} | {statistics.median(pair[1] for pair in pairs):.2f} |", flush=True)
        path = Path(folder) / "unequal.safetensors"
        flat(path, 2_000, equal=False)
        unequal = statistics.median(ours(path, 200 << 20) for _ in range(REPEATS))
        print(
            f"\n2,000 layers that all differ (more classes than the exact solution takes; greedy): {unequal:.2f} s.\n"
        )
        video(Path(folder))


if __name__ == "__main__":
    main()

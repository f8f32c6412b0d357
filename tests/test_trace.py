"""Traced activations against real passes, and FLOPs against sums by hand."""

# Torch's own types are partial here, and the libraries have none.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import resource
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placewise.models.tokenwise import run_in_chunks, token_wise
from placewise.planner.compile import compile_plan
from placewise.planner.tracing import trace
from placewise.planner.tracing.trace import trace_component, trace_pipeline
from placewise.plans.codec import plan_from_json, plan_to_json
from placewise.plans.pipeline import (
    Checkpoint,
    Component,
    GivenActivations,
    Pipeline,
    RowFlops,
    StackFlops,
    TracedActivations,
    UnknownActivations,
    Workload,
    known_peak_bytes,
)
from torch import nn

from . import modules
from .questions import component_of
from .real_passes import CASES, LLAMA, TOKENS, WIDE, Case, alive, allocated, component, configured, read_texts, stack

transformers: Any = pytest.importorskip("transformers")
diffusers: Any = pytest.importorskip("diffusers")

MIB = 1 << 20


def known(found: object) -> TracedActivations:
    assert isinstance(found, TracedActivations), found
    return found


def made_for_real(case: Case, folder: Path) -> Any:
    if case.library == "transformers":
        return getattr(transformers, case.class_name)(transformers.AutoConfig.from_pretrained(folder)).eval()
    return getattr(diffusers, case.class_name).from_config(json.loads((folder / "config.json").read_text())).eval()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.class_name)
def test_the_peak_is_that_of_a_real_pass(tmp_path: Path, case: Case) -> None:
    made = configured(tmp_path, case.library, case.class_name, case.config)
    traced = known(trace_component(made, tmp_path, case.workload))
    real = made_for_real(case, tmp_path)
    buffer_bytes = sum(buffer.nbytes for buffer in real.buffers())
    assert traced.peak_bytes == buffer_bytes + alive(real, lambda: case.run(real))
    if not case.scratch:
        assert traced.peak_bytes - buffer_bytes == pytest.approx(allocated(lambda: case.run(real)), rel=0.05)


CHUNKED = [
    Case(
        library="transformers",
        class_name="LlamaForCausalLM",
        config={**LLAMA, "intermediate_size": 1024, "vocab_size": 30, "num_hidden_layers": 1},
        workload=Workload(batch=2, tokens=300),
        run=read_texts(300),
    ),
    Case(
        library="transformers",
        class_name="T5EncoderModel",
        config={"model_type": "t5", "d_model": 64, "d_kv": 8, "d_ff": 4096, "num_layers": 1, "num_heads": 1},
        workload=Workload(batch=2, tokens=200),
        run=read_texts(200),
    ),
    Case(
        library="diffusers",
        class_name="DiTTransformer2DModel",
        config={"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "sample_size": 64},
        workload=Workload(),
        run=lambda model: model(
            torch.zeros(2, 4, 64, 64), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
        ),
        scratch=True,
    ),
]


@pytest.mark.parametrize("case", CHUNKED, ids=lambda case: case.class_name)
def test_the_peak_of_a_chunked_pass_is_that_of_a_real_one(tmp_path: Path, case: Case) -> None:
    traced = known(
        trace_component(configured(tmp_path, case.library, case.class_name, case.config), tmp_path, case.workload)
    )
    assert traced.chunked
    peaks = [each.peak_bytes for each in traced.chunked]
    assert peaks == sorted(set(peaks))
    assert peaks[-1] < traced.peak_bytes
    real = made_for_real(case, tmp_path)
    buffer_bytes = sum(buffer.nbytes for buffer in real.buffers())
    assert traced.peak_bytes == buffer_bytes + alive(real, lambda: case.run(real))
    chunkable = token_wise(real, ())
    for each in traced.chunked:  # The largest last.
        for module in chunkable:
            run_in_chunks(module, each.chunk_tokens)
        assert each.peak_bytes == buffer_bytes + alive(real, lambda: case.run(real))
    if not case.scratch:
        assert peaks[-1] - buffer_bytes == pytest.approx(allocated(lambda: case.run(real)), rel=0.05)


def test_chunks_that_save_nothing_are_not_listed(tmp_path: Path) -> None:
    """The logits are the peak, and no chunk makes them smaller."""
    config = {**LLAMA, "vocab_size": 3000}
    made = configured(tmp_path, "transformers", "LlamaForCausalLM", config)
    assert known(trace_component(made, tmp_path, Workload(batch=2, tokens=300))).chunked == ()


@given(st.integers(0, 1 << 20))
def test_few_sizes_are_tried_and_each_is_below_the_tokens(tokens: int) -> None:
    sizes = trace._chunk_sizes(tokens)  # pyright: ignore[reportPrivateUsage]
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) <= 4
    assert all(128 <= size < tokens and size.bit_count() == 1 for size in sizes)
    assert not sizes or 2 * sizes[0] >= tokens
    assert bool(sizes) == (tokens > 128)


class Linears(nn.Module):
    """A stack of which everything is known. `main_input_name` is what transformers' models have."""

    main_input_name = "pixel_values"
    config = SimpleNamespace(image_size=4, num_channels=3)

    def __init__(self, width: int = 48, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])
        self.head = nn.Linear(width, 7)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values.flatten(1)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


def test_a_stack_of_linears_is_counted_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> nn.Module:
        return modules.on_meta(Linears)

    monkeypatch.setattr(trace, "build_module", build)
    found = trace_component(component("mine", "Linears", stacks=(stack("layers", 5),)), tmp_path, Workload(batch=6))
    layers = 5 * 2 * 6 * 48 * 48
    assert found == TracedActivations(
        peak_bytes=3 * 6 * 48 * 4,  # the input, which the caller holds, and a layer's input and output
        flops=layers + 2 * 6 * 48 * 7,
        layer_flops=(StackFlops(stack="layers", flops=layers),),
        row_flops=(RowFlops(rows=6, flops=layers + 2 * 6 * 48 * 7),),
        moved_bytes=0,
        fresh_bytes=0,
    )


def test_a_llama_is_counted_exactly(tmp_path: Path) -> None:
    made = configured(tmp_path, "transformers", "LlamaForCausalLM", LLAMA)
    made = made.model_copy(update={"stacks": (stack("model.layers", 3),)})
    found = known(trace_component(made, tmp_path, Workload(batch=2, tokens=TOKENS)))
    rows = 2 * TOKENS
    projections = 2 * rows * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    attention = 2 * 2 * 2 * TOKENS * TOKENS * 64
    layers = 3 * (projections + attention)
    assert found.layer_flops == (StackFlops(stack="model.layers", flops=layers),)
    assert found.flops == layers + 2 * rows * 64 * 300
    assert found.row_flops == (RowFlops(rows=rows, flops=3 * projections + 2 * rows * 64 * 300),)
    assert found.later_row_flops == ()
    tokens = known(trace_component(made.model_copy(update={"passes": 9}), tmp_path, Workload(batch=2, tokens=TOKENS)))
    assert sum(each.flops for each in tokens.later_row_flops) == found.row_flops[0].flops // TOKENS
    assert {each.rows for each in tokens.later_row_flops} <= {1, 2}


def test_more_to_do_is_never_less(tmp_path: Path) -> None:
    made = configured(tmp_path, "transformers", "LlamaForCausalLM", LLAMA)
    for shapes in (
        [Workload(batch=batch, tokens=16) for batch in (1, 2, 3)],
        [Workload(tokens=tokens) for tokens in (16, 32, 100)],
    ):
        found = [known(trace_component(made, tmp_path, shape)) for shape in shapes]
        for less, more in pairwise(found):
            assert less.peak_bytes < more.peak_bytes
            assert less.flops < more.flops


def test_half_the_width_is_half_the_bytes(tmp_path: Path) -> None:
    """The dtype of most stored bytes is the one that is computed in."""
    made = configured(tmp_path, "diffusers", "AutoencoderKL", CASES[-1].config)
    full, half = (
        known(trace_component(made.model_copy(update={"dtype_bytes": dtypes}), tmp_path, CASES[-1].workload))
        for dtypes in ({"BF16": 1, "F32": 2}, {"BF16": 2, "F32": 1})
    )
    assert (full.peak_bytes, full.flops) == (2 * half.peak_bytes, half.flops)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (component(None, None), "component 'model' does not say how it is built (library None)"),
        (component("onnx", "Model"), "component 'model' does not say how it is built (library 'onnx')"),
        (component("diffusers", "NoSuchModel"), "AttributeError: module diffusers has no attribute NoSuchModel"),
        (component("diffusers", "Kandinsky3UNet"), "the inputs of Kandinsky3UNet are not known"),
        (
            component("transformers", "BertModel", dtype_bytes={"F8_E4M3": 9, "BF16": 1}),
            "stored as F8_E4M3: the dtype that it computes in is not known",
        ),
        (
            component("transformers", "BertModel"),  # more tokens than it has positions
            "RuntimeError: The expanded size of the tensor (99) must match the existing size (8) at non-singleton "
            "dimension 1.  Target sizes: [1, 99].  Tensor sizes: [1, 8]",
        ),
    ],
)
def test_what_cannot_be_traced_says_why(tmp_path: Path, made: Component, why: str) -> None:
    config = {**WIDE, "model_type": "bert", "intermediate_size": 64, "max_position_embeddings": 8}
    if made.class_name == "Kandinsky3UNet":
        config = {"block_out_channels": [32, 64], "layers_per_block": 1, "groups": 8, "cross_attention_dim": 32}
    configured(tmp_path, "transformers", "BertModel", config)
    assert trace_component(made, tmp_path, Workload(tokens=99)) == UnknownActivations(why=why)


def test_no_configuration_is_unknown(tmp_path: Path) -> None:
    found = trace_component(component("transformers", "BertModel"), tmp_path, Workload())
    assert isinstance(found, UnknownActivations)
    assert found.why


def test_weights_take_no_memory(tmp_path: Path) -> None:
    """Twelve layers of 8.6 GB each in BF16."""
    sizes = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 12, "num_attention_heads": 128}
    made = configured(tmp_path, "transformers", "LlamaForCausalLM", {**LLAMA, **sizes, "num_key_value_heads": 128})
    made = made.model_copy(update={"dtype_bytes": {"BF16": 1}})
    before = max(psutil.Process().memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    found = known(trace_component(made, tmp_path, Workload(tokens=512)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert after - before < 300 * MIB
    weights = 12 * (4 * 16384**2 + 3 * 16384 * 65536)
    assert 2 * weights > 100e9
    assert found.flops > 2 * 512 * weights


def _part(root: Path, name: str, case: Case) -> Component:
    (root / name).mkdir()
    made = configured(root / name, case.library, case.class_name, case.config)
    return made.model_copy(update={"name": name, "checkpoint": Checkpoint(root=name, files=())})


def test_a_pipeline_is_traced_where_nobody_knows(tmp_path: Path) -> None:
    parts = tuple(
        _part(tmp_path, name, case)
        for name, case in (("text_encoder", CASES[0]), ("unet", CASES[4]), ("vae", CASES[-1]))
    )
    given = component_of("given", fixed=1, activations=0)
    yours = component(None, None, name="yours")
    pipeline = Pipeline(name="p", components=(*parts, given, yours), edges=(), notes=("first",))
    told: list[str] = []
    found = trace_pipeline(pipeline, tmp_path, Workload(height=32, width=32), told.append)
    assert told == ["text_encoder", "unet", "vae", "yours"]
    kinds = [part.activations.kind for part in found.components]
    assert kinds == ["traced", "traced", "traced", "given", "unknown"]
    assert found.components[3] == given
    assert found.notes == ("first", "text_encoder: tokens not stated, 512 assumed for its activations")
    # The autoencoder has two blocks, so the denoiser works on latents of half the size.
    alone = known(trace_component(parts[1], tmp_path / "unet", Workload(height=16, width=16)))
    assert found.components[1].activations == alone
    _check_plan(found)


def _check_plan(pipeline: Pipeline) -> None:
    """A plan carries what was traced, counts it, and says what was not."""
    machine, policy = modules.machine(64 * MIB), modules.policy()
    plan = compile_plan(pipeline, machine, policy, Workload(), version="0")
    assert plan_from_json(plan_to_json(plan)) == plan
    peaks = {part.name: known_peak_bytes(part.activations) for part in plan.pipeline.components}
    assert (peaks["given"], peaks["yours"]) == (0, None)
    resting = sum(segment.packed_bytes for placement in plan.placements for segment in placement.segments)
    for phase in plan.phases:
        assert phase.predicted.peak_bytes["host"] == resting + (peaks[phase.component] or 0)
    why = "component 'yours' does not say how it is built (library None)"
    assert f"yours: activations not traced: {why}" in plan.notes


def test_what_was_given_is_not_traced(tmp_path: Path) -> None:
    part = component("transformers", "BertModel", activations=GivenActivations(peak_bytes=3))
    pipeline = Pipeline(name="p", components=(part,), edges=())
    assert trace_pipeline(pipeline, tmp_path, Workload()) == pipeline

"""Packed attention: each sequence by itself, interleaved rows, and chunks that change nothing but what is alive."""

# Torch's own types are partial here, and safetensors'.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placewise.executor.load import load_plan
from placewise.models.pipeline import read_pipeline
from placewise.models.reference.attention import PackedAttention, Rotary, rotary_table, rotated
from placewise.models.reference.components import from_folder, save
from placewise.models.reference.transformer import Packing
from placewise.models.tokenwise import run_in_chunks, token_wise
from placewise.planner.compile import compile_plan
from placewise.planner.tracing.trace import trace_component
from placewise.plans.document import Fits
from placewise.plans.errors import InputError
from placewise.plans.pipeline import GivenActivations, TracedActivations, Workload
from placewise.plans.units import MIB
from safetensors.torch import load_file
from torch.nn import functional as F

from . import modules
from .real_passes import alive

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")

WIDTH, HEADS, DIM = 32, 4, 16
DEVIATION = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest output: some ten roundings."""


def attention(dtype: torch.dtype = torch.float32, seed: int = 0) -> PackedAttention:
    made = modules.build(lambda: PackedAttention(WIDTH, HEADS, DIM), seed).to(dtype)
    assert isinstance(made, PackedAttention)
    return made


def inputs(lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[int], Rotary]:
    count = sum(lengths)
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)).to(dtype)
    return x, [0, *accumulate(lengths)], rotary_table(torch.arange(count).unsqueeze(-1), DIM, 1e4)


def by_hand(module: PackedAttention, x: torch.Tensor, cu_seqlens: list[int], rotary: Rotary) -> torch.Tensor:
    """Three projections out of rows that were put in order, softmax in float64, one sequence after another."""
    rows = torch.split(module.qkv.weight, DIM)
    query, key, value = (F.linear(x, torch.cat(rows[place::3])).view(-1, HEADS, DIM) for place in range(3))
    query, key = rotated(module.query_norm(query), rotary), rotated(module.key_norm(key), rotary)
    attended: list[torch.Tensor] = []
    for start, stop in pairwise(cu_seqlens):
        one, two, three = (each[start:stop].double().transpose(0, 1) for each in (query, key, value))
        scores = (one @ two.mT / DIM**0.5).softmax(-1)
        attended.append((scores @ three).transpose(0, 1).flatten(1))
    return F.linear(torch.cat(attended).to(x.dtype), module.out.weight)


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=4)


@given(LENGTHS)
@settings(max_examples=15)
def test_each_sequence_attends_to_itself_and_rows_are_interleaved(lengths: list[int]) -> None:
    module, (x, cu_seqlens, rotary) = attention(), inputs(lengths)
    torch.testing.assert_close(module(x, cu_seqlens, rotary), by_hand(module, x, cu_seqlens, rotary))


@pytest.mark.parametrize("dtype", DEVIATION)
@given(lengths=LENGTHS, chunk_tokens=st.integers(1, 20))
@settings(max_examples=20)
def test_chunks_change_nothing_but_roundings(dtype: torch.dtype, lengths: list[int], chunk_tokens: int) -> None:
    module, (x, cu_seqlens, rotary) = attention(dtype), inputs(lengths, dtype)
    whole = module(x, cu_seqlens, rotary)
    run_in_chunks(module, chunk_tokens)
    found = module(x, cu_seqlens, rotary)
    assert (found.shape, found.dtype) == (whole.shape, dtype)
    if len(x):
        assert (found - whole).abs().max() <= DEVIATION[dtype] * whole.abs().max()
    if len(x) <= chunk_tokens:
        assert torch.equal(found, whole)


@pytest.mark.parametrize("bounds", [(), (0,), (0, 3), (0, 5), (1, 4), (0, 3, 2, 4), (0, 2, 4, 3)])
def test_bounds_that_are_none_are_refused(bounds: tuple[int, ...]) -> None:
    x, _, rotary = inputs([4])
    with pytest.raises(InputError, match="do not bound 4 packed tokens"):
        attention()(x, bounds, rotary)


def test_it_is_found_beside_token_wise_modules(tmp_path: Path) -> None:
    save(tmp_path, "tiny", seed=0)
    transformer = from_folder("ReferenceTransformer", tmp_path / "transformer")
    layers = [f"blocks.{number}" for number in range(4)]
    names = [type(each).__name__ for each in token_wise(transformer, layers)]
    assert names == ["PackedAttention", "GatedFeedForward"] * 4
    assert token_wise(attention(), ("qkv",)) == ()


def test_the_whole_sequence_is_never_projected_at_once() -> None:
    """Alive are input, table, keys and values, output, and what one chunk has; without chunks all queries too."""
    tokens, chunk_tokens = 4096, 64
    module, given_ = attention(), inputs([1024, 3072])
    peaks: list[int] = []
    for most in (tokens, chunk_tokens):
        run_in_chunks(module, most)
        peaks.append(alive(module, lambda: module(*given_)))
    of_token = 4 * HEADS * DIM
    kept = tokens * (2 * of_token + 2 * 4 * WIDTH + 4 * DIM)
    assert peaks[0] >= 5 * tokens * of_token
    assert 0 < peaks[1] - kept <= 8 * chunk_tokens * of_token


WORKLOAD = Workload(batch=2, tokens=40, height=32, width=32, frames=9, steps=1)
PACKING = Packing(text=(40, 40), video=((5, 8, 8),) * 2, audio=(10, 10))


def transformer_pass(module: Any, device: str = "cpu") -> Any:
    sums = (sum(PACKING.lengths()[place::3]) for place in range(3))
    generator = torch.Generator().manual_seed(0)
    given_ = [
        torch.randn(count, width, generator=generator).to(device) for count, width in zip(sums, (64, 8, 8), strict=True)
    ]
    return module(*given_, torch.full((2,), 0.5, device=device), PACKING)


def test_the_traced_peak_of_each_chunk_size_is_that_of_a_real_pass(tmp_path: Path) -> None:
    save(tmp_path, "tiny", seed=0, dtype=torch.float32)
    folder = tmp_path / "transformer"
    pipeline = read_pipeline(tmp_path, workload=WORKLOAD)
    (component,) = (part for part in pipeline.components if part.name == "transformer")
    traced = trace_component(component, folder, WORKLOAD)
    assert isinstance(traced, TracedActivations), traced
    assert [each.chunk_tokens for each in traced.chunked] == [128, 256, 512]
    real = from_folder("ReferenceTransformer", folder).eval()
    chunkable = token_wise(real, [f"blocks.{number}" for number in range(4)])
    assert traced.peak_bytes == alive(real, lambda: transformer_pass(real))
    for each in traced.chunked:
        for module in chunkable:
            run_in_chunks(module, each.chunk_tokens)
        assert each.peak_bytes == alive(real, lambda: transformer_pass(real))
    # Neither the feed-forward's inner tensors nor the attention's are the peak any more.
    assert traced.chunked[0].peak_bytes < 0.5 * traced.peak_bytes


@pytest.mark.parametrize("device", [None, modules.SIM])
def test_a_plan_that_says_so_runs_in_chunks(tmp_path: Path, device: str | None) -> None:
    """The planner takes chunks where there is no room for the whole sequence."""
    save(tmp_path, "tiny", seed=0, dtype=torch.float32)
    pipeline = read_pipeline(tmp_path, workload=WORKLOAD)
    traced = {"transformer": trace_component(pipeline.components[1], tmp_path / "transformer", WORKLOAD)}
    nothing = GivenActivations(peak_bytes=0)
    components = tuple(
        part.model_copy(update={"activations": traced.get(part.name, nothing)}) for part in pipeline.components
    )
    on = modules.machine(5 * MIB) if device is None else modules.machine(64 * MIB, 4 * MIB)
    plan = compile_plan(
        pipeline.model_copy(update={"components": components}), on, modules.policy(), WORKLOAD, version="0"
    )
    assert isinstance(plan.verdict, Fits), plan.verdict
    (tokens,) = (each.chunk_tokens for each in plan.placements if each.component == "transformer")
    assert tokens is not None
    loaded = load_plan(plan, tmp_path)["transformer"]
    plain = from_folder("ReferenceTransformer", tmp_path / "transformer").eval()
    plain.load_state_dict(load_file(tmp_path / "transformer" / "model.safetensors"))
    whole = transformer_pass(plain)
    for module in token_wise(plain, [f"blocks.{number}" for number in range(4)]):
        run_in_chunks(module, tokens)
    found = transformer_pass(loaded, device or "cpu")
    for one, same, near in zip(found, transformer_pass(plain), whole, strict=True):
        assert torch.equal(one.cpu(), same)
        torch.testing.assert_close(same, near)

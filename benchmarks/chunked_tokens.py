"""Compares the outputs of chunked feed-forwards and packed attention with those of whole ones, in float32 and bfloat16.

    .venv/bin/python -m benchmarks.chunked_tokens

Weights and inputs are seeded normals, the weights scaled so that widths do not matter. Deviations are in shares of the
whole output's largest value. Peaks of the attention are predicted as the tracer does, on tensors without data, and
measured in a real pass on the CPU by torch's allocator, scratch memory of kernels included.
"""

# The libraries have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from placewise.models.reference.attention import PackedAttention, Rotary, rotary_table
from placewise.models.tokenwise import run_in_chunks, token_wise
from placewise.planner.tracing.live_bytes import LiveBytes
from placewise.tests.real_passes import allocated
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .header import print_header

WIDTH, WIDER = 512, 2048
CHUNKS = (1, 64, 128, 512)
TOKENS: dict[str, Sequence[int]] = {
    "0 or 1": (0, 1),
    "512 or 1024": (512, 1024),
    "129, 257 or 1000": (129, 257, 1000),
}
DTYPES = (torch.float32, torch.bfloat16)
HEADS = 8
PACKED = ((0, 1), (100, 0, 29), (512, 512), (129, 257, 1000), (4096,))
MIB = 1 << 20


def gated() -> nn.Module:
    """Llama's: three products without bias."""
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(hidden_size=WIDTH, intermediate_size=WIDER)
    module: nn.Module = import_module("transformers.models.llama.modeling_llama").LlamaMLP(config)
    return module


def plain() -> nn.Module:
    """Diffusers': two products with bias."""
    module: nn.Module = import_module("diffusers.models.attention").FeedForward(
        WIDTH, inner_dim=WIDER, activation_fn="gelu-approximate"
    )
    return module


def fill(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """The module with such weights, in eval mode."""
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    return module.eval().to(dtype)


def outputs(make: Callable[[], nn.Module], dtype: torch.dtype, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a whole forward, and of one for each chunk size."""
    generator = torch.Generator().manual_seed(count)
    module = fill(make(), dtype, generator)
    tokens = torch.randn(1, count, WIDTH, generator=generator).to(dtype)
    whole = module(tokens)
    (chunkable,) = token_wise(module, ())
    chunked: list[torch.Tensor] = []
    for size in CHUNKS:
        run_in_chunks(chunkable, size)
        chunked.append(module(tokens))
    return whole, chunked


def compared(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """How many are equal, and the deviation of the rest, as cells of a table."""
    equal = sum(torch.equal(whole, found) for whole, found in pairs)
    shares = [
        (found.double() - whole.double()).abs() / whole.double().abs().max() for whole, found in pairs if whole.numel()
    ]
    largest, mean = (max(float(of(share)) for share in shares) for of in (torch.max, torch.mean))
    return f"{equal} of {len(pairs)} | {largest:.1e} | {mean:.1e}"


def predicted(dtype: torch.dtype, cu_seqlens: Sequence[int], size: int) -> int:
    """Peak bytes alive, on tensors without data."""
    torch.set_default_dtype(dtype)  # A module without data cannot be cast.
    try:
        with FakeTensorMode():
            module, tokens = PackedAttention(WIDTH, HEADS, WIDTH // HEADS), torch.empty(cu_seqlens[-1], WIDTH)
            rotary = rotary_of(len(tokens))
            run_in_chunks(module, size)
            with LiveBytes([tokens, *rotary, *module.parameters()]) as live:
                module(tokens, cu_seqlens, rotary)
            return int(live.peak)
    finally:
        torch.set_default_dtype(torch.float32)


def rotary_of(count: int) -> Rotary:
    """The table of one sequence."""
    return rotary_table(torch.arange(count).unsqueeze(-1), WIDTH // HEADS, 1e4)


def attend(dtype: torch.dtype, lengths: Sequence[int]) -> None:
    """Print the rows of one packing: the whole forward, and one for each chunk size."""
    generator = torch.Generator().manual_seed(sum(lengths))
    module = PackedAttention(WIDTH, HEADS, WIDTH // HEADS)
    fill(module, dtype, generator)
    for norm in (module.query_norm, module.key_norm):
        norm.weight.fill_(1)
    tokens = torch.randn(sum(lengths), WIDTH, generator=generator).to(dtype)
    cu_seqlens, rotary = [0, *accumulate(lengths)], rotary_of(len(tokens))
    whole = module(tokens, cu_seqlens, rotary)
    for size in (*(size for size in CHUNKS if 1 < size < len(tokens)), len(tokens)):
        run_in_chunks(module, size)
        cells = compared([(whole, module(tokens, cu_seqlens, rotary))])
        measured = allocated(lambda: module(tokens, cu_seqlens, rotary))
        print(
            f"| {' + '.join(map(str, lengths))} | {str(dtype).removeprefix('torch.')} "
            f"| {'whole' if size == len(tokens) else size} | {cells} "
            f"| {predicted(dtype, cu_seqlens, size) / MIB:.2f} | {measured / MIB:.2f} |"
        )


def main() -> None:
    """Print the tables."""
    print_header("Chunked tokens against whole", "python -m benchmarks.chunked_tokens")
    print(f"{torch.get_num_threads()} threads.\n")
    print("| feed-forward | dtype | tokens | chunk | same to the bit | largest deviation | mean deviation |")
    print("|---|---|---|---|---|---|---|")
    for make in (gated, plain):
        for dtype in DTYPES:
            for name, counts in TOKENS.items():
                found = [outputs(make, dtype, count) for count in counts]
                for index, size in enumerate(CHUNKS):
                    cells = compared([(whole, chunked[index]) for whole, chunked in found])
                    print(f"| {make.__name__} | {str(dtype).removeprefix('torch.')} | {name} | {size} | {cells} |")
    print(f"\nPacked attention, {WIDTH} wide, {HEADS} heads; peaks without its inputs, in MiB.\n")
    print("| sequences | dtype | chunk | same to the bit | largest deviation | mean deviation | predicted | measured |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in DTYPES:
        for lengths in PACKED:
            attend(dtype, lengths)


if __name__ == "__main__":
    with torch.no_grad():
        main()

"""Compares the outputs of chunked feed-forwards with those of whole ones, in float32 and bfloat16, on the CPU.

    .venv/bin/python -m benchmarks.chunked_tokens

Weights and inputs are seeded normals, the weights scaled so that widths do not matter. Deviations are in shares of the
whole output's largest value.
"""

# The libraries have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from placewise.models.tokenwise import run_in_chunks, token_wise
from torch import nn

from .header import print_header

WIDTH, WIDER = 512, 2048
CHUNKS = (1, 64, 128, 512)
TOKENS: dict[str, Sequence[int]] = {
    "0 or 1": (0, 1),
    "512 or 1024": (512, 1024),
    "129, 257 or 1000": (129, 257, 1000),
}


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


def outputs(make: Callable[[], nn.Module], dtype: torch.dtype, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a whole forward, and of one for each chunk size."""
    generator = torch.Generator().manual_seed(count)
    module = make().eval()
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    module.to(dtype)
    tokens = torch.randn(1, count, WIDTH, generator=generator).to(dtype)
    whole = module(tokens)
    (chunkable,) = token_wise(module, ())
    chunked: list[torch.Tensor] = []
    for size in CHUNKS:
        run_in_chunks(chunkable, size)
        chunked.append(module(tokens))
    return whole, chunked


def main() -> None:
    """Print the table."""
    print_header("Chunked tokens against whole", "python -m benchmarks.chunked_tokens")
    print(f"{torch.get_num_threads()} threads.\n")
    print("| feed-forward | dtype | tokens | chunk | same to the bit | largest deviation | mean deviation |")
    print("|---|---|---|---|---|---|---|")
    for make in (gated, plain):
        for dtype in (torch.float32, torch.bfloat16):
            for name, counts in TOKENS.items():
                compared = [outputs(make, dtype, count) for count in counts]
                for index, size in enumerate(CHUNKS):
                    pairs = [(whole.double(), chunked[index].double()) for whole, chunked in compared]
                    equal = sum(torch.equal(whole, found) for whole, found in pairs)
                    shares = [(found - whole).abs() / whole.abs().max() for whole, found in pairs if len(whole[0])]
                    largest, mean = (max(float(of(share)) for share in shares) for of in (torch.max, torch.mean))
                    print(
                        f"| {make.__name__} | {str(dtype).removeprefix('torch.')} | {name} | {size} "
                        f"| {equal} of {len(pairs)} | {largest:.1e} | {mean:.1e} |"
                    )


if __name__ == "__main__":
    with torch.no_grad():
        main()

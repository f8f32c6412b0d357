"""The streaming benchmark's model: of the Llama class, with random weights, and never whole in memory."""

# Torch's own types are partial here, and so are transformers'.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
from placewise.models.build import parameters_on_meta
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 8192
_TENSORS_PER_SHARD = 36  # Four layers, 512 MiB.


def write_model(folder: Path, layers: int) -> None:
    """Save it as sharded safetensors, the same for the same release of torch; a folder that has it already is kept.

    With 32 layers it is 4.06 GiB of bfloat16. The configuration comes last, so that a folder with one is whole.

    Raises:
        SystemExit: the folder has a model of another number of layers.
    """
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=16,
        num_hidden_layers=layers,
        tie_word_embeddings=False,
        vocab_size=WORDS,
    )
    if (folder / "config.json").is_file():
        found = LlamaConfig.from_pretrained(folder).num_hidden_layers
        if found != layers:
            raise SystemExit(f"{folder} has a model of {found} layers; give another --model, or remove it")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with parameters_on_meta():
        model = LlamaForCausalLM(config)
    weight_map: dict[str, str] = {}
    weights = _weights(model)
    for number in count():
        if not (shard := dict(islice(weights, _TENSORS_PER_SHARD))):
            break
        file = f"model-{number:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(folder)


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of small random numbers, and norms of ones, one at a time."""
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        weight = torch.ones(parameter.shape, dtype=torch.bfloat16)
        yield name, weight if weight.dim() == 1 else weight.normal_(0, 0.02, generator=random)

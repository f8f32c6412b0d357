"""Models of the libraries' classes with seeded random weights, and the inputs of a request."""

# The libraries' modules and configurations carry no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from placewise.plans.pipeline import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model: how it is built, what a request asks, its passes, and the inputs of one pass."""

    build: Callable[[], Any]
    workload: Workload
    passes: int
    inputs: Callable[[], dict[str, torch.Tensor]]


def _tokens(count: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(count)[None] % 100, "attention_mask": torch.ones(1, count, dtype=torch.int64)}


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(num_hidden_layers=24, hidden_size=1024, intermediate_size=4096, num_attention_heads=16))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        num_hidden_layers=24, hidden_size=1536, intermediate_size=6144, num_attention_heads=12, vocab_size=8000
    )
    model: Any = LlamaModel(config)
    return model.to(torch.bfloat16)


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(num_layers=24, d_model=1024, d_ff=4096, num_heads=16, vocab_size=8000))


def _dit() -> Any:
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    make: Any = DiTTransformer2DModel
    return make(num_attention_heads=16, attention_head_dim=64, num_layers=20, sample_size=32)


MODELS = {
    "bert": Model(build=_bert, workload=Workload(tokens=128), passes=3, inputs=lambda: _tokens(128)),
    "llama": Model(build=_llama, workload=Workload(tokens=64), passes=4, inputs=lambda: _tokens(64)),
    "t5": Model(build=_t5, workload=Workload(tokens=256), passes=2, inputs=lambda: _tokens(256)),
    "dit": Model(
        build=_dit,
        workload=Workload(height=256, width=256),
        passes=4,
        inputs=lambda: {
            "hidden_states": torch.zeros(2, 4, 32, 32),
            "timestep": torch.ones(2, dtype=torch.int64),
            "class_labels": torch.ones(2, dtype=torch.int64),
        },
    ),
}


def write_model(name: str, folder: Path) -> int:
    """Save a model as its library does; the bytes of its weights."""
    torch.manual_seed(0)
    model = MODELS[name].build()
    model.save_pretrained(folder)
    return sum(weight.nbytes for weight in model.parameters())

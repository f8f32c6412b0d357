"""Small models of the libraries, each with a real pass by hand, and two ways to see what that pass takes."""

# Torch's own types are partial here, and the libraries have none.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from placewise.plans.pipeline import Checkpoint, Component, LayerSize, Stack, UnknownActivations, Workload
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = 48


def component(library: str | None, class_name: str | None, **changes: object) -> Component:
    """A component of which only the configuration exists."""
    made = Component(
        name="model",
        library=library,
        class_name=class_name,
        checkpoint=Checkpoint(root=".", files=()),
        tensors=1,
        dtype_bytes={"F32": 1},
        stacks=(),
        fixed_bytes=1,
        fixed_packed_bytes=64,
        passes=1,
        activations=UnknownActivations(),
    )
    return made.model_copy(update=changes)


def stack(name: str, layers: int) -> Stack:
    return Stack(
        name=name, layers=layers, extents=1, sizes=(LayerSize(layers=(0, layers), layer_bytes=1, packed_bytes=64),)
    )


def configured(folder: Path, library: str, class_name: str, config: Mapping[str, object]) -> Component:
    """Write a configuration, and the component that it describes."""
    own = {"_class_name": class_name} if library == "diffusers" else {"architectures": [class_name]}
    (folder / "config.json").write_text(json.dumps({**own, **config}))
    return component(library, class_name)


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Real storages alive, by their ends; those of the module are not counted."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = {tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage.data_ptr() not in self.own | self.sizes.keys() and storage.nbytes():
                    self.sizes[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage.data_ptr())
        self.peak = max(self.peak, sum(self.sizes.values()))
        return results


def alive(module: nn.Module, run: Callable[[], object]) -> int:
    """Peak bytes of real storages in a real pass."""
    seen = Alive(module)
    with torch.no_grad(), seen:
        run()
    return seen.peak


def allocated(run: Callable[[], object]) -> int:
    """Peak bytes of the allocator in a real pass: the scratch memory of kernels too."""
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        run()
    results: Any = profiler.profiler
    events: list[tuple[int, int]] = [
        (e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]"
    ]
    total = 0
    peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        total += size
        peak = max(peak, total)
    return peak


TEXTS = Workload(batch=2, tokens=TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small model, and by hand the real pass that is to be traced."""

    library: str
    class_name: str
    config: Mapping[str, object]
    run: Callable[[Any], object]
    workload: Workload = TEXTS
    scratch: bool = False
    """Its kernels take scratch memory beyond 5 %, so that the allocator is no witness."""


def padded(batch: int, tokens: int) -> torch.Tensor:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    mask[0, 0] = 0
    return mask


def read_texts(tokens: int = TOKENS) -> Callable[[Any], object]:
    return lambda model: model(input_ids=torch.ones(2, tokens, dtype=torch.int64), attention_mask=padded(2, tokens))


WIDE: dict[str, object] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}
UNET: dict[str, object] = {
    "sample_size": 16,
    "block_out_channels": [16, 32],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "attention_head_dim": 8,
}
LLAMA = {**WIDE, "model_type": "llama", "intermediate_size": 128, "num_key_value_heads": 2}
CASES = [
    Case(
        library="transformers",
        class_name="BertModel",
        config={**WIDE, "model_type": "bert", "intermediate_size": 256},
        run=read_texts(),
    ),
    Case(library="transformers", class_name="LlamaForCausalLM", config=LLAMA, run=read_texts()),
    Case(
        library="transformers",
        class_name="T5EncoderModel",
        config={"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
        run=read_texts(),
    ),
    Case(
        library="transformers",
        class_name="CLIPTextModel",
        config={**WIDE, "model_type": "clip_text_model", "intermediate_size": 128, "eos_token_id": 1},
        run=read_texts(77),
    ),
    Case(
        library="diffusers",
        class_name="UNet2DModel",
        config={
            **UNET,
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        },
        workload=Workload(batch=3, height=32, width=16),
        run=lambda model: model(torch.zeros(3, 3, 32, 16), torch.ones(3, dtype=torch.int64)),
        scratch=True,
    ),
    Case(
        library="diffusers",
        class_name="UNet2DConditionModel",
        config={
            **UNET,
            "cross_attention_dim": 32,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        },
        workload=Workload(height=128, width=256),
        run=lambda model: model(torch.zeros(2, 4, 16, 32), torch.ones(2, dtype=torch.int64), torch.zeros(2, 77, 32)),
        scratch=True,
    ),
    Case(
        library="diffusers",
        class_name="DiTTransformer2DModel",
        config={"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 16},
        workload=Workload(),
        run=lambda model: model(
            torch.zeros(2, 4, 16, 16), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
        ),
    ),
    Case(
        library="diffusers",
        class_name="FluxTransformer2DModel",
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "in_channels": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 24,
            "axes_dims_rope": [4, 4, 8],
        },
        workload=Workload(tokens=TOKENS, height=128, width=256),
        run=lambda model: model(
            hidden_states=torch.zeros(1, 8 * 16, 16),
            encoder_hidden_states=torch.zeros(1, TOKENS, 32),
            pooled_projections=torch.zeros(1, 24),
            timestep=torch.zeros(1),
            img_ids=torch.zeros(8 * 16, 3),
            txt_ids=torch.zeros(TOKENS, 3),
        ),
    ),
    Case(
        library="diffusers",
        class_name="AutoencoderKL",
        config={
            "block_out_channels": [8, 16],
            "norm_num_groups": 4,
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
        },
        workload=Workload(height=64, width=32),
        run=lambda model: model.decode(torch.zeros(1, 4, 32, 16)),
        scratch=True,
    ),
]

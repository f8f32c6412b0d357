"""Checkpoints as transformers and diffusers themselves save them, weighed by us and read by safetensors."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from placewise.models.checkpoint import read_checkpoint
from placewise.models.pipeline import read_pipeline
from placewise.plans.pipeline import Component, Workload

from .safetensors_says import ours, tensor_bytes, theirs

LAYERS = 3


def agrees(folder: Path, component: Component, state: dict[str, torch.Tensor]) -> None:
    """Ours, theirs and the module that was saved say the same of each tensor: dtype, shape, bytes."""
    found: Counter[str] = Counter()
    for file in component.checkpoint.files:
        path = folder / component.checkpoint.root / file.path
        says = theirs(path)
        assert ours(path) == says
        for name, stored in says.items():
            found[name] += 1
            assert (stored.shape, stored.data) == (tuple(state[name].shape), tensor_bytes(state[name]))
    assert found == dict.fromkeys(state, 1)
    assert component.tensors == len(state)
    assert sum(component.dtype_bytes.values()) == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_a_bert_of_transformers(tmp_path: Path, max_shard_size: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    model: torch.nn.Module = transformers.BertModel(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=max_shard_size)  # type: ignore[operator]
    (component,) = read_pipeline(tmp_path, workload=Workload()).components
    agrees(tmp_path, component, model.state_dict())
    assert (len(component.checkpoint.files) > 1) == (max_shard_size == "10KB")
    assert (component.library, component.class_name) == ("transformers", "BertModel")
    (stack,) = component.stacks
    (run,) = stack.sizes
    assert (stack.name, stack.layers, run.layers) == ("encoder.layer", LAYERS, (0, LAYERS))
    layers = model.get_submodule("encoder.layer").state_dict()
    assert run.layer_bytes * LAYERS == sum(tensor.nbytes for tensor in layers.values())


def test_tied_weights_are_stored_and_counted_once(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=8, n_layer=2, n_head=2, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    (component,) = read_pipeline(tmp_path, workload=Workload(tokens=5)).components
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    agrees(tmp_path, component, state)
    assert component.passes == 5
    assert [(stack.name, stack.layers) for stack in component.stacks] == [("transformer.h", 2)]


def test_shared_tensors_of_save_model(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    shared = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleDict({"a": shared, "b": shared, "c": torch.nn.Linear(4, 4)})
    save_model(model, str(tmp_path / "model.safetensors"))
    facts = read_checkpoint(tmp_path)
    assert sorted(facts.tensors) == ["a.bias", "a.weight", "c.bias", "c.weight"]
    assert facts.aliases == {"b.bias": "a.bias", "b.weight": "a.weight"}


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet: torch.nn.Module = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    pipeline = read_pipeline(tmp_path, workload=Workload(steps=7))
    (component,) = pipeline.components
    agrees(tmp_path, component, unet.state_dict())
    assert (component.library, component.class_name, component.passes) == ("diffusers", "UNet2DModel", 7)
    assert pipeline.notes == ("without weights, so not placed: scheduler",)
    for stack in component.stacks:
        for run in stack.sizes:
            for number in range(*run.layers):
                layer = unet.get_submodule(f"{stack.name}.{number}").state_dict()
                assert run.layer_bytes == sum(tensor.nbytes for tensor in layer.values())
    assert {"down_blocks", "up_blocks"} <= {stack.name for stack in component.stacks}

"""Real model classes, tiny and with seeded weights, give on the simulated device the CPU's bits."""

# The cases are tables of lambdas over tensors:
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from placewise.executor.simulation.accelerator import SimulatedDevice, simulated_device

diffusers: Any = pytest.importorskip("diffusers")
transformers: Any = pytest.importorskip("transformers")

SIM = "sim:5"
Mode = Callable[[], AbstractContextManager[object]]
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99}
IDS = torch.arange(24).reshape(2, 12)
PADDING = torch.tensor([[1] * 8 + [0] * 4, [1] * 12])


@pytest.fixture(scope="module")
def device() -> Iterator[SimulatedDevice]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield simulated_device(5, capacity_bytes=64 << 20)
    torch.set_num_threads(before)


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**TEXT))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=2))


def t5() -> Any:
    return transformers.T5EncoderModel(
        transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=99)
    )


def unet() -> Any:
    return diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def vae() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def read(model: Any, d: str) -> torch.Tensor:
    return cast(torch.Tensor, model(IDS.to(d), attention_mask=PADDING.to(d))[0])


def run_flux(model: Any, d: str) -> torch.Tensor:
    result = model(
        hidden_states=torch.linspace(0, 1, 64, device=d, dtype=model.dtype).view(1, 16, 4),
        encoder_hidden_states=torch.ones(1, 5, 32, device=d, dtype=model.dtype),
        pooled_projections=torch.ones(1, 32, device=d, dtype=model.dtype),
        timestep=torch.tensor([0.5], device=d, dtype=model.dtype),
        img_ids=torch.zeros(16, 3, device=d),
        txt_ids=torch.zeros(5, 3, device=d),
    )
    return cast(torch.Tensor, result[0])


def image(d: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 768).view(1, 3, 16, 16).to(d)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any, str], torch.Tensor]]] = {
    "bert": (bert, read),
    "llama": (llama, read),
    "llama, generating": (
        llama,
        lambda model, d: model.generate(IDS[:1].to(d), max_new_tokens=4, do_sample=False, pad_token_id=0),
    ),
    "t5 encoder": (t5, lambda model, d: model(IDS.to(d))[0]),
    "unet": (unet, lambda model, d: model(image(d), 10).sample),
    "vae": (vae, lambda model, d: model.decode(model.encode(image(d)).latent_dist.mode()).sample),
    "flux": (flux, run_flux),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bert", "llama", "t5 encoder", "flux"])
def test_transformers(name: str, dtype: torch.dtype, mode: Mode, device: SimulatedDevice) -> None:
    check(name, dtype, mode, device)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["llama, generating", "unet", "vae"])
def test_others(name: str, mode: Mode, device: SimulatedDevice) -> None:
    check(name, torch.float32, mode, device)


def check(name: str, dtype: torch.dtype, mode: Mode, device: SimulatedDevice) -> None:
    make, run = MODELS[name]
    torch.manual_seed(0)
    here = make().eval().to(dtype)
    there = copy.deepcopy(here).to(SIM)
    assert there.device == torch.device(SIM)
    weights = device.allocated_bytes
    device.reset_peak()
    with mode():
        simulated, plain = run(there, SIM), run(here, "cpu")
    assert simulated.device == torch.device(SIM)
    assert torch.equal(simulated.cpu(), plain)
    assert device.peak_bytes > weights >= sum(p.nbytes for p in here.parameters())

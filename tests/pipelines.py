"""Tiny models and pipelines of transformers and diffusers, from configurations, with seeded weights."""

# The libraries have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import string
from pathlib import Path
from typing import Any

import pytest
import torch

diffusers: Any = pytest.importorskip("diffusers")
transformers: Any = pytest.importorskip("transformers")

WORDS = 40
SPECIAL = {"bos_token_id": 1, "eos_token_id": 39, "pad_token_id": 0}


def llama() -> Any:
    """Two streamable layers, with grouped keys; embedding and head tied."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=WORDS,
        tie_word_embeddings=True,
        **SPECIAL,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    """An encoder and a decoder, which share their embedding, and a head of its own."""
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0, **SPECIAL
    )
    return transformers.T5ForConditionalGeneration(config)


def clip_text() -> Any:
    """A text encoder with three layers."""
    config = transformers.CLIPTextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=3,
        vocab_size=WORDS,
        max_position_embeddings=16,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.CLIPTextModel(config)


def clip() -> Any:
    """Text and images, with a method for each."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = {**vision, "vocab_size": WORDS, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**vision, "image_size": 16, "patch_size": 8}, projection_dim=16
    )
    return transformers.CLIPModel(config)


def vae() -> Any:
    """Images of four times as many pixels as latents; its methods are `encode` and `decode`."""
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=16,
    )


def stable_diffusion(folder: Path) -> Path:
    """A pipeline of text encoder, UNet and autoencoder, with tokenizer and scheduler, as diffusers saves it."""
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 32),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    diffusers.StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip_text(),
        tokenizer=tokenizer(),
        unet=unet,
        scheduler=diffusers.PNDMScheduler(steps_offset=1, skip_prk_steps=True),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def diffusion_transformer(folder: Path) -> Path:
    """A pipeline of a DiT with three blocks and an autoencoder, which is told classes by number."""
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        norm_num_groups=8,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    diffusers.DiTPipeline(
        transformer=transformer, vae=vae(), scheduler=diffusers.DDIMScheduler(), id2label={0: "cat"}
    ).save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """Letters, and the tokens that begin and end a text."""
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in "abcdefghij")]
    vocabulary = {word: number for number, word in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)


def saved(model: Any, folder: Path) -> Path:
    """A folder with one model."""
    model.save_pretrained(folder)
    return folder


def seeded(make: Any, *args: Any) -> Any:
    """What `make` gives, with weights that are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = make(*args)
    return made.eval() if isinstance(made, torch.nn.Module) else made

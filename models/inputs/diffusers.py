"""Inputs of diffusers' denoisers and autoencoders, by class; what is not stated is as their own pipelines have it."""

import inspect

from .ask import Ask, Maker

PACKED = 2
"""Flux and its like fold squares of 2 x 2 latents into one token."""


def _unet(ask: Ask) -> dict[str, object]:
    """Without an autoencoder in its pipeline it works on pixels."""
    scale = 1 if ask.latents is None else ask.spatial
    arguments: dict[str, object] = {
        "sample": ask.floats(ask.batch, ask.config.in_channels, *_square(ask, scale)),
        "timestep": ask.ints(ask.batch),
    }
    if ask.config.class_embed_type is not None or ask.config.num_class_embeds is not None:
        arguments["class_labels"] = ask.ints(ask.batch)
    return arguments


def _unet_with_text(ask: Ask) -> dict[str, object]:
    config, batch = ask.config, ask.guided()
    text_width: int = config.encoder_hid_dim or config.cross_attention_dim
    arguments: dict[str, object] = {
        "sample": ask.floats(batch, config.in_channels, *_square(ask, ask.spatial)),
        "timestep": ask.ints(batch),
        "encoder_hidden_states": ask.floats(batch, ask.tokens(77), text_width),
    }
    if config.addition_embed_type == "text_time":
        ids = 6
        text = config.projection_class_embeddings_input_dim - ids * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": ask.floats(batch, text),
            "time_ids": ask.floats(batch, ids),
        }
    return arguments


def _dit(ask: Ask) -> dict[str, object]:
    batch = ask.guided()
    latents = ask.floats(batch, ask.config.in_channels, *_square(ask, ask.spatial))
    return {"hidden_states": latents, "timestep": ask.ints(batch), "class_labels": ask.ints(batch)}


def _pixart(ask: Ask) -> dict[str, object]:
    config, batch = ask.config, ask.guided()
    tokens = ask.tokens(300)
    more = ask.module.use_additional_conditions
    return {
        "hidden_states": ask.floats(batch, config.in_channels, *_square(ask, ask.spatial)),
        "encoder_hidden_states": ask.floats(batch, tokens, config.caption_channels or config.cross_attention_dim),
        "encoder_attention_mask": ask.ints(batch, tokens),
        "timestep": ask.ints(batch),
        "added_cond_kwargs": {
            "resolution": ask.floats(batch, 2) if more else None,
            "aspect_ratio": ask.floats(batch, 1) if more else None,
        },
    }


def _sd3(ask: Ask) -> dict[str, object]:
    """CLIP's 77 tokens stand before those of T5."""
    config, batch = ask.config, ask.guided()
    return {
        "hidden_states": ask.floats(batch, config.in_channels, *_square(ask, ask.spatial)),
        "encoder_hidden_states": ask.floats(batch, 77 + ask.tokens(256), config.joint_attention_dim),
        "pooled_projections": ask.floats(batch, config.pooled_projection_dim),
        "timestep": ask.ints(batch),
    }


def _flux(ask: Ask) -> dict[str, object]:
    config, tokens = ask.config, ask.tokens(512)
    height, width = ask.size(1024, 1024, ask.spatial * PACKED)
    arguments: dict[str, object] = {
        "hidden_states": ask.floats(ask.batch, height * width, config.in_channels),
        "encoder_hidden_states": ask.floats(ask.batch, tokens, config.joint_attention_dim),
        "pooled_projections": ask.floats(ask.batch, config.pooled_projection_dim),
        "timestep": ask.floats(ask.batch),
        "img_ids": ask.floats(height * width, 3),
        "txt_ids": ask.floats(tokens, 3),
    }
    if config.guidance_embeds:
        arguments["guidance"] = ask.floats(ask.batch)
    return arguments


def _wan(ask: Ask) -> dict[str, object]:
    """Its pipelines compute the guided and the unguided half one after the other."""
    config = ask.config
    return {
        "hidden_states": ask.floats(ask.batch, config.in_channels, ask.frames(81), *ask.size(480, 832)),
        "timestep": ask.ints(ask.batch),
        "encoder_hidden_states": ask.floats(ask.batch, ask.tokens(512), config.text_dim),
    }


def _square(ask: Ask, scale: int) -> tuple[int, int]:
    """The size that a denoiser's configuration names, in latents, where the workload states none."""
    named = ask.config.sample_size
    height, width = (named, named) if isinstance(named, int | None) else named
    return ask.size((height or 64) * scale, (width or 64) * scale, scale)


def _decode_image(ask: Ask) -> dict[str, object]:
    side: int = getattr(ask.config, "sample_size", None) or 512
    latents = ask.floats(ask.batch, ask.config.latent_channels, *ask.size(side, side))
    (name,) = (name for name in ("z", "x", "h") if name in inspect.signature(ask.module.decode).parameters)
    return {name: latents}


def _decode_video(ask: Ask) -> dict[str, object]:
    return {"z": ask.floats(ask.batch, ask.config.z_dim, ask.frames(81), *ask.size(480, 832))}


DENOISERS: dict[str, Maker] = {
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _unet_with_text,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "WanTransformer3DModel": _wan,
}
"""By class: what is called is the module itself."""

DECODERS: dict[str, Maker] = {
    "AutoencoderKL": _decode_image,
    "AutoencoderTiny": _decode_image,
    "VQModel": _decode_image,
    "AutoencoderKLWan": _decode_video,
}
"""By class: what is called is `decode`, for that is what a request needs an autoencoder for."""

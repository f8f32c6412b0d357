"""Inputs of the reference pipeline's components, by class; what is not stated is as for diffusers' Wan.

What a latent stands for, each configuration says itself.
"""

from math import prod

from ..reference.transformer import Packing
from .ask import Ask, Latents, Maker


def _text(ask: Ask) -> dict[str, object]:
    ask.assumed.append("traced with text alone")
    return {"input_ids": ask.ints(ask.batch, ask.tokens(512))}


def _transformer(ask: Ask) -> dict[str, object]:
    """Each request of the batch is one packed sequence."""
    config, batch = ask.config, ask.batch
    ask.latents = Latents(spatial=config.pixels_per_latent, temporal=config.frames_per_latent)
    grid = (ask.frames(81), *ask.size(480, 832))
    text, audio = ask.tokens(512), grid[0] * config.audio_per_latent
    return {
        "text": ask.floats(batch * text, config.text_size),
        "video": ask.floats(batch * prod(grid), config.video_channels),
        "audio": ask.floats(batch * audio, config.audio_channels),
        "times": ask.floats(batch).float(),
        "packing": Packing(text=(text,) * batch, video=(grid,) * batch, audio=(audio,) * batch),
    }


def _video(ask: Ask) -> dict[str, object]:
    config = ask.config
    ask.latents = Latents(spatial=2 ** len(config.block_channels), temporal=2**config.time_doublings)
    return {"latents": ask.floats(ask.batch, config.latent_channels, ask.frames(81), *ask.size(480, 832))}


def _audio(ask: Ask) -> dict[str, object]:
    config = ask.config
    ask.latents = Latents(spatial=1, temporal=config.frames_per_latent)
    return {"latents": ask.floats(ask.batch, config.latent_channels, ask.frames(81) * config.audio_per_latent)}


REFERENCE: dict[str, Maker] = {
    "ReferenceTextEncoder": _text,
    "ReferenceTransformer": _transformer,
    "ReferenceVideoDecoder": _video,
    "ReferenceAudioDecoder": _audio,
}
"""By class: what is called is the module itself."""

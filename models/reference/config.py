"""Configurations of the reference pipeline's components, and the named sizes. No torch."""

from collections.abc import Mapping

from pydantic import NonNegativeInt, PositiveInt

from ...plans.record import Record


class VisionConfig(Record):
    """A vision tower over patches of `patch_size` values, of which squares of `merge_size` become one token."""

    patch_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    merge_size: PositiveInt = 2


class TextEncoderConfig(Record):
    """A causal language model without its head; tokens `image_token_id` stand for what the vision tower gives."""

    vocab_size: PositiveInt
    image_token_id: NonNegativeInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    rope_theta: float = 5e6
    vision: VisionConfig


class TransformerConfig(Record):
    """A diffusion transformer over packed sequences of text, video latents and audio latents.

    A video latent stands for `pixels_per_latent` squared pixels of `frames_per_latent` frames, the first for one frame
    alone; `audio_per_latent` audio latents go with each frame of latents.
    """

    text_size: PositiveInt
    video_channels: PositiveInt
    audio_channels: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    frequency_size: PositiveInt = 256
    rope_theta: float = 1e4
    pixels_per_latent: PositiveInt
    frames_per_latent: PositiveInt
    audio_per_latent: PositiveInt


class VideoDecoderConfig(Record):
    """Blocks of 3-d convolutions, that double height and width each, and the first `time_doublings` the frames too."""

    latent_channels: PositiveInt
    block_channels: tuple[PositiveInt, ...]
    time_doublings: NonNegativeInt


class AudioDecoderConfig(Record):
    """Blocks of 1-d convolutions, each of which lengthens the signal by its even stride.

    `frames_per_latent` and `audio_per_latent` are as the transformer's.
    """

    latent_channels: PositiveInt
    out_channels: PositiveInt = 2
    block_channels: tuple[PositiveInt, ...]
    strides: tuple[PositiveInt, ...]
    frames_per_latent: PositiveInt
    audio_per_latent: PositiveInt


Config = TextEncoderConfig | TransformerConfig | VideoDecoderConfig | AudioDecoderConfig

SIZES: Mapping[str, Mapping[str, Config]] = {
    "tiny": {
        "text_encoder": TextEncoderConfig(
            vocab_size=96,
            image_token_id=95,
            hidden_size=64,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=128,
            vision=VisionConfig(patch_size=48, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64),
        ),
        "transformer": TransformerConfig(
            text_size=64,
            video_channels=8,
            audio_channels=8,
            hidden_size=64,
            num_layers=4,
            num_heads=4,
            head_dim=16,
            intermediate_size=256,
            frequency_size=32,
            pixels_per_latent=4,
            frames_per_latent=2,
            audio_per_latent=2,
        ),
        "video_vae": VideoDecoderConfig(latent_channels=8, block_channels=(32, 16), time_doublings=1),
        "audio_vae": AudioDecoderConfig(
            latent_channels=8, block_channels=(32, 16), strides=(4, 2), frames_per_latent=2, audio_per_latent=2
        ),
    },
    "small": {
        "text_encoder": TextEncoderConfig(
            vocab_size=8192,
            image_token_id=8191,
            hidden_size=512,
            num_layers=12,
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            intermediate_size=2048,
            vision=VisionConfig(patch_size=768, hidden_size=256, num_layers=4, num_heads=4, intermediate_size=1024),
        ),
        "transformer": TransformerConfig(
            text_size=512,
            video_channels=16,
            audio_channels=32,
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            head_dim=64,
            intermediate_size=3072,
            pixels_per_latent=8,
            frames_per_latent=4,
            audio_per_latent=4,
        ),
        "video_vae": VideoDecoderConfig(latent_channels=16, block_channels=(256, 128, 64), time_doublings=2),
        "audio_vae": AudioDecoderConfig(
            latent_channels=32,
            block_channels=(256, 128, 64),
            strides=(8, 8, 4),
            frames_per_latent=4,
            audio_per_latent=4,
        ),
    },
    "full": {
        "text_encoder": TextEncoderConfig(
            vocab_size=151936,
            image_token_id=151655,
            hidden_size=5120,
            num_layers=64,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=26496,
            vision=VisionConfig(patch_size=1536, hidden_size=1152, num_layers=27, num_heads=16, intermediate_size=4304),
        ),
        "transformer": TransformerConfig(
            text_size=5120,
            video_channels=48,
            audio_channels=64,
            hidden_size=5760,
            num_layers=60,
            num_heads=45,
            head_dim=128,
            intermediate_size=24064,
            pixels_per_latent=16,
            frames_per_latent=4,
            audio_per_latent=8,
        ),
        "video_vae": VideoDecoderConfig(latent_channels=48, block_channels=(1536, 1024, 512, 256), time_doublings=2),
        "audio_vae": AudioDecoderConfig(
            latent_channels=64,
            block_channels=(2048, 1024, 512, 256),
            strides=(8, 8, 4, 4),
            frames_per_latent=4,
            audio_per_latent=8,
        ),
    },
}
"""By name and component. `full` has the published weights of MiniMax-H3's text encoder (62.13 GiB) and transformer
(61.73 GiB) within 1 %; how these divide into layers, and both decoders, are assumptions of the usual order."""

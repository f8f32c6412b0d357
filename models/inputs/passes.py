"""What one pass is called with, at a workload's shapes.

Torch is imported with this module.
"""

# The libraries' modules and configurations carry no types.
# pyright: reportUnknownMemberType=false

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import nn

from ...plans.errors import InputError
from ...plans.pipeline import Component, Workload
from .ask import Ask, Latents, Maker
from .diffusers import DECODERS, DENOISERS
from .reference import REFERENCE

ASSUMED_TOKENS = 512
"""Tokens of a text where the workload states none, and the model has room for them."""


class _AutoencoderConfig(msgspec.Struct):
    block_out_channels: list[int] | None = None
    decoder_block_out_channels: list[int] | None = None
    scale_factor_spatial: int | None = None
    scale_factor_temporal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a component: what is called, the arguments by name, and what was assumed for them."""

    call: Callable[..., object]
    arguments: dict[str, object]
    assumed: tuple[str, ...]


def pass_of(module: nn.Module, workload: Workload, latents: Latents | None) -> Pass:
    """One pass of the module, with inputs on the default device.

    Args:
        module: built by its library, so that it has a `config`.
        workload: what it states is taken as it is; what it does not is assumed, and said.
        latents: of the pipeline's autoencoder; null where there is none.

    Raises:
        InputError: nobody knows the inputs of this class.
    """
    name = type(module).__name__
    maker = DENOISERS.get(name) or DECODERS.get(name) or REFERENCE.get(name) or _transformers_maker(module)
    if maker is None:
        raise InputError(f"the inputs of {name} are not known")
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.dtype.is_floating_point]
    ask = Ask(
        module=module,
        workload=workload,
        latents=latents,
        batch=workload.batch,
        dtype=dtypes[0] if dtypes else torch.float32,
    )
    call = cast(Callable[..., object], getattr(module, "decode") if name in DECODERS else module)  # noqa: B009
    return Pass(call=call, arguments=maker(ask), assumed=tuple(ask.assumed))


def latents_of(components: Iterable[tuple[Component, Path]]) -> Latents | None:
    """By the configuration of the first autoencoder; null where there is none, or it cannot be read."""
    for component, folder in components:
        if (component.class_name or "").startswith(("Autoencoder", "VQ")):
            try:
                config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_AutoencoderConfig)
            except (OSError, msgspec.DecodeError):
                return None
            blocks = config.decoder_block_out_channels or config.block_out_channels
            return Latents(
                spatial=config.scale_factor_spatial or (2 ** (len(blocks) - 1) if blocks else 8),
                temporal=config.scale_factor_temporal or 4,
            )
    return None


def _transformers_maker(module: nn.Module) -> Maker | None:
    return {"input_ids": _text, "pixel_values": _image}.get(getattr(module, "main_input_name", ""))


def _text(ask: Ask) -> dict[str, object]:
    """A batch of texts with a mask, as padded ones have; for a causal model the prefill of all tokens."""
    config, accepted = ask.config, inspect.signature(ask.module.forward).parameters
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    if "clip_text" in str(config.model_type) and room:
        tokens = room  # CLIP's tokenizers pad each text to the full length.
    else:
        tokens = ask.tokens(min(room or ASSUMED_TOKENS, ASSUMED_TOKENS))
    arguments: dict[str, object] = {"input_ids": ask.ints(ask.batch, tokens)}
    if "attention_mask" in accepted:
        arguments["attention_mask"] = ask.ints(ask.batch, tokens)
    if "decoder_input_ids" in accepted:
        arguments["decoder_input_ids"] = ask.ints(ask.batch, 1)
    if "pixel_values" in accepted:
        ask.assumed.append("traced with text alone")
    return arguments


def _image(ask: Ask) -> dict[str, object]:
    size: int | list[int] = ask.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": ask.floats(ask.batch, ask.config.num_channels, height, width)}

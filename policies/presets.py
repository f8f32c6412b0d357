"""Presets: policies as data files beside this module."""

from importlib import resources

from pydantic import ValidationError

from ..plans.codec import explain_validation
from ..plans.errors import InputError
from ..plans.policy import Policy

PRESETS = ("auto", "low-memory", "low-latency", "layerwise")


def load_preset(name: str) -> Policy:
    """The policy of a preset.

    Raises:
        InputError: there is no such preset.
    """
    if name not in PRESETS:
        raise InputError(f"there is no preset '{name}'", hint=f"presets are {', '.join(PRESETS)}")
    return policy_from_json(
        resources.files(__name__.rpartition(".")[0]).joinpath(f"{name}.json").read_bytes(), source=name
    )


def policy_from_json(text: str | bytes, *, source: str = "the policy") -> Policy:
    """A policy of one's own, in the form of the presets.

    Raises:
        InputError: not JSON, or a field that is unknown, missing or of the wrong type.
    """
    try:
        return Policy.model_validate_json(text)
    except ValidationError as error:
        raise InputError(f"{source}: {explain_validation(error)}", hint="start from the preset auto") from None

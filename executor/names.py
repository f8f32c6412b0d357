"""Which stored tensor fills which parameter of a module."""

# Torch's modules keep these tables and switches underscored, and its stubs leave them untyped.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..plans.errors import ExecutionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a weight is bound: an entry of a module's own table, and its dotted name in the component.

    It holds the table and not the module, so that hooks which know their places keep no module alive.
    """

    table: dict[str, Any]
    attribute: str
    name: str

    def get(self) -> torch.Tensor:
        """What is bound here now."""
        bound: torch.Tensor = self.table[self.attribute]
        return bound

    def find(self) -> torch.Tensor | None:
        """What is bound here now; null where somebody has taken it away."""
        return self.table.get(self.attribute)

    def put(self, weight: torch.Tensor) -> None:
        """Bind a weight here. Around `register_parameter`, which would look at a placeholder's data."""
        self.table[self.attribute] = weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One weight of a module. Tied weights are one binding with several places.

    `stored` is the tensor's name in the checkpoint, `name` the one of the weight's names that it stands for.
    """

    name: str
    stored: str
    places: tuple[Place, ...]
    is_buffer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """All weights of a module; stored tensors that it has no place for; buffers that no file has, left as built."""

    weights: tuple[Binding, ...]
    unused: tuple[str, ...]
    as_built: tuple[str, ...]


def match_names(module: nn.Module, stored: Mapping[str, object], aliases: Mapping[str, str]) -> Bindings:
    """Tie every parameter and persistent buffer of a module to a stored tensor.

    A tensor may be stored under any of a tied weight's names, with or without the prefix of the library's base model,
    or under the name that `aliases` (names dropped on saving because they share storage) points to.

    Raises:
        ExecutionError: a parameter is stored under none of its names; the message lists all such.
    """
    prefix = getattr(module, "base_model_prefix", "")
    weights: list[Binding] = []
    missing: list[str] = []
    as_built: list[str] = []
    for is_buffer, places in _weights(module):
        names = [place.name for place in places]
        found = next(
            ((name, key) for name in names for key in _spellings(name, prefix, aliases) if key in stored), None
        )
        if found is None:
            (as_built if is_buffer else missing).append(names[0])
        else:
            weights.append(Binding(name=found[0], stored=found[1], places=places, is_buffer=is_buffer))
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ExecutionError(
            f"{type(module).__name__}: {len(missing)} parameters are not in the checkpoint: {shown}",
            hint="give the checkpoint that belongs to this class",
        )
    used = {weight.stored for weight in weights}
    return Bindings(weights=tuple(weights), unused=tuple(sorted(set(stored) - used)), as_built=tuple(as_built))


def _spellings(name: str, prefix: str, aliases: Mapping[str, str]) -> list[str]:
    plain = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    return [*plain, *(aliases[key] for key in plain if key in aliases)]


def _weights(module: nn.Module) -> list[tuple[bool, tuple[Place, ...]]]:
    """Every distinct parameter and persistent buffer with all its places, in registration order."""
    found: dict[int, tuple[bool, list[Place]]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        transient = owner._non_persistent_buffers_set
        for is_buffer, table in ((False, owner._parameters), (True, owner._buffers)):
            for attribute, value in table.items():
                if value is not None and not (is_buffer and attribute in transient):
                    name = f"{path}.{attribute}" if path else attribute
                    _, places = found.setdefault(id(value), (is_buffer, []))
                    places.append(Place(table=table, attribute=attribute, name=name))
    return [(is_buffer, tuple(places)) for is_buffer, places in found.values()]

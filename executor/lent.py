"""What is bound for a weight, and whether plain torch has given it a new value since."""

# Torch keeps the counter of a tensor's writes underscored.
# pyright: reportPrivateUsage=false

import torch

from ..plans.errors import InputError
from ..plans.policy import Hold
from .guards import MappedWeight, ReleasedWeight, unguarded
from .names import Binding
from .units import Unit


class Lent:
    """What was bound last for a weight, and how often it had been written then."""

    __slots__ = ("_counts", "_writes", "weight")

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self._counts = not isinstance(weight, (MappedWeight, ReleasedWeight)) and not weight.is_inference()
        self._writes = weight._version if self._counts else 0

    def changed(self, component: str, binding: Binding, unit: Unit) -> torch.Tensor | None:
        """The new value that plain torch gave the weight since; null where there is none.

        Raises:
            InputError: it was taken away, or a tied weight has a new value in only some of its places. Those of weights
                that never leave are left alone.
        """
        if self._is_bound(binding):
            if unit.hold is Hold.always:
                same = is_same(self.weight, unit.source[binding.stored])
            else:
                same = not self._counts or self.weight._version == self._writes
            return None if same else self.weight
        present = [place.find() for place in binding.places]
        if present[0] is not None and all(each is present[0] for each in present):
            return present[0]
        if unit.hold is Hold.always:
            return None
        names = ", ".join(place.name for place in binding.places)
        raise InputError(
            f"component '{component}': weight '{binding.name}' was replaced or removed, and is bound at {names}",
            hint="give its new value with the pipeline's update(), for all of its places",
        )

    def _is_bound(self, binding: Binding) -> bool:
        for place in binding.places:  # noqa: SIM110 asked twice for every use of a layer; a generator takes longer
            if place.table.get(place.attribute) is not self.weight:
                return False
        return True


def is_same(weight: torch.Tensor, home: torch.Tensor) -> bool:
    """Whether both are the same elements of the same memory; setting `data` gives a weight another."""
    with unguarded():
        one, other = ((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (weight, home))
    return one == other

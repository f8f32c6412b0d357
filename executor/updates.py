"""New values for weights: which weight is meant, whether the value fits, and what copies of mapped weights may take.

The checkpoint's files never change. A weight whose home is memory is written there; one that is a view of the file gets
memory of its own on the host instead, which its layer is completed from whenever it is fetched.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from ..plans.errors import ExecutionError, InputError
from ..plans.patterns import matching
from ..plans.units import format_bytes
from .guards import ReleasedWeight
from .machine import Machine
from .units import Unit

Value = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
"""A new value, or a function that makes it from the old one. It is given a copy on the host, which it may write."""


@dataclass(slots=True)
class Allowance:
    """What a plan left of the host for the copies that updates make, for all components. Null is not known."""

    left_bytes: int | None

    def check(self, component: str, nbytes: int) -> None:
        """See that so much is left.

        Raises:
            ExecutionError: there is not so much left. A budget that updates could exceed would bound nothing, so there
                is no way round it but a plan that gives the weights memory.
        """
        if nbytes > (self.left_bytes or 0):
            left = "an unknown amount" if self.left_bytes is None else format_bytes(self.left_bytes)
            raise ExecutionError(
                f"component '{component}': new values of mapped weights take {format_bytes(nbytes)} ({nbytes} bytes)"
                f" of the host, and the plan leaves {left}",
                hint="plan the layers that change with home pageable, or with more host memory",
            )

    def take(self, nbytes: int) -> None:
        """Spend some of it."""
        if self.left_bytes is not None:
            self.left_bytes -= nbytes


def resolve(component: str, names: Mapping[str, str], changes: Mapping[str, Value]) -> dict[str, Value]:
    """The new values by the weights that they are for.

    Args:
        component: for errors.
        names: the weight that each name in the module stands for; tied names stand for one.
        changes: by name, or by a pattern of names such as `blocks.*.attn.q.weight`.

    Raises:
        InputError: nothing has that name, or two names give one weight two values.
    """
    chosen: dict[str, Value] = {}
    for asked, value in changes.items():
        matched = [asked] if asked in names else matching(asked, names)
        if not matched:
            raise InputError(
                f"component '{component}' has no weight '{asked}'", hint="names are those of the module's state_dict()"
            )
        for name in {names[each]: None for each in matched}:
            if name in chosen and not _same(chosen[name], value):
                raise InputError(
                    f"component '{component}': weight '{name}' is given two values, one of them by '{asked}'",
                    hint="give each weight once; tied names are one weight",
                )
            chosen[name] = value
    return chosen


def _same(one: Value, other: Value) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) and torch.equal(one, other)


def check_value(component: str, name: str, weight: torch.Tensor, value: object) -> None:
    """Raise InputError unless a value can take a weight's place: nothing is cast, and nothing is broadcast."""
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"component '{component}': the new value of '{name}' is of type {type(value).__name__}",
            hint="give a tensor, or a function that returns one",
        )
    if isinstance(value, ReleasedWeight) or value.is_meta:
        raise InputError(f"component '{component}': the new value of '{name}' has no data", hint="give a tensor's data")
    if (value.shape, value.dtype) != (weight.shape, weight.dtype):
        raise InputError(
            f"component '{component}': weight '{name}' is {_described(weight)}, and its new value {_described(value)}",
            hint="give a value of the weight's own shape and dtype, or plan a checkpoint that has the new ones",
        )


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class Writer:
    """Writes new values at the homes of one component's weights.

    Args:
        component: for errors.
        host: where copies of mapped weights are made.
        device: the compute device.
        allowance: what such copies may take.
    """

    def __init__(self, component: str, host: Machine, device: Machine, allowance: Allowance) -> None:
        self._component, self._host, self._device, self._allowance = component, host, device, allowance

    def check_room(self, weights: Iterable[tuple[Unit, str]]) -> None:
        """Raise ExecutionError if the plan left less of the host than the new values of these weights take."""
        self._allowance.check(self._component, sum(_added_bytes(unit, stored) for unit, stored in weights))

    def write(self, unit: Unit, stored: str, value: torch.Tensor) -> None:
        """Write one weight at home, for which there is room; nothing may be reading it."""
        old = unit.like(stored)
        if stored in unit.on_file:
            self._allowance.take(old.nbytes)
            buffer = self._host.allocate(old.nbytes)
            unit.source[stored] = buffer.view(old.dtype).view(old.shape)
            unit.replaced.add(stored)
        target = unit.source[stored]
        (self._host if target.device.type == "cpu" else self._device).copy_in(target, value)


def _added_bytes(unit: Unit, stored: str) -> int:
    return unit.like(stored).nbytes if stored in unit.on_file else 0

"""Units at home: where the weights of one layer, or of a component's fixed part, rest and how they are read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models.headers import Header, TensorEntry
from ..models.layers import find_layers, layer_prefix
from ..plans.document import Placement, Segment
from ..plans.policy import Hold, Home
from .layout import PackedLayout, pack
from .machine import Machine
from .mapping import FileMapping
from .procmaps import MapsSnapshot

View = Callable[[str], torch.Tensor]
"""Gives a stored tensor, by name, as a view of its file's mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One layer, or the fixed part. `prefix` is the layer's module name, null for the fixed part.

    `source` holds the weights by stored name: on the mapping, in a host copy, or at home on the compute device.
    """

    prefix: str | None
    home: Home
    hold: Hold
    layout: PackedLayout
    source: Mapping[str, torch.Tensor]

    @property
    def label(self) -> str:
        """For people: the layer's name, or `fixed part`."""
        return "fixed part" if self.prefix is None else self.prefix


Progress = Callable[[int], None]
"""Told how many more bytes are done."""


def ignore(_: int) -> None:
    """Take no notice of progress."""


UnitKey = tuple[str | None, int]
"""Stack and layer number; `(None, 0)` is the fixed part."""


def keys_of(stored: Iterable[str]) -> dict[str, UnitKey]:
    """The unit that each stored tensor belongs to, found from the names as it was for the plan."""
    layout = find_layers(stored)
    keys: dict[str, UnitKey] = dict.fromkeys(layout.fixed, (None, 0))
    for stack in layout.stacks:
        for number, names in enumerate(stack.layers):
            keys |= dict.fromkeys(names, (stack.name, number))
    return keys


def units_of(
    placement: Placement,
    tensors: Mapping[str, tuple[Header, TensorEntry]],
    keys: Mapping[str, UnitKey],
    shared: Iterable[str],
    view: View,
    host: Machine,
    device: Machine,
    progress: Progress = ignore,
) -> tuple[Unit, ...]:
    """Give every unit the home that the plan says. Only a `device` or `pageable` home takes memory.

    Args:
        placement: one component's segments.
        tensors: all that is stored.
        keys: the unit of each stored tensor that the module has a place for.
        shared: names among them that more than one unit uses; a layer's are kept for the phase, as the fixed part is.
        view: gives a stored tensor without a copy.
        host: where `pageable` copies are made.
        device: where `device` homes are.
        progress: told the stored bytes of each unit when it is at home.
    """
    entries = {name: entry for name, (_, entry) in tensors.items()}
    apart = set(shared)
    by_unit: dict[UnitKey, list[str]] = {}
    for name, key in keys.items():
        by_unit.setdefault(key, []).append(name)
    units: list[Unit] = []
    for segment in placement.segments:
        for stack, number in _members(segment):
            prefix = None if stack is None else layer_prefix(stack, number)
            stored = by_unit.get((stack, number), [])
            own = [name for name in stored if prefix is None or name not in apart]
            others = [name for name in stored if prefix is not None and name in apart]
            for part, group in ((prefix, own), (None, others)):
                if group:
                    layout = pack(entries, group)
                    source = _settle(segment.home, layout, view, host, device)
                    hold = Hold.phase if part is None and segment.hold is Hold.layer else segment.hold
                    units.append(Unit(prefix=part, home=segment.home, hold=hold, layout=layout, source=source))
                    progress(layout.nbytes)
    return tuple(units)


def _members(segment: Segment) -> list[UnitKey]:
    if segment.stack is None:
        return [(None, 0)]
    return [(segment.stack, number) for run in segment.layers for number in range(*run)]


def _settle(home: Home, layout: PackedLayout, view: View, host: Machine, device: Machine) -> dict[str, torch.Tensor]:
    views = {span.name: view(span.name) for span in layout.spans}
    if home is Home.mapped:
        return views
    machine = device if home is Home.device else host
    copies = layout.views(machine.allocate(layout.nbytes))
    fill(machine, copies, views)
    return copies


def fill(machine: Machine, weights: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """Write each weight from the source of the same name. The copies may run on where the machine has streams."""
    for name, weight in weights.items():
        machine.copy_in(weight, source[name])


def open_views(files: Iterable[Header], tensors: Mapping[str, tuple[Header, TensorEntry]]) -> View:
    """Map every file once, and give views by stored name."""
    mappings: dict[Path, FileMapping] = {file.path: FileMapping(file) for file in files}

    def view(name: str) -> torch.Tensor:
        header, entry = tensors[name]
        return mappings[header.path].view(entry)

    return view


def misplaced(unit: Unit, device: Machine, files: frozenset[str], maps: MapsSnapshot | None) -> str | None:
    """Why a unit is not where the plan says, or null. Without a snapshot the host's pages cannot be told apart."""
    for name, tensor in unit.source.items():
        if tensor.numel() == 0:
            continue
        expected = device.device if unit.home is Home.device else torch.device("cpu")
        if tensor.device != expected:
            return f"'{name}' is on {tensor.device}, not on {expected}"
        if maps is not None and tensor.device.type == "cpu":
            file = maps.file_at(tensor.data_ptr())
            if (file in files) != (unit.home is Home.mapped):
                return f"'{name}' is backed by {file or 'anonymous memory'}, and its home is {unit.home}"
    return None

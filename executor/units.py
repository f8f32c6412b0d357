"""Units at home: where the weights of one layer, or of a component's fixed part, rest and how they are read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ..models.checkpoint import CheckpointFacts
from ..models.layers import find_layers, layer_prefix
from ..plans.document import Placement, Segment
from ..plans.policy import Hold, Home
from .homes import Settle
from .layout import Layout, pack
from .machine import Machine
from .pages import PageLock, in_page_cache
from .procmaps import MapsSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One layer, or the fixed part. `prefix` is the layer's module name, null for the fixed part.

    `source` holds the weights by stored name: on the mapping, in a host copy, or at home on the compute device. `home`
    is the one that the unit got, and `lock` keeps a locked one's pages. `segment` is the place of its segment in the
    placement. `shells` are the weights that are strided views of the file, as the module has them, without data.
    `replaced` names the weights whose memory an update has made, or that were put in the place of others: they have
    left the unit's home.
    """

    prefix: str | None
    segment: int
    home: Home
    hold: Hold
    layout: Layout
    source: dict[str, torch.Tensor]
    shells: dict[str, torch.Tensor]
    lock: PageLock | None = None
    replaced: set[str] = field(default_factory=set[str])

    def like(self, stored: str) -> torch.Tensor:
        """A tensor with the shape and dtype of a weight in the module; not to be read."""
        return self.shells.get(stored, self.source[stored])

    @property
    def label(self) -> str:
        """For people: the layer's name, or `fixed part`."""
        return "fixed part" if self.prefix is None else self.prefix

    @property
    def on_file(self) -> dict[str, torch.Tensor]:
        """The weights that are views of the checkpoint file."""
        if self.home not in (Home.mapped, Home.locked):
            return {}
        return {name: weight for name, weight in self.source.items() if name not in self.replaced}

    @property
    def strided(self) -> set[str]:
        """The weights among them whose bytes the module has in another order, or as another dtype."""
        return self.shells.keys() - self.replaced

    @property
    def replaced_bytes(self) -> int:
        """What the replaced weights take."""
        return sum(self.source[name].nbytes for name in self.replaced)


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
    facts: CheckpointFacts,
    keys: Mapping[str, UnitKey],
    shared: Iterable[str],
    settle: Settle,
    progress: Progress = ignore,
) -> tuple[Unit, ...]:
    """Give every unit the home that the plan says. A home on the mapping takes no memory of its own.

    Args:
        placement: one component's segments.
        facts: all that is stored.
        keys: the unit of each stored tensor that the module has a place for.
        shared: names among them that more than one unit uses; a layer's are kept for the phase, as the fixed part is.
        settle: gives one unit its home.
        progress: told the packed bytes of each unit when it is at home.
    """
    entries = {name: facts.wanted(name) for name in keys}
    apart = set(shared)
    by_unit: dict[UnitKey, list[str]] = {}
    for name, key in keys.items():
        by_unit.setdefault(key, []).append(name)
    units: list[Unit] = []
    for position, segment in enumerate(placement.segments):
        for stack, number in _members(segment):
            prefix = None if stack is None else layer_prefix(stack, number)
            names = by_unit.get((stack, number), [])
            own = [name for name in names if prefix is None or name not in apart]
            others = [name for name in names if prefix is not None and name in apart]
            for part, group in ((prefix, own), (None, others)):
                if group:
                    layout = pack(entries, group, facts.transforms)
                    settled = settle(prefix or "the fixed part", segment.home, layout)
                    hold = Hold.phase if part is None and segment.hold is Hold.layer else segment.hold
                    units.append(
                        Unit(
                            prefix=part,
                            segment=position,
                            home=settled.home,
                            hold=hold,
                            layout=layout,
                            source=dict(settled.source),
                            shells=_shells(layout) if settled.home in (Home.mapped, Home.locked) else {},
                            lock=settled.lock,
                        )
                    )
                    progress(layout.nbytes)
    return tuple(units)


def _shells(layout: Layout) -> dict[str, torch.Tensor]:
    return {
        span.name: torch.empty(span.shape, dtype=span.dtype, device="meta") for span in layout.spans if span.transformed
    }


def _members(segment: Segment) -> list[UnitKey]:
    if segment.stack is None:
        return [(None, 0)]
    return [(segment.stack, number) for run in segment.layers for number in range(*run)]


def misplaced(unit: Unit, device: Machine, files: frozenset[str], maps: MapsSnapshot | None) -> str | None:
    """Why a unit is not where the plan says, or null. Without a snapshot the host's pages cannot be told apart."""
    if unit.lock is not None and not in_page_cache(unit.lock.pages):
        return "pages that are locked are not in memory"
    for name, tensor in unit.source.items():
        if tensor.numel() == 0:
            continue
        expected = device.device if unit.home is Home.device else torch.device("cpu")
        if tensor.device != expected:
            return f"'{name}' is on {tensor.device}, not on {expected}"
        if maps is not None and tensor.device.type == "cpu":
            file = maps.file_at(tensor.data_ptr())
            if (file in files) != (unit.home in (Home.mapped, Home.locked)):
                return f"'{name}' is backed by {file or 'anonymous memory'}, and its home is {unit.home}"
    return None

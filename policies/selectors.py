"""Selectors: how an override names a part of a pipeline. They match whole dotted segments, never a part of one."""

from dataclasses import dataclass

from ..plans.errors import InputError
from ..plans.patterns import near
from ..plans.pipeline import Pipeline
from ..plans.policy import Hold, Home, Override, Policy, Shard

Place = tuple[str, str | None]
"""A component and one of its stacks; null is the whole component."""

_SHARDED_HOMES = (None, Home.device, Home.pageable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the overrides ask of one place; null is no wish."""

    home: Home | None = None
    hold: Hold | None = None
    compute_device: str | None = None
    shard: Shard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """All overrides of a policy, by component and stack; a stack's wish beats its component's, field by field."""

    by_place: dict[Place, Override]

    def of(self, component: str, stack: str | None) -> Wish:
        """The wish for a stack of a component, or for its fixed part (`stack` null)."""
        whole = self.by_place.get((component, None))
        part = self.by_place.get((component, stack)) if stack is not None else None
        asked = [override for override in (part, whole) if override is not None]
        return Wish(
            home=next((override.home for override in asked if override.home), None),
            hold=next((override.hold for override in asked if override.hold), None),
            compute_device=whole.compute_device if whole is not None else None,
            shard=whole.shard if whole is not None else None,
        )


def resolve_overrides(policy: Policy, pipeline: Pipeline) -> Wishes:
    """Tie each override to the one place that it names.

    Raises:
        InputError: it names no place or two, a place that another override names too, or asks for nothing that
            could have an effect.
    """
    places = _places(pipeline)
    layered = {component.name for component in pipeline.components if component.stacks}
    by_place: dict[Place, Override] = {}
    for override in policy.overrides:
        place = _the_place(override.select, places)
        if place in by_place:
            raise InputError(f"two overrides select '{override.select}'", hint="say all in one")
        if (override.home, override.hold, override.compute_device, override.shard) == (None,) * 4:
            raise InputError(f"the override of '{override.select}' asks for nothing", hint="give home, hold or device")
        whole = place[1] is None and override.hold is None and override.home in _SHARDED_HOMES
        if override.shard is not None and not whole:
            raise InputError(
                f"the override of '{override.select}' shards a stack, or with a home or hold that no part can have",
                hint="select a whole component, with home device or pageable, and without a hold",
            )
        if override.compute_device is not None and place[1] is not None:
            raise InputError(
                f"the override of '{override.select}' moves a stack to {override.compute_device}",
                hint=f"a component computes on one device: select '{place[0]}'",
            )
        if override.hold is Hold.layer and place[0] not in layered:
            raise InputError(
                f"the override of '{override.select}' asks for hold layer, and there are no layers",
                hint="ask for hold phase",
            )
        by_place[place] = override
    return Wishes(by_place=by_place)


def _places(pipeline: Pipeline) -> dict[str, list[Place]]:
    """Every place by its selector; dots in names can give one selector to two places."""
    places: dict[str, list[Place]] = {}
    for component in pipeline.components:
        places.setdefault(component.name, []).append((component.name, None))
        for stack in component.stacks:
            places.setdefault(f"{component.name}.{stack.name}", []).append((component.name, stack.name))
    return places


def _the_place(select: str, places: dict[str, list[Place]]) -> Place:
    match places.get(select, []):
        case [place]:
            return place
        case []:
            raise _unmatched(select, places)
        case several:
            owners = ", ".join(sorted(component for component, _ in several))
            raise InputError(f"the override '{select}' names parts of {owners}", hint="select a whole component")


def _unmatched(select: str, places: dict[str, list[Place]]) -> InputError:
    return InputError(f"the override '{select}' matches nothing", hint=near(select, places))

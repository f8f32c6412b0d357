"""Selectors: how an override names a part of a pipeline. They match whole dotted segments, never a part of one."""

import difflib
from dataclasses import dataclass

from ..plans.errors import InputError
from ..plans.pipeline import Pipeline
from ..plans.policy import Hold, Home, Override, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the overrides ask of one place; null is no wish."""

    home: Home | None = None
    hold: Hold | None = None
    compute_device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """All overrides of a policy, by component and stack; a stack's wish beats its component's, field by field."""

    by_place: dict[tuple[str, str | None], Override]

    def of(self, component: str, stack: str | None) -> Wish:
        """The wish for a stack of a component, or for its fixed part (`stack` null)."""
        whole = self.by_place.get((component, None))
        part = self.by_place.get((component, stack)) if stack is not None else None
        asked = [override for override in (part, whole) if override is not None]
        return Wish(
            home=next((override.home for override in asked if override.home), None),
            hold=next((override.hold for override in asked if override.hold), None),
            compute_device=whole.compute_device if whole is not None else None,
        )


def resolve_overrides(policy: Policy, pipeline: Pipeline) -> Wishes:
    """Tie each override to the one place that it names.

    Raises:
        InputError: it names no place, a place that another override names too, or asks for nothing.
    """
    places = _places(pipeline)
    by_place: dict[tuple[str, str | None], Override] = {}
    for override in policy.overrides:
        place = places.get(override.select)
        if place is None:
            raise _unmatched(override.select, places)
        if place in by_place:
            raise InputError(f"two overrides select '{override.select}'", hint="say all in one")
        if override.home is None and override.hold is None and override.compute_device is None:
            raise InputError(
                f"the override of '{override.select}' asks for nothing", hint="give home, hold or device"
            )
        if override.compute_device is not None and place[1] is not None:
            raise InputError(
                f"the override of '{override.select}' moves a stack to {override.compute_device}",
                hint=f"a component computes on one device: select '{place[0]}'",
            )
        by_place[place] = override
    return Wishes(by_place=by_place)


def _places(pipeline: Pipeline) -> dict[str, tuple[str, str | None]]:
    places: dict[str, tuple[str, str | None]] = {}
    for component in pipeline.components:
        places[component.name] = (component.name, None)
        for stack in component.stacks:
            places[f"{component.name}.{stack.name}"] = (component.name, stack.name)
    return places


def _unmatched(select: str, places: dict[str, tuple[str, str | None]]) -> InputError:
    near = difflib.get_close_matches(select, places, n=3, cutoff=0.4) or sorted(places)[:8]
    return InputError(f"the override '{select}' matches nothing", hint=f"did you mean {', '.join(near)}?")

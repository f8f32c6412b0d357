"""Fates: the homes and holds that a unit may have, and classes of units that may have the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plans.document import Budget
from ..plans.policy import Copies, Hold, Home, Policy, Residency
from .budgets import HOST
from .draft import Draft, Unit

Fate = tuple[Home, Hold]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitClass:
    """Units of one component and stack with equal bytes and wishes: it does not matter which of them has which fate."""

    draft: Draft
    units: tuple[Unit, ...]
    fates: tuple[Fate, ...]

    @property
    def packed(self) -> int:
        """Bytes that one of them takes in memory."""
        return self.units[0].packed

    @property
    def stored(self) -> int:
        """Bytes that one of them has on disk."""
        return self.units[0].bytes


def classes_of(drafts: Sequence[Draft], policy: Policy, budgets: dict[str, Budget]) -> tuple[UnitClass, ...]:
    """The units of all components, by class; in the order of components and units."""
    classes: list[UnitClass] = []
    for draft in drafts:
        groups: dict[tuple[object, ...], list[Unit]] = {}
        for unit in draft.units:
            groups.setdefault((unit.stack, unit.bytes, unit.packed, unit.wish), []).append(unit)
        classes += (
            UnitClass(draft=draft, units=tuple(units), fates=fates_of(units[0], draft, policy, budgets))
            for units in groups.values()
        )
    return tuple(classes)


def fates_of(unit: Unit, draft: Draft, policy: Policy, budgets: dict[str, Budget]) -> tuple[Fate, ...]:
    """What the policy, the overrides and the device leave open for a unit; the present fate is always among it."""
    copies = policy.copies is Copies.when_they_fit and budgets[HOST].available_bytes is not None
    if unit.packed == 0:
        return ((unit.home, unit.hold),)
    if draft.on_cpu:
        fates: list[Fate] = [(Home.mapped, Hold.always)]
        fates += [(Home.device, Hold.always)] if copies else []
    else:
        # With unified memory a host copy beside the device's would be the same pool twice.
        hosts = (Home.mapped, Home.pageable) if copies and draft.axis != HOST else (Home.mapped,)
        holds = (Hold.phase,) if unit.stack is None else (Hold.layer, Hold.phase)
        if policy.residency is Residency.minimal:
            holds = holds[:1]
        fates = [(home, hold) for hold in holds for home in hosts]
        fates += [(Home.device, Hold.always)] if policy.residency is Residency.fill else []
    allowed = [fate for fate in fates if _grants(unit, fate)]
    present = (unit.home, unit.hold)
    return tuple(allowed if present in allowed else [present, *allowed])


def _grants(unit: Unit, fate: Fate) -> bool:
    home, hold = unit.wish.home, unit.wish.hold
    return home in (None, fate[0]) and hold in (None, fate[1])

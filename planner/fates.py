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

    @property
    def moved(self) -> int:
        """Bytes of one of them that go to a device."""
        return self.units[0].moved


def classes_of(drafts: Sequence[Draft], policy: Policy, budgets: dict[str, Budget]) -> tuple[UnitClass, ...]:
    """The units of all components, by class; in the order of components and units."""
    classes: list[UnitClass] = []
    for draft in drafts:
        groups: dict[tuple[object, ...], list[Unit]] = {}
        for unit in draft.units:
            groups.setdefault((unit.stack, unit.bytes, unit.transformed, unit.packed, unit.wish), []).append(unit)
        classes += (
            UnitClass(draft=draft, units=tuple(units), fates=fates_of(units[0], draft, policy, budgets))
            for units in groups.values()
        )
    return tuple(classes)


def fates_of(unit: Unit, draft: Draft, policy: Policy, budgets: dict[str, Budget]) -> tuple[Fate, ...]:
    """What the policy, the overrides and the device leave open for a unit; the present fate is always among it."""
    if unit.packed == 0:
        return ((unit.home, unit.hold),)
    copies = policy.copies is Copies.when_they_fit and budgets[HOST].available_bytes is not None
    fates = _on_cpu(unit, draft, copies=copies) if draft.on_cpu else _on_device(unit, draft, policy, copies=copies)
    allowed = [fate for fate in fates if _grants(unit, fate, on_cpu=draft.on_cpu)]
    present = (unit.home, unit.hold)
    return tuple(allowed if present in allowed else [present, *allowed])


def _on_cpu(unit: Unit, draft: Draft, *, copies: bool) -> list[Fate]:
    """In place, or through slots that reads fill beside the compute; copied, or locked where ranks share the pages.

    The file has no place for what is transformed: it is made for its turn, or for the phase where it is in no layer.
    """
    if unit.transformed:
        fates = [(Home.mapped, Hold.phase if unit.stack is None else Hold.layer)]
        return fates + ([(Home.device, Hold.always)] if copies else [])
    fates = [(Home.mapped, Hold.always)]
    if draft.reads is not None and unit.stack is not None:
        fates.append((Home.mapped, Hold.layer))
    if copies:
        fates.append((Home.device, Hold.always))
        fates += [(Home.locked, Hold.always)] if _shares(draft) else []
    return fates


def _on_device(unit: Unit, draft: Draft, policy: Policy, *, copies: bool) -> list[Fate]:
    homes = [Home.mapped]
    # With unified memory a host copy beside the device's would be the same pool twice.
    if draft.axis != HOST and copies:
        homes.append(Home.pageable)
        homes += [Home.pinned] if draft.pins and policy.pinned_max_percent else []
        homes += [Home.locked] if _shares(draft) else []
    if unit.wish.home not in (None, Home.device):
        homes = [unit.wish.home]
    holds = (Hold.phase,) if unit.stack is None else (Hold.layer, Hold.phase)
    if policy.residency is Residency.minimal:
        holds = holds[:1]
    fates = [(home, hold) for hold in holds for home in homes]
    return fates + ([(Home.device, Hold.always)] if policy.residency is Residency.fill else [])


def _shares(draft: Draft) -> bool:
    """Whether locking pages takes less than a copy: ranks on one host share them. Alone a copy is as good."""
    return draft.locks and draft.ranks > 1


def _grants(unit: Unit, fate: Fate, *, on_cpu: bool) -> bool:
    home, hold = unit.wish.home, unit.wish.hold
    if unit.stack is None and hold is Hold.layer:
        # What is in no layer has the shortest hold that there is for it; on the CPU that is said of layers alone.
        hold = None if on_cpu else unit.hold
    return home in (None, fate[0]) and hold in (None, fate[1])

"""What the ranks of one host measured, each for itself, as the one machine that a plan for all of them is made for."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...plans.calibration import Calibration
from ...plans.errors import FactsError
from ...plans.machine import Accelerator, Machine, Measured, Reading, Unlimited


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank's view: the machine with this rank's accelerator alone, which piece that is, and the host's name.

    `identity` is null where there is no accelerator, or torch does not tell.
    """

    machine: Machine
    identity: str | None = None
    host: str = field(default_factory=platform.node)


def facts_of_rank(machine: Machine) -> RankFacts:
    """What was measured here, as this rank uses it: of the accelerators the one that is torch's current device."""
    if not machine.accelerators:
        return RankFacts(machine=machine)
    import torch

    index = torch.accelerator.current_device_index()
    own = machine.accelerators[index]
    properties = getattr(torch.get_device_module(own.kind), "get_device_properties", None)
    identity = None if properties is None else getattr(properties(index), "uuid", None)
    return RankFacts(
        machine=machine.model_copy(update={"accelerators": (own,)}),
        identity=None if identity is None else str(identity),
    )


def machine_of_ranks(ranks: Sequence[RankFacts]) -> Machine:
    """The machine on which a plan that is right for each rank is right for all: the least of every figure.

    Ranks that name their accelerators differently (`cuda:0`, `cuda:1`) have a plan that says `cuda`, which is each
    one's current device.

    Raises:
        FactsError: the ranks are on several hosts, one has several accelerators, two have the same one, or theirs are
            not of one kind.
    """
    _check(ranks)
    first = ranks[0].machine
    machines = [rank.machine for rank in ranks]
    available = _least([machine.host.available for machine in machines])
    tightest = next(machine.host for machine in machines if machine.host.available == available)
    host = tightest.model_copy(update={"memlock": _least([machine.host.memlock for machine in machines])})
    if not first.accelerators:
        return first.model_copy(update={"host": host})
    accelerators = [machine.accelerators[0] for machine in machines]
    own = accelerators[0]
    device = own.device if len({each.device for each in accelerators}) == 1 else own.kind
    figures = {what: _least([getattr(each, what) for each in accelerators]) for what in ("free", "total")}
    return first.model_copy(
        update={
            "host": host,
            "accelerators": (own.model_copy(update={"device": device, **figures}),),
            "calibration": _renamed(first.calibration, own.device, device),
        }
    )


def _check(ranks: Sequence[RankFacts]) -> None:
    seen: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        if rank.host != ranks[0].host:
            raise FactsError(
                f"rank {number} is on {rank.host}, rank 0 on {ranks[0].host}: one plan is for the ranks of one host",
                hint="give the group of this host's ranks",
            )
        if len(rank.machine.accelerators) > 1:
            raise FactsError(
                f"rank {number} has {len(rank.machine.accelerators)} accelerators",
                hint="give each rank's machine with its own accelerator alone",
            )
        if _traits(rank.machine) != _traits(ranks[0].machine):
            raise FactsError(
                f"rank {number} computes on {_name(rank.machine)}, rank 0 on {_name(ranks[0].machine)}",
                hint="give the group of ranks with equal accelerators",
            )
        if rank.identity is not None and seen.setdefault(rank.identity, number) != number:
            raise FactsError(
                f"ranks {seen[rank.identity]} and {number} compute on the same {_name(rank.machine)}",
                hint="call torch.accelerator.set_device_index(local rank) before planning",
            )


def _traits(machine: Machine) -> list[Accelerator]:
    """All of the accelerators but their number, and figures that vary from piece to piece."""
    unknown = Unlimited(source="")
    return [each.model_copy(update={"device": "", "free": unknown, "total": unknown}) for each in machine.accelerators]


def _name(machine: Machine) -> str:
    return ", ".join(f"{each.name} ({each.device})" for each in machine.accelerators) or "the CPU"


def _least(readings: Sequence[Reading]) -> Reading:
    """The smallest; what one rank could not measure is not known of all."""
    unknown = (each for each in readings if not isinstance(each, Measured | Unlimited))
    known = [each for each in readings if isinstance(each, Measured)]
    return next(unknown, None) or min(known, key=lambda each: each.value, default=readings[0])


def _renamed(calibration: Calibration | None, device: str, name: str) -> Calibration | None:
    if calibration is None:
        return None
    return calibration.model_copy(
        update={
            part: tuple(
                rate.model_copy(update={"device": name}) if rate.device == device else rate
                for rate in getattr(calibration, part)
            )
            for part in ("links", "compute")
        }
    )

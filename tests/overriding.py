"""A pipeline of a transformer and a VAE under overrides, and what comes of it."""

import pytest
from placewise.plans.document import Plan
from placewise.plans.errors import InputError
from placewise.plans.machine import Machine
from placewise.plans.policy import Override
from placewise.plans.units import GIB

from .questions import BARE, component_of, cuda, machine_of, plan_of, policy_of, refused, stack_of

TRANSFORMER = component_of("transformer", stack_of("blocks", GIB, GIB), fixed=GIB, passes=50)
VAE = component_of("vae", fixed=GIB)
LARGE = machine_of(512 * GIB, cuda(80 * GIB))


def plan_with(*overrides: Override, machine: Machine = LARGE) -> Plan:
    return plan_of(machine, TRANSFORMER, VAE, policy=policy_of("auto", *overrides, **BARE))


def error_of(*overrides: Override) -> str:
    with pytest.raises(InputError) as caught:
        plan_with(*overrides)
    return str(caught.value)


def broken(plan: Plan) -> list[tuple[str, str, str]]:
    assert (plan.placements, refused(plan).short, refused(plan).nearest) == ((), (), ())
    return [(one.rule, one.subject, one.why) for one in refused(plan).broken]

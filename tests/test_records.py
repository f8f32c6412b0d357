"""Records as values: they travel between processes, and are their own copies."""

import copy
import pickle

from placewise.plans.codec import canonical_json
from placewise.plans.units import GIB

from .questions import component_of, cuda, machine_of, plan_of


def test_a_plan_can_be_pickled_and_copied() -> None:
    plan = plan_of(machine_of(GIB, cuda(GIB)), component_of("vae", fixed=GIB))
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert canonical_json(again) == canonical_json(plan)
    assert copy.deepcopy(plan) is plan

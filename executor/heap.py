"""The C library's heap, kept from holding on to memory that was freed.

A plan counts the activations that are alive. As it comes, glibc raises the size from which a block is mapped by itself
as it sees larger ones, up to 32 MiB. Smaller blocks share a heap that gives memory back from its end alone, and what is
freed before the end stays charged to the process.
"""

import ctypes
import os
from collections.abc import Mapping
from functools import cache

from ..plans.document import Plan
from ..plans.heap import FRESH_BLOCK_BYTES, gaps_matter
from ..plans.pipeline import most_activation_bytes

_OPTIONS = ((-3, FRESH_BLOCK_BYTES), (-1, 2 * FRESH_BLOCK_BYTES))
"""M_MMAP_THRESHOLD, and M_TRIM_THRESHOLD at twice of it, the ratio that glibc itself keeps."""


def leaves_little(plan: Plan) -> bool:
    """Whether gaps in the heap may be more than a plan leaves of the host."""
    (available,) = (budget.available_bytes for budget in plan.budgets if budget.axis == "host")
    ranks = plan.workload.ranks
    peak = max((phase.predicted.peak_bytes.get("host") or 0 for phase in plan.phases), default=0)
    activations = most_activation_bytes(plan.pipeline.components)
    return gaps_matter(available, peak=ranks * peak, activations=ranks * activations)


@cache
def fix_heap() -> bool:
    """Fix the thresholds of this process's heap, once and for good. Whether that was done.

    Nothing is done where the C library is not glibc, or where the environment sets its heap up.
    """
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}) or chosen_by(os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) for option, value in _OPTIONS)


def chosen_by(environment: Mapping[str, str]) -> bool:
    """Whether an environment sets glibc's heap up, as `MALLOC_TRIM_THRESHOLD_` and `GLIBC_TUNABLES` do."""
    return "glibc.malloc." in environment.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in environment
    )

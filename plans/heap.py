"""When the executor gives freed activations back at once, which the planner's seconds have to know."""

from .units import GIB, MIB

FRESH_BLOCK_BYTES = MIB
"""Blocks of this size or more are then mapped by themselves: each is fresh memory, and goes when it is freed."""

AMPLE_BYTES = 2 * GIB
"""A host with so much left over can bear the gaps that freed blocks leave, and is spared the page faults."""


def gaps_matter(available: int | None, *, peak: int, activations: int) -> bool:
    """Whether gaps in the heap may be more than is left of the host, the reserve included; where unknown, yes.

    Args:
        available: bytes of the host; null where nobody measured them.
        peak: the most that all ranks take.
        activations: the most that is alive of them in a pass, on all ranks.
    """
    return available is None or available - peak < max(AMPLE_BYTES, activations)

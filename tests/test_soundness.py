"""A plan at the brink, executed in the very cap that it was made for: no room there is unknown to the planner.

The benchmark `benchmarks/soundness.py` runs hundreds of random ones.
"""

from collections.abc import Iterator

import pytest
import torch
from placewise.benchmarks.soundness_cases import NAMES, Case, Part
from placewise.benchmarks.soundness_run import bare_bytes, run_case

from .cgroup import live_reason

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(bool(live_reason()), reason=live_reason() or "a cgroup can be made"),
]


GAPS = Case(
    parts=tuple(Part(name=name, width=2048, layers=3, words=2000, half=True) for name in NAMES),
    rows=3072,
    passes=2,
    preset="auto",
    host_percent=130,
    device_percent=None,
    streams=False,
    activations_known=True,
    exact_heap=False,
)
"""Activations in blocks below 32 MiB, which the C library's own thresholds keep in a heap with gaps."""


@pytest.fixture
def bare() -> Iterator[int]:
    """What a process takes before it plans. One thread, as in the caps: kernels split their sums by threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield bare_bytes()
    torch.set_num_threads(before)


def test_a_plan_lives_whose_freed_activations_would_fill_the_cap(bare: int) -> None:
    result = run_case(GAPS, bare)
    assert result.admitted, result
    assert result.end == "ran", result

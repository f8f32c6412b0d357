"""Plans at the brink, executed in the very cap that they were made for: no room there is unknown to the planner.

The benchmark `benchmarks/soundness.py` runs hundreds of random ones.
"""

from collections.abc import Iterator

import pytest
import torch

from ..benchmarks.soundness_cases import Case, Part
from ..benchmarks.soundness_run import bare_bytes, run_case
from .cgroup import live_reason

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(bool(live_reason()), reason=live_reason() or "a cgroup can be made"),
]


def on_cpu(*parts: Part, rows: int, host_percent: int) -> Case:
    return Case(
        parts=parts,
        rows=rows,
        passes=2,
        preset="auto",
        host_percent=host_percent,
        device_percent=None,
        streams=False,
        activations_known=True,
        exact_heap=False,
    )


GAPS = on_cpu(
    *(Part(name=name, width=2048, layers=5, words=2000, half=True) for name in ("text_encoder", "transformer")),
    rows=1536,
    host_percent=60,
)
"""Activations of up to 32 MiB, which the C library's own thresholds keep in a heap with gaps."""

HARDLY_CACHED = on_cpu(Part(name="model", width=2048, layers=3, words=2000, half=False), rows=512, host_percent=61)
"""Weights that stay mapped while a copy of some would fit, were the page cache spent on it."""


@pytest.fixture(scope="module")
def bare() -> Iterator[int]:
    """What a process takes before it plans. One thread, as in the caps: kernels split their sums by threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield bare_bytes()
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [GAPS, HARDLY_CACHED], ids=["gaps", "hardly-cached"])
def test_an_admitted_plan_lives(case: Case, bare: int) -> None:
    result = run_case(case, bare)
    assert result.admitted, result
    assert result.end == "ran", result

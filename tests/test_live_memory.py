"""Large files in a real memory cap: mapped weights take no memory of their own, and a plan keeps a process alive."""

from pathlib import Path

import pytest
from placewise.plans.units import GIB, MIB

from ..benchmarks.at_size import run
from ..benchmarks.checkpoints import reference_pipeline
from .cgroup import live_reason, memory_cap

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(bool(live_reason()), reason=live_reason() or "a cgroup can be made"),
]


def test_a_pipeline_of_124_gib_loads_in_12_gib_with_hardly_any_anonymous_memory(tmp_path: Path) -> None:
    """Case 4, by plan: what rests on the mapping takes no memory of its own."""
    reference_pipeline(tmp_path)
    *said, end = run(tmp_path, "low-memory", device_bytes=0, passes=False)
    assert (end["code"], end["kills"]) == (0, 0), end["error"]
    planned, load = said
    assert planned["homes"] == "mapped/always"
    assert load["after"] < 64 * MIB


_RUN = """
import sys, torch
from pathlib import Path
from placewise import api
from placewise.tests.modules import Tower, on_meta
make = lambda: Tower(width=2048, layers=20)
path = Path(sys.argv[1])
plan = api.plan(path)
homes = sorted({segment.home for placement in plan.placements for segment in placement.segments})
pipeline = api.load(plan, path, modules={"model": on_meta(make)})
with torch.no_grad():
    out = pipeline["model"](torch.arange(8).reshape(2, 4))
print(*homes, f"{out.double().sum().item():.6f}")
"""


def test_a_model_whose_copy_would_not_fit_runs_in_the_cap_that_a_copy_is_killed_in(tmp_path: Path) -> None:
    from .modules import Tower, build, save

    def make() -> Tower:
        return Tower(width=2048, layers=20)

    path = save(build(make), tmp_path / "model.safetensors")
    with memory_cap(6 * GIB) as ample, memory_cap(700 * MIB) as tight:
        wide, narrow = ample.python(_RUN, str(path)), tight.python(_RUN, str(path))
        assert wide.returncode == 0, wide.stderr
        assert narrow.returncode == 0, narrow.stderr
        assert tight.oom_kills() == 0
    wide_homes, wide_sum = wide.stdout.rsplit(maxsplit=1)
    narrow_homes, narrow_sum = narrow.stdout.rsplit(maxsplit=1)
    assert wide_sum == narrow_sum
    assert wide_homes == "device"
    assert "mapped" in narrow_homes

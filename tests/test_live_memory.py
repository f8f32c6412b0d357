"""Large files in a real memory cap: mapped weights take no memory of their own, and a plan keeps a process alive."""

import json
import struct
from pathlib import Path

import pytest
from placewise.benchmarks.at_size import run
from placewise.benchmarks.checkpoints import reference_pipeline, write_sparse
from placewise.plans.units import GIB, MIB

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
import json
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


_INTERLEAVED = """
import json, sys, torch
from pathlib import Path
from placewise import api
from placewise.plans.pipeline import Deinterleave
from placewise.tests.modules import Projections, on_meta

torch.set_num_threads(1)  # Kernels' threads keep scratch memory.
path = Path(sys.argv[1])

def anonymous():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

interleaved = Deinterleave(tensor="*.qkv.weight", groups=16, parts=3)
plan = api.plan(path, policy=sys.argv[2], transforms={"model": [interleaved]})
before = anonymous()
pipeline = api.apply(plan, path, on_meta(Projections))
loaded = anonymous()
with torch.no_grad():
    out = pipeline["model"](torch.linspace(-1, 1, 2048).reshape(1, 2048))
(placement,) = plan.placements
print(json.dumps({
    "homes": sorted({f"{segment.home}/{segment.hold}" for segment in placement.segments}),
    "slots": placement.staging and placement.staging.slots * placement.staging.slot_bytes,
    "loaded": loaded - before,
    "ran": anonymous() - before,
    "out": out.double().sum().item(),
}))
"""


def test_interleaved_rows_of_a_model_larger_than_the_cap_take_a_slot_of_anonymous_memory(tmp_path: Path) -> None:
    """1.1 GiB in 480 MiB: they are never copied whole."""
    rows = ((f"{layer}.qkv.weight", "F32", (3 * 2048, 2048), 3 * 2048 * 2048 * 4) for layer in range(24))
    path = tmp_path / "model.safetensors"
    size = write_sparse(path, rows)
    values = [struct.pack("<2048f", *((row * each % 97 - 48) / 4000 for each in range(2048))) for row in range(1, 12)]
    with path.open("r+b") as file:
        for row in range(24 * 48):  # One of each head's query, key and value.
            file.seek(size - (row * 128 + 1) * 2048 * 4)
            file.write(values[row % len(values)])
    with memory_cap(6 * GIB) as ample, memory_cap(480 * MIB) as tight:
        wide = ample.python(_INTERLEAVED, str(path), "auto")
        narrow = tight.python(_INTERLEAVED, str(path), "low-memory")
        assert wide.returncode == 0, wide.stderr
        assert narrow.returncode == 0, narrow.stderr
        assert tight.oom_kills() == 0
    resident, streamed = json.loads(wide.stdout), json.loads(narrow.stdout)
    assert resident["homes"] == ["device/always"]
    assert streamed["homes"] == ["mapped/layer"]
    assert streamed["out"] == resident["out"] != 0
    assert streamed["loaded"] < 16 * MIB
    assert streamed["slots"] <= streamed["ran"] < streamed["slots"] + 16 * MIB


_MERGE = """
import json, sys, torch
import json
from pathlib import Path
from placewise import api
from placewise.plans.errors import ExecutionError
from placewise.plans.policy import Home, Override
from placewise.tests.modules import Tower, machine, on_meta, overridden

torch.set_num_threads(1)  # Kernels' threads keep scratch memory.
path, home, budget = Path(sys.argv[1]), Home(sys.argv[2]), int(sys.argv[3])
plan = api.plan(path, machine=machine(budget), policy=overridden(Override(select="model", home=home)))
pipeline = api.load(plan, path, modules={"model": on_meta(lambda: Tower(width=2048, layers=6))})

def anonymous():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

host, refusal = pipeline.machines["cpu"], None
copy_in, seen = host.copy_in, [anonymous()]

def copy_in_and_see(destination, source):
    copy_in(destination, source)
    seen.append(anonymous())

host.copy_in = copy_in_and_see
chance = torch.Generator().manual_seed(0)
up, down = torch.randn(2048, 8, generator=chance), torch.randn(8, 2048, generator=chance)
for number in range(6):
    try:
        pipeline.update("model", {f"blocks.{number}.blocks.*.weight": lambda old: old.addmm_(up, down)})
    except ExecutionError as error:
        refusal = str(error)
        break
weights = pipeline.components["model"].weights()
print(json.dumps({
    "margin": plan.verdict.margin_bytes["host"],
    "refusal": refusal,
    "anonymous": seen,
    "sums": {name: weight.double().sum().item() for name, weight in weights},
}))
"""


_REFUSED = """\
component 'model': new values of mapped weights take 32.0 MiB (33554432 bytes) of the host, and the plan leaves 16.0 MiB
hint: plan the layers that change with home pageable, or with more host memory"""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("home", "budget", "layers", "taken", "refusal"),
    [("device", 256 * MIB, 6, 0, None), ("mapped", 112 * MIB, 3, 96 * MIB, _REFUSED)],
)
def test_merging_an_adapter_takes_one_layer_beyond_what_the_plan_left(
    tmp_path: Path, home: str, budget: int, layers: int, taken: int, refusal: str | None
) -> None:
    """Weights in memory are merged where they are; of mapped ones, as many layers as the margin has room for."""
    import torch

    from .modules import Tower, build, save

    plain = build(lambda: Tower(width=2048, layers=6))
    path = save(plain, tmp_path / "model.safetensors")
    with memory_cap(520 * MIB) as cap:
        ran = cap.python(_MERGE, str(path), home, str(budget))
        assert ran.returncode == 0, ran.stderr
        assert cap.oom_kills() == 0
    found = json.loads(ran.stdout)
    loaded, *merging = found["anonymous"]
    if home == "device":
        assert loaded + path.stat().st_size > cap.limit_bytes  # The model has no room there twice.
    assert len(merging) == 2 * layers  # What was refused was not begun.
    assert taken <= max(merging) - loaded < taken + 32 * MIB
    assert taken <= found["margin"]
    assert found["refusal"] == refusal
    chance = torch.Generator().manual_seed(0)
    up, down = torch.randn(2048, 8, generator=chance), torch.randn(8, 2048, generator=chance)
    with torch.no_grad():
        for number in range(layers):
            for inner in range(2):
                plain.get_parameter(f"blocks.{number}.blocks.{inner}.weight").addmm_(up, down)
    assert found["sums"] == {name: weight.double().sum().item() for name, weight in plain.named_parameters()}

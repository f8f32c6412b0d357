"""The report's numbers: counts are exact, times are consistent, and nothing is logged that was not asked for."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from placewise.executor.load import LoadedPipeline
from placewise.executor.report import Passes, report_run
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.executor.slots import Span, SpanKind
from placewise.executor.timeline import draw_timelines, recorded
from placewise.plans.document import Reader
from placewise.plans.errors import InputError
from placewise.plans.policy import Hold, Home
from torch import nn

from .modules import Tower, build, load, save
from .readings import DEVICE, Fate, plan_of

IDS = torch.tensor([[1, 2, 3, 10], [4, 5, 6, 0]])
HERE, MAPPED = (Home.device, Hold.always), (Home.mapped, Hold.layer)
MIXED: tuple[Fate, ...] = (HERE, MAPPED, (Home.pageable, Hold.layer), (Home.mapped, Hold.phase))
WEIGHT = "blocks.1.blocks.0.weight"
LAYER_BYTES = 4 * (16 + 16 + 2 * (16 * 16 + 16))
"""A norm and two linears of width 16, in 32 bits; each tensor fills whole boundaries of 64 bytes."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(Tower), tmp_path / "model.safetensors")


def mixed(path: Path, *, reader: Reader = Reader.mapping) -> LoadedPipeline:
    """One layer of each fate on the simulated device, the fixed part resident."""
    return load(plan_of(path, MIXED, HERE, reader=reader, chunk_bytes=4096, on_device=True), path, Tower)


def hooks_of(module: nn.Module) -> list[int]:
    return [len(cast(Any, each)._forward_hooks) for each in module.modules()]


def run(pipeline: LoadedPipeline, passes: int = 1) -> torch.Tensor:
    ids, result = IDS.to(pipeline.device("model")), IDS
    with torch.no_grad():
        for _ in range(passes):
            result = pipeline["model"](ids)
    return result.cpu()


@pytest.mark.parametrize(
    ("reader", "updated"), [(Reader.mapping, False), (Reader.buffered, True), (Reader.direct, True)]
)
def test_bytes_over_the_link_are_those_that_the_device_counts(
    checkpoint: Path, reader: Reader, *, updated: bool
) -> None:
    pipeline = mixed(checkpoint, reader=reader)
    if updated:
        pipeline.update("model", {WEIGHT: torch.zeros(16, 16)})
    machine = pipeline.machines[DEVICE]
    assert isinstance(machine, SimulatedMachine)
    before, fetcher = machine.simulated.copied_in_bytes, pipeline.components["model"].resident.fetcher
    assert fetcher.link_bytes == 0
    run(pipeline, passes=3)
    pipeline.release()  # Nothing is on its way any more.
    counted = machine.simulated.copied_in_bytes - before - IDS.nbytes
    assert fetcher.link_bytes == counted
    # Two layers per pass, the first of the next pass ahead once more at the end, and one layer for the phase.
    assert counted == LAYER_BYTES * (2 * 3 + 1 + 1)


def test_bytes_that_are_read_are_those_of_the_layers_that_are_read(checkpoint: Path) -> None:
    pipeline = mixed(checkpoint)
    run(pipeline, passes=2)
    pipeline.release()
    (report,) = report_run(pipeline, {}).components
    assert report.read_bytes == {"mapping": LAYER_BYTES * (2 + 1 + 1)}


def test_segments_tell_where_their_bytes_are_and_what_updates_made(checkpoint: Path) -> None:
    pipeline = mixed(checkpoint)
    weight_bytes = 16 * 16 * 4

    def observed() -> list[dict[str, int]]:
        return [segment.observed_bytes for segment in report_run(pipeline, {}).components[0].segments[1:]]

    device, file = {DEVICE: LAYER_BYTES}, {"page cache": LAYER_BYTES}
    assert observed() == [device, file, {"host": LAYER_BYTES}, file]
    for number in range(4):
        pipeline.update("model", {f"blocks.{number}.blocks.0.weight": torch.zeros(16, 16)})
    partly = {"host": weight_bytes, "page cache": LAYER_BYTES - weight_bytes}
    assert observed() == [device, partly, {"host": LAYER_BYTES}, partly]
    (report,) = report_run(pipeline, {}).components
    assert report.replaced_bytes == 2 * weight_bytes
    assert [segment.replaced_bytes for segment in report.segments[1:]] == [0, weight_bytes, 0, weight_bytes]


def test_times_are_consistent(checkpoint: Path) -> None:
    pipeline = mixed(checkpoint)
    run(pipeline)
    report = report_run(pipeline, {"model": Passes(seconds=(3.0, 1.0, 2.0, 7.0))})
    (component,) = report.components
    assert (component.passes, component.first_pass_s, component.later_pass_s) == (4, 3.0, 2.0)
    assert component.stall_s > 0
    assert component.planned_passes == 3
    assert report.disk_read_bytes is None or report.disk_read_bytes >= 0
    (idle,) = report_run(pipeline, {}).components
    assert (idle.passes, idle.first_pass_s, idle.later_pass_s) == (0, None, None)
    resident = load(plan_of(checkpoint, [HERE] * 4, HERE, on_device=True), checkpoint, Tower)
    run(resident)
    assert report_run(resident, {}).components[0].stall_s == 0


def test_a_recorded_pass_has_every_layer_and_leaves_nothing_behind(checkpoint: Path) -> None:
    pipeline = mixed(checkpoint)
    loaded = pipeline.components["model"]
    hooks = hooks_of(loaded.module)
    stalled = loaded.resident.stall_s
    with recorded(loaded) as spans:
        assert torch.equal(run(pipeline), build(Tower)(IDS))
    pipeline.release()
    assert hooks_of(loaded.module) == hooks
    by_kind = {kind: [span for span in spans if span.kind is kind] for kind in SpanKind}
    labels = [f"blocks.{number}" for number in range(4)]
    assert [span.layer for span in by_kind[SpanKind.compute]] == labels
    assert [span.layer for span in by_kind[SpanKind.wait]] == ["blocks.3", "blocks.1", "blocks.2"]
    assert {span.layer for span in by_kind[SpanKind.fetch]} == {"blocks.1", "blocks.2", "blocks.3"}
    assert all(span.begin_s <= span.end_s for span in spans)
    waited = sum(span.end_s - span.begin_s for span in by_kind[SpanKind.wait])
    assert waited == pytest.approx(loaded.resident.stall_s - stalled)
    for span in by_kind[SpanKind.compute][1:3]:
        (wait,) = (each for each in by_kind[SpanKind.wait] if each.layer == span.layer)
        assert wait.end_s <= span.begin_s
    count = len(spans)
    run(pipeline)
    assert len(spans) == count


def test_a_timeline_is_drawn_or_says_why_not(tmp_path: Path) -> None:
    spans = [Span(kind=kind, layer="blocks.0", begin_s=1.0, end_s=1.5) for kind in SpanKind]
    draw_timelines({"model": spans, "idle": []}, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    draw_timelines({}, tmp_path / "empty.svg")
    with pytest.raises(InputError, match="give a path that can be written"):
        draw_timelines({"model": spans}, tmp_path / "absent" / "timeline.png")

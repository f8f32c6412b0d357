"""What more memory buys: worths, and the frontier as table and picture."""

from io import StringIO
from pathlib import Path

import pytest
from placewise.planner.calibrating.given import given_calibration
from placewise.planner.frontier import frontier, grid_size
from placewise.planner.text import draw_frontier, print_frontier, print_worths
from placewise.planner.worth import moved_bytes, request_seconds, transfer_seconds, worths
from placewise.plans.document import Plan
from placewise.plans.errors import InputError
from placewise.plans.machine import Machine, Unmeasurable
from placewise.plans.pipeline import Pipeline, StackFlops, TracedActivations, Workload
from placewise.plans.units import GIB
from rich.console import Console

from .questions import component_of, cuda, host_of, machine_of, plan_of, policy_of, stack_of

DIT = component_of("transformer", stack_of("blocks", *[GIB] * 8), fixed=GIB, passes=50, activations=0)
TRACED = DIT.model_copy(
    update={
        "activations": TracedActivations(
            peak_bytes=0, flops=10**13, layer_flops=(StackFlops(stack="blocks", flops=10**13),)
        ),
        "dtype_bytes": {"BF16": 9 * GIB},
    }
)


def rated(machine: Machine, *, flops: float | None = None) -> Machine:
    rates = given_calibration(disk_bytes_per_s=3e9, link_bytes_per_s=12e9, device="cuda:0", flops_per_s=flops)
    return machine.model_copy(update={"calibration": rates})


def text_of_worths(plan: Plan) -> str:
    text = StringIO()
    print_worths(worths(plan), Console(file=text, width=100))
    return text.getvalue()


def test_without_rates_worth_is_bytes() -> None:
    plan = plan_of(machine_of(64 * GIB, cuda(6 * GIB)), DIT)
    device, host = worths(plan)
    assert (device.axis, host.axis) == ("cuda:0", "host")
    assert device.saves_s is None
    # One layer more stays on the device: it was copied in each of 50 passes, and now not at all.
    assert device.saves_moved_bytes == 50 * GIB
    assert "+1.00 GiB of cuda:0: 50.0 GiB less are moved\n" in text_of_worths(plan)
    assert "+1.00 GiB of host: nothing\n" in text_of_worths(plan)


def test_with_rates_worth_is_seconds_of_moving_weights() -> None:
    plan = plan_of(rated(machine_of(64 * GIB, cuda(6 * GIB))), DIT)
    assert request_seconds(plan) is None
    assert transfer_seconds(plan) is not None
    device = worths(plan)[0]
    assert device.saves_s == pytest.approx(50 * GIB / 12e9, rel=0.05)
    assert " s less\n" in text_of_worths(plan)


def test_with_compute_seconds_are_those_of_the_request() -> None:
    plan = plan_of(rated(machine_of(64 * GIB, cuda(6 * GIB)), flops=1e14), TRACED)
    seconds = request_seconds(plan)
    assert seconds is not None
    assert plan.verdict.kind == "fits"
    assert plan.verdict.confidence == "calibrated"
    assert seconds >= 50 * 10**13 / 1e14
    assert seconds >= (transfer_seconds(plan) or 0)


def test_a_refused_plan_has_no_worth() -> None:
    assert worths(plan_of(machine_of(64 * GIB, cuda(GIB)), DIT)) == ()


def swept(machine: Machine, steps: int = 4) -> str:
    pipeline = Pipeline(name="dit", components=(DIT,), edges=())
    told: list[int] = []
    points = frontier(pipeline, machine, policy_of(), Workload(), steps=steps, version="0", progress=told.append)
    assert len(points) == len(told) == grid_size(machine, steps)
    text = StringIO()
    print_frontier(points, Console(file=text, width=100))
    return text.getvalue()


def test_the_frontier_is_a_row_per_device_size_and_a_column_per_host_size() -> None:
    lines = swept(machine_of(64 * GIB, cuda(12 * GIB)), steps=8).splitlines()
    assert lines[0].split() == ["device", "memory", "host", "16.0", "GiB", "host", "32.0", "GiB", "host", "64.0", "GiB"]
    assert [line.split()[0] for line in lines[1:]] == ["1.50", "3.00", "4.50", "6.00", "7.50", "9.00", "10.5", "12.0"]
    assert lines[1].split()[2:] == ["refused"] * 3
    assert " s + compute" in swept(rated(machine_of(64 * GIB, cuda(12 * GIB))))


def test_on_the_cpu_the_frontier_has_one_row() -> None:
    assert swept(machine_of(64 * GIB)).splitlines()[1].split()[0] == "none"


def test_more_memory_is_never_predicted_slower_along_the_frontier() -> None:
    pipeline = Pipeline(name="dit", components=(DIT,), edges=())
    machine = rated(machine_of(64 * GIB, cuda(12 * GIB)))
    points = frontier(pipeline, machine, policy_of(), Workload(), steps=12, version="0")
    for host in {point.host_bytes for point in points}:
        costs = [point.transfer_s for point in points if point.host_bytes == host and point.fits]
        assert costs == sorted(costs, key=lambda cost: -(cost or 0))


def test_a_machine_of_unknown_size_has_no_frontier() -> None:
    with pytest.raises(InputError, match="the host's memory is not known"):
        swept(machine_of(host_of(Unmeasurable(why="no such thing")), cuda(GIB)))


def test_the_picture_is_drawn_and_a_bad_path_is_one_error(tmp_path: Path) -> None:
    pipeline = Pipeline(name="dit", components=(DIT,), edges=())
    points = frontier(pipeline, machine_of(64 * GIB, cuda(12 * GIB)), policy_of(), Workload(), steps=3, version="0")
    draw_frontier(points, tmp_path / "frontier.png", title="dit")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"frontier.docx: .*not supported"):
        draw_frontier(points, tmp_path / "frontier.docx", title="dit")


def test_moved_bytes_are_those_of_the_decision() -> None:
    plan = plan_of(machine_of(4 * GIB, cuda(6 * GIB)), DIT)
    assert plan.decisions[0].because["moved_bytes"] == moved_bytes(plan)

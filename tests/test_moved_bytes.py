"""Bytes that operations beside products move, against sums by hand, and what they add to a pass's seconds."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placewise.planner.budgets import budgets_of, copied_bytes_of, gives_back
from placewise.planner.costs import compute_seconds
from placewise.planner.rates import Rates
from placewise.planner.tracing import trace
from placewise.planner.tracing.moved_bytes import MovedBytes
from placewise.planner.tracing.trace import trace_component
from placewise.plans.pipeline import TracedActivations, Workload
from placewise.plans.policy import Copies
from placewise.plans.units import GIB, MIB
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from . import modules
from .questions import component_of, machine_of, policy_of, stack_of
from .real_passes import component, stack

ROWS, WIDTH = 6, 8
ONE = ROWS * WIDTH * 4
"""The bytes of `x`."""


def counted(run: Callable[[torch.Tensor], object], rows: int = ROWS) -> MovedBytes:
    x = torch.zeros(rows, WIDTH, device="meta")
    counter = MovedBytes(FlopCounterMode(display=False).flop_registry)
    with torch.no_grad(), counter:
        run(x)
    return counter


def moved(run: Callable[[torch.Tensor], object], rows: int = ROWS) -> int:
    return counted(run, rows).moved


OPERATIONS: list[tuple[Callable[[torch.Tensor], object], int]] = [
    (lambda x: x + x, 3 * ONE),
    (lambda x: x + x[:1], 2 * ONE + ONE // ROWS),
    (lambda x: x.add_(1), 2 * ONE),
    (lambda x: x.sum(), ONE + 4),
    (lambda x: x.bfloat16(), ONE + ONE // 2),
    (lambda x: torch.cat([x, x]), 4 * ONE),
    (lambda x: x.t().contiguous(), 2 * ONE),
    (lambda x: x.index_select(0, torch.empty(3, dtype=torch.int64, device="meta")), 2 * 3 * WIDTH * 4),
    (lambda x: x @ x.t(), 0),
    (lambda x: torch.empty_like(x), 0),
    (lambda x: x.t().view(WIDTH, ROWS)[1:].unsqueeze(0).detach(), 0),
    (lambda x: torch.ops.aten._unsafe_view(x, (ROWS * WIDTH,)), 0),
    (lambda x: x.device, 0),
]


@pytest.mark.parametrize(("run", "bytes_moved"), OPERATIONS)
def test_what_an_operation_reads_and_writes_is_counted(run: Callable[[torch.Tensor], object], bytes_moved: int) -> None:
    assert moved(run) == bytes_moved


LARGE = MIB // WIDTH
"""Rows of 4 MiB."""

TAKING: list[tuple[Callable[[torch.Tensor], object], int]] = [
    (lambda x: x + x, 1),
    (lambda x: x.relu().relu(), 2),
    (lambda x: x @ torch.zeros(WIDTH, WIDTH, device="meta"), 1),
    (lambda x: torch.empty_like(x), 1),
    (lambda x: x.sum(-1), 0),  # of 512 KiB
    (lambda x: x.relu_().view(-1)[1:].add_(1), 0),
]


@pytest.mark.parametrize(("run", "blocks"), TAKING)
def test_large_blocks_are_fresh_each_time_that_they_are_taken(
    run: Callable[[torch.Tensor], object], blocks: int
) -> None:
    assert counted(run, LARGE).fresh == blocks * 4 * MIB
    assert counted(run).fresh == 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(48), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.up(self.norm(x)).relu_()
        return result


class Residual(nn.Module):
    """A stack long enough to be run shortened. `main_input_name` is what transformers' models have."""

    main_input_name = "pixel_values"
    config = SimpleNamespace(image_size=4, num_channels=3)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(6)])

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("batch", [5, 600])
def test_all_layers_of_a_trace_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    def build(*_: object) -> nn.Module:
        return modules.on_meta(Residual)

    monkeypatch.setattr(trace, "build_module", build)
    traced = trace_component(
        component("mine", "Residual", stacks=(stack("layers", 6),)), tmp_path, Workload(batch=batch)
    )
    assert isinstance(traced, TracedActivations), traced
    x, row, weight = batch * 48 * 4, batch * 4, 48 * 4
    norm = 2 * x + 2 * weight + 2 * row  # with each row's mean and deviation
    assert traced.moved_bytes == 6 * (norm + 2 * x + 3 * x)


@given(st.integers(1, 500), st.integers(0, 500))
def test_more_rows_never_move_less(rows: int, more: int) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) + x.sin()

    assert moved(run, rows) <= moved(run, rows + more)


RATES = Rates(device="cpu", memory_copy_bytes_per_s=1e9, flops=(("F32", None, 1e9),))
COUNTED = TracedActivations(peak_bytes=0, flops=2 * 10**9, moved_bytes=6 * 10**9)


def seconds(activations: TracedActivations, rates: Rates) -> float | None:
    return compute_seconds(component("mine", "Mine", activations=activations), rates)


def test_a_cpu_moves_bytes_as_fast_as_it_copies_them() -> None:
    assert seconds(COUNTED, RATES) == pytest.approx(2 + 3)  # a copy of 3e9 bytes reads and writes as much


def test_fresh_memory_takes_its_time() -> None:
    taken = COUNTED.model_copy(update={"fresh_bytes": 4 * GIB})
    assert seconds(taken, RATES) == pytest.approx(2 + 3)
    assert seconds(taken, replace(RATES, touch_s_per_gib=0.25)) == pytest.approx(2 + 3 + 1)
    assert seconds(COUNTED, replace(RATES, touch_s_per_gib=0.25)) == pytest.approx(2 + 3)
    assert "fresh_bytes" not in COUNTED.model_dump()


@given(
    host=st.integers(1, 64).map(lambda count: count * GIB), more=st.integers(0, 8 * GIB), copies=st.sampled_from(Copies)
)
def test_memory_is_fresh_where_the_plan_may_leave_little_and_never_for_more_of_the_host(
    host: int, more: int, copies: Copies
) -> None:
    part = component_of("a", stack_of("blocks", *[GIB] * 8))

    def fresh(available: int) -> bool:
        policy = policy_of("auto", copies=copies)
        copied_bytes = copied_bytes_of((part,))
        budget = budgets_of(machine_of(available), policy, copied_bytes=copied_bytes)["host"]
        return gives_back(budget, policy, (part,), copied_bytes, 1)

    assert fresh(host) >= fresh(host + more)
    assert fresh(GIB)
    assert not fresh(40 * GIB)
    assert fresh(8 * GIB) == (copies is Copies.when_they_fit)


def test_without_figures_products_alone_are_timed() -> None:
    uncounted = COUNTED.model_copy(update={"moved_bytes": None})
    assert "moved_bytes" not in uncounted.model_dump()
    assert seconds(uncounted, RATES) == 2
    assert seconds(COUNTED, replace(RATES, memory_copy_bytes_per_s=None)) == 2
    assert seconds(COUNTED, replace(RATES, device="cuda:0")) == 2
    assert seconds(COUNTED, replace(RATES, flops=())) is None

"""Encoders in data parallel, on real processes: empty ranks, order, and faults that no rank waits for."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placewise.executor.distributed.agreement import rank_and_size
from placewise.executor.distributed.encoder import DataParallelEncoder, Rows, spread
from placewise.executor.simulation.accelerator import simulated_device
from placewise.plans.errors import ExecutionError
from placewise.plans.units import MIB

# By the names that other processes import them by.
from placewise.tests.encoders import FORMS, PATCH, ROWS, encode_on_ranks, faults_on_ranks, images, plain
from placewise.tests.ranks import on_ranks
from torch import distributed as dist

from .modules import SIM, on_meta

COUNTS = (0, 1, 2, 3, 7)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_all_embeddings_in_order(tmp_path: Path, size: int) -> None:
    """Of fewer items than ranks too, and of none at all."""
    for found in on_ranks(size, tmp_path, encode_on_ranks, COUNTS):
        for form, rows in ROWS.items():
            for count in COUNTS:
                expected = torch.cat([rows.new(0, torch.device("cpu")), *plain(form, images(count))])
                assert found[form, count].dtype == rows.dtype
                assert found[form, count].shape == expected.shape
                assert torch.equal(found[form, count], expected)


@pytest.mark.parametrize("form", FORMS)
def test_without_any_item_the_result_is_on_the_compute_device(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 3: wherever weights and inputs are, and there is no row that it could be read off."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    simulated_device(1, capacity_bytes=MIB)
    dist.init_process_group("cpu:gloo,sim:gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = DataParallelEncoder(partial(plain, form), rows=ROWS[form], device=SIM)([])
    finally:
        dist.destroy_process_group()
    assert (str(found.device), found.shape, found.dtype) == (SIM, (0, *ROWS[form].shape), ROWS[form].dtype)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_on_meta_tells_the_rows(form: str) -> None:
    assert Rows.of(on_meta(FORMS[form])(torch.empty(4, PATCH, device="meta"))) == ROWS[form]


def test_a_fault_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    zero, one, two = on_ranks(3, tmp_path, faults_on_ranks)
    own = {
        "device": (
            "DeviceMismatchError",
            "rank 1: embedding 0 is on meta, not on cpu\n"
            "hint: make it on the compute device, wherever the inputs and the weights are",
        ),
        "dtype": (
            "ExecutionError",
            "rank 1: embedding 0 is (1, 4, 6) of torch.float64, and its rows are declared as (4, 6) of torch.float32\n"
            "hint: declare what the encoder gives: Rows.of(a run on meta)",
        ),
        "raised": ("ValueError", "no such image"),
    }
    for fault, (kind, message) in own.items():
        assert one[fault] == (kind, message)
        assert zero[fault] == two[fault] == ("ExecutionError", f"failed at other ranks: rank 1: {kind}: {message}")
    for rank, found in ((0, zero), (2, two)):
        assert found["items"] == (
            "ExecutionError",
            f"rank 1 has 5 items that cost 5, rank {rank} 4 that cost 4\n"
            "hint: call the encoder with the same items on every rank",
        )
        assert found["torch's own"] == ("RuntimeError", "No backend type associated with device type cpu")
        assert found["backend"] == (
            "DeviceMismatchError",
            f"rank {rank}: embeddings are to be on cpu, and the group's backends are cuda:gloo\n"
            "hint: give the compute device, or a group with a backend for it",
        )
    assert zero["after"] == one["after"] == two["after"]  # nobody is left behind in a collective


def test_without_a_group_there_are_no_ranks() -> None:
    with pytest.raises(ExecutionError, match=r"this process is no rank: torch\.distributed is not set up"):
        rank_and_size()


@given(costs=st.lists(st.integers(0, 99)), ranks=st.integers(1, 9))
def test_items_are_spread_once_and_evenly(costs: list[int], ranks: int) -> None:
    shares = spread(costs, ranks)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[item] for item in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)

import pytest
from placewise.planner.calibrating.given import given_calibration
from placewise.planner.costs import compute_seconds
from placewise.planner.rates import Rates, rates_of
from placewise.plans.calibration import Calibration, ComputeRate, DiskRate, LinkRate, ReadMode
from placewise.plans.errors import InputError
from placewise.plans.pipeline import RowFlops, TracedActivations
from placewise.plans.units import MIB

from .questions import component_of


def disk(mode: ReadMode, chunk: int, depth: int, rate: float) -> DiskRate:
    return DiskRate(mode=mode, chunk_bytes=chunk * MIB, depth=depth, bytes_per_s=rate)


def measured(
    *,
    disks: tuple[DiskRate, ...] = (),
    links: tuple[LinkRate, ...] = (),
    compute: tuple[ComputeRate, ...] = (),
    pin_s_per_gib: float | None = None,
) -> Calibration:
    return Calibration(
        measured_at="2026-01-01T00:00:00+00:00",
        fingerprint="sha256:" + "0" * 64,
        disks=disks,
        links=links,
        compute=compute,
        pin_s_per_gib=pin_s_per_gib,
    )


@pytest.mark.parametrize("calibration", [None, measured()])
def test_what_was_not_measured_is_unknown(calibration: Calibration | None) -> None:
    rates = rates_of(calibration, "cuda:0")
    assert rates == Rates(device="cuda:0")
    assert rates.disk_bytes_per_s is None
    assert rates.fault_bytes_per_s is None
    assert rates.link_pageable_bytes_per_s is None
    assert rates.link_pinned_bytes_per_s is None
    assert rates.link_mapped_bytes_per_s is None
    assert rates.memory_copy_bytes_per_s is None
    assert rates.pin_s_per_gib is None
    assert rates.flops_per_s("BF16") is None


def test_the_fastest_way_of_cold_reads_counts() -> None:
    fastest = disk(ReadMode.direct, 4, 8, 3e9)
    disks = (disk(ReadMode.buffered, 1, 1, 1e9), fastest, disk(ReadMode.direct, 4, 1, 2e9))
    rates = rates_of(measured(disks=disks), "cpu")
    assert rates.disk == fastest
    assert rates.disk_bytes_per_s == 3e9


def test_reads_around_the_cache_go_before_faster_ones_through_it() -> None:
    around, through = disk(ReadMode.direct, 4, 4, 1e9), disk(ReadMode.buffered, 1, 4, 3e9)
    rates = rates_of(measured(disks=(through, around)), "cpu")
    assert (rates.disk, rates.buffered) == (around, through)
    assert rates_of(measured(disks=(through,)), "cpu").disk == through


def test_page_faults_are_no_way_of_cold_reads() -> None:
    faults = disk(ReadMode.faults, 4, 1, 9e9)
    rates = rates_of(measured(disks=(disk(ReadMode.faults, 4, 8, 10e9), faults)), "cpu")
    assert rates.disk is None
    assert rates.faults == faults
    assert rates.fault_bytes_per_s == 9e9


def test_page_faults_are_taken_for_no_faster_than_reads_into_slots() -> None:
    disks = (disk(ReadMode.faults, 4, 1, 2e9), disk(ReadMode.direct, 4, 8, 1.5e9))
    assert rates_of(measured(disks=disks), "cpu").fault_bytes_per_s == 1.5e9


def test_of_rates_that_cannot_be_told_apart_most_bytes_under_way_count_and_beyond_32_mib_the_fewest() -> None:
    chosen = disk(ReadMode.direct, 4, 8, 1.7e9)
    disks = (
        disk(ReadMode.direct, 1, 8, 1.5e9),
        disk(ReadMode.direct, 4, 1, 2e9),
        disk(ReadMode.direct, 16, 8, 1.9e9),
        disk(ReadMode.direct, 1, 4, 2.1e9),
        chosen,
    )
    assert rates_of(measured(disks=disks), "cpu").disk == chosen
    assert rates_of(measured(disks=disks[::-1]), "cpu").disk == chosen


def test_links_and_products_are_those_of_the_device() -> None:
    calibration = measured(
        links=(
            LinkRate(device="cuda:0", source="pageable", bytes_per_s=1e9),
            LinkRate(device="cuda:0", source="pinned", bytes_per_s=2e9),
            LinkRate(device="cuda:0", source="mapped", bytes_per_s=3e9),
            LinkRate(device="cuda:1", source="pageable", bytes_per_s=4e9),
        ),
        compute=(
            ComputeRate(device="cpu", dtype="F32", flops_per_s=1e12),
            ComputeRate(device="cuda:0", dtype="F32", flops_per_s=2e12),
        ),
        pin_s_per_gib=0.25,
    )
    first, second, cpu = (rates_of(calibration, device) for device in ("cuda:0", "cuda:1", "cpu"))
    assert (first.link_pageable_bytes_per_s, first.link_pinned_bytes_per_s, first.link_mapped_bytes_per_s) == (
        1e9,
        2e9,
        3e9,
    )
    assert (second.link_pageable_bytes_per_s, second.link_pinned_bytes_per_s) == (4e9, None)
    assert cpu.link_pageable_bytes_per_s is None
    assert (first.flops_per_s("F32"), second.flops_per_s("F32"), cpu.flops_per_s("F32")) == (2e12, None, 1e12)
    assert first.flops_per_s("BF16") is None
    assert first.pin_s_per_gib == 0.25


def test_mapped_copies_are_as_pageable_ones_where_not_measured() -> None:
    links = (LinkRate(device="cuda:1", source="pageable", bytes_per_s=4e9),)
    assert rates_of(measured(links=links), "cuda:1").link_mapped_bytes_per_s == 4e9


def test_given_rates_hold_and_the_others_stay_unknown() -> None:
    calibration = given_calibration(disk_bytes_per_s=2e9, link_bytes_per_s=25e9, device="cuda:0", flops_per_s=1e14)
    assert calibration.given
    assert (calibration.measured_at, calibration.fingerprint) == ("given", "given")
    rates = rates_of(calibration, "cuda:0")
    assert rates.disk == disk(ReadMode.direct, 4, 4, 2e9)
    assert rates.fault_bytes_per_s is None
    assert rates.memory_copy_bytes_per_s is None
    assert rates.pin_s_per_gib is None
    assert {rates.link_pageable_bytes_per_s, rates.link_pinned_bytes_per_s, rates.link_mapped_bytes_per_s} == {25e9}
    assert {rates.flops_per_s(dtype) for dtype in ("F32", "BF16", "F16")} == {1e14}
    assert rates_of(calibration, "cpu").flops_per_s("F32") is None


def test_nothing_given_is_nothing_known() -> None:
    assert rates_of(given_calibration(), "cpu") == Rates(device="cpu")


def test_given_products_are_those_of_the_cpu_without_a_device() -> None:
    assert rates_of(given_calibration(flops_per_s=1e12), "cpu").flops_per_s("BF16") == 1e12


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_a_given_rate_is_above_zero(rate: float) -> None:
    with pytest.raises(InputError) as caught:
        given_calibration(disk_bytes_per_s=rate)
    assert str(caught.value) == f"the disk rate {rate:g} is not a number above zero\nhint: leave out what is not known"


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_given_link_leads_to_an_accelerator(device: str | None) -> None:
    with pytest.raises(InputError) as caught:
        given_calibration(link_bytes_per_s=1e9, device=device)
    assert str(caught.value) == (
        "a link rate needs the accelerator that the link leads to\nhint: name it, such as cuda:0"
    )


def test_products_of_few_rows_are_taken_from_the_nearest_two() -> None:
    thin = [(1, 1e9), (8, 8e9), (64, 4e10)]
    rates = rates_of(
        measured(
            compute=(
                ComputeRate(device="cpu", dtype="BF16", flops_per_s=1e11),
                *(ComputeRate(device="cpu", dtype="BF16", rows=rows, flops_per_s=rate) for rows, rate in thin),
            )
        ),
        "cpu",
    )
    assert [rates.flops_per_s("BF16", rows) for rows in (1, 8, 64, 4096)] == pytest.approx([1e9, 8e9, 4e10, 1e11])
    assert rates.flops_per_s("BF16", 4) == pytest.approx(4e9)
    assert rates.flops_per_s("BF16") == 1e11
    assert rates.flops_per_s("F32", 8) is None


def test_a_pass_takes_the_time_of_its_products() -> None:
    products = (
        ComputeRate(device="cpu", dtype="F32", flops_per_s=1e12),
        ComputeRate(device="cpu", dtype="F32", rows=1, flops_per_s=1e9),
        ComputeRate(device="cpu", dtype="F32", rows=64, flops_per_s=1e11),
    )
    rates = rates_of(measured(compute=products), "cpu")
    part = component_of("llm", fixed=64, passes=3).model_copy(
        update={"dtype_bytes": {"F32": 64}, "class_name": "LlamaForCausalLM"}
    )
    prefill = TracedActivations(peak_bytes=0, flops=3 * 10**11, row_flops=(RowFlops(rows=64, flops=10**11),))
    assert compute_seconds(part.model_copy(update={"activations": prefill}), rates) is None
    later = prefill.model_copy(update={"later_row_flops": (RowFlops(rows=1, flops=10**9),)})
    # The first pass takes 0.2 s of large products and 1 s of thin ones; each later one 1 s.
    assert compute_seconds(part.model_copy(update={"activations": later}), rates) == pytest.approx(3.2 / 3)
    encoder = part.model_copy(update={"activations": prefill, "class_name": "T5EncoderModel"})
    assert compute_seconds(encoder, rates) == pytest.approx(1.2)


def test_fresh_memory_costs_the_cpu_where_it_is_taken() -> None:
    calibration = measured().model_copy(update={"touch_s_per_gib": 0.25})
    found = {
        (device, fresh): rates_of(calibration, device, fresh=fresh).touch_s_per_gib
        for device in ("cpu", "cuda:0")
        for fresh in (False, True)
    }
    assert {case for case, cost in found.items() if cost is not None} == {("cpu", True)}

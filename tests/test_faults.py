"""Faults of other placement tools, each named by its public report, that planning must not have."""

from pathlib import Path

import pytest
from placewise.models.pipeline import read_pipeline
from placewise.plans.errors import InputError
from placewise.plans.machine import Cap, CapKind, Machine, Measured
from placewise.plans.pipeline import Workload
from placewise.plans.policy import Home, Override
from placewise.plans.units import GIB, MIB

from .checkpoints import write_safetensors
from .questions import (
    component_of,
    cuda,
    fates,
    fits,
    host_of,
    machine_of,
    mps,
    placement,
    plan_of,
    policy_of,
    refused,
    stack_of,
)
from .timed import calibrated, computing, disk_of

LAYERS = stack_of("blocks", *[GIB] * 8)


def test_sizes_of_small_dtypes_are_not_zero(tmp_path: Path) -> None:
    """accelerate PR 4237 (sub-byte types count nothing) and transformers 37074 (a bool counts an eighth of a byte)."""
    path = write_safetensors(
        tmp_path / "model.safetensors", {"a": ("F4", (1000,)), "b": ("BOOL", (1000,)), "c": ("F8_E4M3", (1000,))}
    )
    component = read_pipeline(path, workload=Workload()).components[0]
    assert dict(component.dtype_bytes) == {"F4": 500, "BOOL": 1000, "F8_E4M3": 1000}


def test_a_buffer_beside_submodules_is_placed_too(tmp_path: Path) -> None:
    """accelerate 3956 and 4014: a split module's own buffers had no device."""
    tensors = {"blocks.0.weight": ("F32", (4,)), "blocks.1.weight": ("F32", (4,)), "blocks.scale": ("F32", (1,))}
    component = read_pipeline(write_safetensors(tmp_path / "m.safetensors", tensors), workload=Workload()).components[0]
    assert component.fixed_bytes == 4
    assert fates(plan_of(machine_of(GIB), component), "model") == [
        "fixed device/always",
        "blocks[0:2] device/always",
    ]


@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_gap_in_device_numbers_is_no_matter(index: int) -> None:
    """accelerate 4297: with devices 0 and 2 everything went to 0, or a KeyError came."""
    plan = plan_of(machine_of(64 * GIB, cuda(12 * GIB, index=index)), component_of("a", LAYERS))
    assert {placement.compute_device for placement in plan.placements} == {f"cuda:{index}"}
    fits(plan)


def test_activations_are_part_of_the_budget() -> None:
    """accelerate 473: a device was filled to the brim with weights, and the forward ran out of memory."""
    free = 8 * GIB
    bare = policy_of("auto", device_reserve_bytes=0)
    full = plan_of(machine_of(64 * GIB, cuda(free)), component_of("a", LAYERS, activations=0), policy=bare)
    assert fates(full, "a") == ["blocks[0:8] device/always"]
    spared = plan_of(machine_of(64 * GIB, cuda(free)), component_of("a", LAYERS, activations=MIB), policy=bare)
    assert fates(spared, "a") != ["blocks[0:8] device/always"]
    assert (spared.phases[0].predicted.peak_bytes["cuda:0"] or 0) <= free


def test_a_given_limit_is_kept_to_the_byte() -> None:
    """transformers PR 37982: unused reserved bytes were added on top of the user's limit."""
    for free in (7 * GIB, 7 * GIB + 1, 8 * GIB - 1):
        plan = plan_of(machine_of(64 * GIB, cuda(free)), component_of("a", LAYERS, activations=0))
        assert all((phase.predicted.peak_bytes["cuda:0"] or 0) <= free for phase in plan.phases)


def test_the_containers_memory_counts_and_not_the_hosts() -> None:
    """ComfyUI 14938 and psutil 2100: the host's memory was planned with, and the container was killed."""
    cap = Cap(
        hierarchy="v2",
        path="/pod",
        kind=CapKind.limit,
        limit_bytes=512 * MIB,
        usage_bytes=100 * MIB,
        reclaimable_bytes=0,
        headroom_bytes=412 * MIB,
    )
    host = host_of(Measured(value=cap.headroom_bytes, source="cgroup")).model_copy(update={"caps": (cap,)})
    plan = plan_of(Machine(host=host), component_of("a", LAYERS))
    assert fates(plan, "a") == ["blocks[0:8] mapped/always"]


def test_unified_memory_is_one_budget() -> None:
    """accelerate 2778: the host's memory was the device's budget, and both were spent."""
    plan = plan_of(machine_of(16 * GIB, mps(12 * GIB)), component_of("a", LAYERS))
    assert [budget.axis for budget in plan.budgets] == ["host"]
    assert "pageable" not in " ".join(fates(plan, "a"))


def test_part_of_a_model_is_placed_where_the_whole_does_not_fit() -> None:
    """accelerate 1548: everything went to disk, although half of it fitted."""
    plan = plan_of(machine_of(7 * GIB), component_of("a", LAYERS), policy=policy_of("auto", reserve_bytes=0))
    assert fates(plan, "a") == ["blocks[0:6] device/always", "blocks[6:8] mapped/always"]


def test_a_component_that_is_too_large_for_its_device_is_streamed_and_not_dropped_to_the_cpu() -> None:
    """diffusers 9195, unsloth 8081: it was offloaded as a whole, or ran on the CPU, though its layers fit."""
    plan = plan_of(machine_of(64 * GIB, cuda(6 * GIB)), component_of("a", LAYERS, passes=20, activations=0))
    assert plan.placements[0].compute_device == "cuda:0"
    assert {segment.hold for segment in plan.placements[0].segments} >= {"always", "layer"}


def test_an_override_names_whole_segments() -> None:
    """accelerate's device maps match by prefix: {"vae": ...} caught vae_other too."""
    vae, other = component_of("vae", fixed=GIB), component_of("vae_other", fixed=GIB)
    plan = plan_of(machine_of(64 * GIB), vae, other, policy=policy_of("auto", Override(select="vae", home=Home.mapped)))
    assert fates(plan, "vae") == ["fixed mapped/always"]
    assert fates(plan, "vae_other") == ["fixed device/always"]
    with pytest.raises(InputError, match="the override 'va' matches nothing"):
        plan_of(machine_of(64 * GIB), vae, policy=policy_of("auto", Override(select="va", home=Home.mapped)))


def test_nothing_is_promised_that_does_not_fit() -> None:
    """Where others warn and go on, and are killed, the plan is refused with need and have."""
    verdict = refused(plan_of(machine_of(64 * GIB, cuda(GIB // 2)), component_of("a", LAYERS, activations=0)))
    (short,) = verdict.short
    assert (short.axis, short.need_bytes) == ("cuda:0", GIB)
    assert short.have_bytes < GIB // 2


def test_components_are_spread_over_the_accelerators_that_have_room() -> None:
    """diffusers 9127: what the first device could not take went to the CPU, although the second was free."""
    sizes = {"a": 50, "b": 45, "c": 30, "d": 30}
    components = [component_of(name, fixed=size * GIB, activations=0) for name, size in sizes.items()]
    plan = plan_of(machine_of(256 * GIB, cuda(62 * GIB), cuda(120 * GIB, index=1)), *components)
    assert {tuple(fates(plan, name)) for name in sizes} == {("fixed device/always",)}
    assert {placement.compute_device for placement in plan.placements} == {"cuda:0", "cuda:1"}


def test_page_locked_copies_are_charged_what_is_locked_and_not_the_next_power_of_two() -> None:
    """vLLM 56410, SGLang: 40 GiB were planned, 53 locked."""
    layers = stack_of("blocks", *[5 * GIB] * 8)
    machine = calibrated(
        machine_of(64 * GIB, cuda(11 * GIB)), *disk_of(faults=5e8), pageable=4e9, pinned=12e9, mapped=3e9
    )
    component = computing(component_of("a", layers, passes=20), 0.1)
    plan = plan_of(machine, component, policy=policy_of("auto", device_reserve_bytes=0, slots=1))
    pinned = [segment for segment in placement(plan, "a").segments if segment.home is Home.pinned]
    count = sum(stop - start for segment in pinned for start, stop in segment.layers)
    assert count >= 5
    assert plan.phases[0].predicted.peak_bytes["pinned"] == count * 5 * GIB


def test_what_runs_often_is_held_and_what_runs_once_is_streamed() -> None:
    """unsloth 8081: the text encoder counted as resident, so the transformer was offloaded for twenty steps."""
    encoder = component_of("encoder", stack_of("layers", *[GIB] * 62), activations=0)
    transformer = component_of("transformer", stack_of("blocks", *[GIB // 2] * 12), passes=20, activations=0)
    plan = plan_of(machine_of(64 * GIB, cuda(12 * GIB)), encoder, transformer)
    assert {segment.hold for segment in placement(plan, "transformer").segments} <= {"always", "phase"}
    assert "layer" in {segment.hold for segment in placement(plan, "encoder").segments}


def test_an_override_of_a_part_goes_before_that_of_the_whole() -> None:
    """accelerate: a map with a parent and its child failed when it was dispatched."""
    whole, part = Override(select="a", home=Home.device), Override(select="a.blocks", home=Home.mapped)
    component = component_of("a", LAYERS, fixed=GIB)
    for overrides in ((whole, part), (part, whole)):
        plan = plan_of(machine_of(64 * GIB), component, policy=policy_of("auto", *overrides))
        assert fates(plan, "a") == ["fixed device/always", "blocks[0:8] mapped/always"]

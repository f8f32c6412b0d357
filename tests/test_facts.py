"""What a pipeline and a machine must not say: sizes that are missing or impossible, names that stand for two things."""

import sys
from pathlib import Path

import pytest
from placewise.planner.measuring.facts import measure_machine
from placewise.planner.measuring.host import Memory
from placewise.plans.codec import explain_validation
from placewise.plans.machine import Machine
from placewise.plans.pipeline import LayerSize, Pipeline, Stack
from placewise.plans.units import MIB
from pydantic import ValidationError

from .hosts import available
from .questions import GIB, component_of, cuda, machine_of, stack_of


def size_of(start: int, stop: int) -> LayerSize:
    return LayerSize(layers=(start, stop), layer_bytes=1, packed_bytes=64)


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (size_of(0, 2),),
        (size_of(0, 4),),
        (size_of(1, 3),),
        (size_of(0, 1), size_of(2, 3)),
        (size_of(0, 2), size_of(1, 3)),
        (size_of(1, 3), size_of(0, 1)),
    ],
)
def test_a_missing_size_is_an_error(sizes: tuple[LayerSize, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        Stack(name="blocks", layers=3, extents=1, sizes=sizes)
    assert explain_validation(caught.value) == (
        "Value error, the sizes of 'blocks' do not cover its 3 layers in order, each once in 'the document'"
    )


def test_packed_bytes_are_not_fewer_than_stored_ones() -> None:
    message = "Value error, 63 packed bytes cannot hold 64 stored ones in 'the document'"
    with pytest.raises(ValidationError) as caught:
        LayerSize(layers=(0, 1), layer_bytes=64, packed_bytes=63)
    assert explain_validation(caught.value) == message
    with pytest.raises(ValidationError) as caught:
        component_of("vae", fixed=64, fixed_packed=63)
    assert explain_validation(caught.value) == message


def test_two_components_of_one_name() -> None:
    with pytest.raises(ValidationError) as caught:
        Pipeline(name="toy", components=(component_of("vae", fixed=1), component_of("vae", fixed=2)), edges=())
    assert explain_validation(caught.value) == "Value error, two components are named 'vae' in 'the document'"


def test_two_stacks_of_one_name() -> None:
    with pytest.raises(ValidationError) as caught:
        component_of("vae", stack_of("blocks", 1), stack_of("blocks", 2))
    assert explain_validation(caught.value) == "Value error, two stacks of 'vae' are named 'blocks' in 'the document'"


@pytest.mark.parametrize("device", ["cpu", "host", "page_cache", "cuda:0"])
def test_a_device_by_the_name_of_another_axis(device: str) -> None:
    taken = cuda(1).model_copy(update={"device": device})
    with pytest.raises(ValidationError) as caught:
        Machine(host=machine_of(0).host, accelerators=(cuda(1), taken))
    assert explain_validation(caught.value) == f"Value error, the device name '{device}' is taken in 'the document'"


def test_what_importing_torch_takes_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")  # a process that has imported it is measured as it is
    """Of 1 GiB that a cgroup leaves."""
    monkeypatch.setattr(
        "placewise.planner.measuring.host.read_memory", lambda: Memory(total_bytes=GIB, available_bytes=GIB)
    )
    imported = measure_machine(root=tmp_path, accelerators=False).host
    monkeypatch.delitem(sys.modules, "torch")
    before = measure_machine(root=tmp_path, accelerators=False).host
    assert (available(imported), available(before)) == (GIB, GIB - 130 * MIB)
    assert set(before.notes) - set(imported.notes) == {"130 MiB of the host are kept for importing torch"}

import io
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from placewise.planner.calibrating.calibrate import calibrate
from placewise.planner.calibrating.compute import here, measure_copy, measure_links, measure_products
from placewise.planner.calibrating.effort import USUAL
from placewise.planner.calibrating.given import given_calibration
from placewise.planner.measuring.accelerators import given_accelerator
from placewise.plans.calibration import ReadMode
from placewise.plans.calibration_text import print_calibration
from placewise.plans.errors import InputError
from placewise.plans.machine import Disk
from placewise.plans.units import GIB, MIB
from rich.console import Console

from .disks import LITTLE, dense, on_a_disk, sparse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="disk rates are measured on Linux alone")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return on_a_disk(tmp_path)


@pytest.fixture
def model(folder: Path) -> Path:
    return dense(folder / "model.safetensors", 8 * MIB)


def test_a_calibration_of_this_machine(model: Path) -> None:
    told: list[tuple[str, float]] = []
    before = model.read_bytes()
    found = calibrate(model, (), progress=lambda label, part: told.append((label, part)), effort=LITTLE)
    assert {rate.mode for rate in found.disks} >= {ReadMode.buffered, ReadMode.faults}
    assert all((rate.cpu_s_per_gib or 0) >= 0 for rate in found.disks)
    assert found.memory_copy_bytes_per_s is not None
    assert (found.touch_s_per_gib or 0) > 0
    assert {(rate.device, rate.dtype) for rate in found.compute} >= {("cpu", "F32"), ("cpu", "BF16")}
    assert (found.links, found.pin_s_per_gib, found.given) == ((), None, False)
    assert found.measured_at.endswith("+00:00")
    assert [part for _, part in told] == sorted(part for _, part in told)
    assert told[-1] == ("done", 1.0)
    assert model.read_bytes() == before
    assert list(model.parent.iterdir()) == [model]


def test_the_same_machine_has_the_same_fingerprint(model: Path) -> None:
    first, second = (calibrate(model, (), effort=LITTLE).fingerprint for _ in range(2))
    assert first == second


def test_a_simulated_accelerator_has_no_link(model: Path) -> None:
    found = calibrate(model, (given_accelerator("sim:0", MIB),), effort=LITTLE)
    assert found.links == ()
    assert {rate.device for rate in found.compute} == {"cpu"}
    assert "sim:0 is simulated or not here: its link and products were not measured" in found.notes


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        calibrate(tmp_path / "absent", (), effort=LITTLE)
    assert str(caught.value) == (
        f"{tmp_path}/absent: No such file or directory\nhint: give the path of a checkpoint that can be read"
    )


def test_network_file_systems_are_noted_and_not_faulted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch, Disk(filesystem="nfs4", network=True))
    found = calibrate(model, (), effort=LITTLE)
    assert ReadMode.faults not in {rate.mode for rate in found.disks}
    assert found.notes[0] == (
        "nfs4 is a network or FUSE file system: rates vary with what others do there, and page faults, the slowest "
        "way to read it, were not measured"
    )


def test_a_file_system_in_memory_is_no_disk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch, Disk(filesystem="tmpfs", network=False))
    found = calibrate(model, (), effort=LITTLE)
    assert found.disks == ()
    assert found.notes == ("the model is on tmpfs, which is memory: no disk was measured",)


def test_a_file_with_holes_is_not_read(folder: Path) -> None:
    model = sparse(folder / "model.safetensors", 8 * MIB)
    found = calibrate(model, (), effort=LITTLE)
    assert found.notes[0] == (
        "the checkpoint has holes: 4.00 MiB were written and read; a disk with a cache of its own may have answered "
        "from that"
    )
    assert found.disks
    assert list(folder.iterdir()) == [model]


def test_a_folder_that_refuses_the_file_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    model = sparse(folder / "model.safetensors", 8 * MIB)
    found = calibrate(model, (), effort=LITTLE)
    assert found.disks == ()
    assert found.notes == (
        f"the checkpoint has holes: {folder} cannot be written to (Permission denied), so no disk was measured",
    )
    assert found.memory_copy_bytes_per_s is not None


def test_links_copy_what_is_pageable_and_what_is_mapped(model: Path) -> None:
    # The CPU stands in for a device: what is copied, and from where, is the same.
    stand_in = given_accelerator("cuda:0", MIB).model_copy(update={"device": "cpu", "pinned_memory": False})
    links = measure_links((stand_in,), model, LITTLE)
    assert [(rate.device, rate.source) for rate in links.rates] == [("cpu", "pageable"), ("cpu", "mapped")]
    assert (links.pin_s_per_gib, links.notes) == (None, ())


def test_a_link_that_fails_is_said(model: Path) -> None:
    absent = given_accelerator("no_such_device:0", MIB)
    links = measure_links((absent,), model, LITTLE)
    assert links.rates == ()
    assert links.notes[0].startswith("no_such_device:0: not all copies could be measured: ")


def test_products_that_fail_are_said() -> None:
    products = measure_products(("no_such_device:0",), LITTLE)
    assert products.rates == ()
    assert [note.partition(" matrix")[0] for note in products.notes] == [
        f"no_such_device:0: no {dtype}" for dtype in ("F32", "BF16", "F16")
    ]


def test_memory_is_copied_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_copy(LITTLE) > 0
    monkeypatch.setitem(sys.modules, "torch", None)
    assert measure_copy(LITTLE) > 0


def test_accelerators_of_another_machine_are_not_here() -> None:
    assert here((given_accelerator("sim:0", 1), given_accelerator("no_such_device:0", 1))) == ()


def test_importing_costs_no_torch() -> None:
    code = "import sys, placewise.planner.calibrating.calibrate; sys.exit('torch' in sys.modules)"
    path = str(Path(__file__).resolve().parent.parent / ".src")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path, "PATH": ""})


def test_a_calibration_for_people(model: Path) -> None:
    given = given_calibration(disk_bytes_per_s=2 << 30, link_bytes_per_s=25 << 30, device="cuda:0", flops_per_s=1.5e14)
    text = io.StringIO()
    print_calibration(
        given.model_copy(update={"pin_s_per_gib": 0.25, "notes": ("a note",)}), Console(file=text, width=100)
    )
    assert [line.rstrip() for line in text.getvalue().splitlines()] == [
        "calibration: given",
        "disk, direct       2.00 GiB/s   4.00 MiB at a time, 4 at once",
        "memory copy        unknown",
        "link to cuda:0     25.0 GiB/s   from pageable memory",
        "link to cuda:0     25.0 GiB/s   from pinned memory",
        "link to cuda:0     25.0 GiB/s   from mapped memory",
        "pinning            0.25 s/GiB",
        "compute on cuda:0  150 TFLOP/s  F32",
        "compute on cuda:0  150 TFLOP/s  BF16",
        "compute on cuda:0  150 TFLOP/s  F16",
        "note: a note",
    ]
    text = io.StringIO()
    print_calibration(calibrate(model, (), effort=LITTLE), Console(file=text, width=120))
    assert "s/GiB of processor time" in text.getvalue()


def _on(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    def answer(_path: Path) -> Disk:
        return disk

    monkeypatch.setattr("placewise.planner.calibrating.calibrate.disk_of", answer)


def test_a_small_host_is_measured_with_little_memory() -> None:
    effort = USUAL.within(64 * MIB)
    assert effort.copy_bytes == 8 * MIB
    assert effort.chunk_bytes == (MIB,)
    assert USUAL.within(64 * GIB) == USUAL

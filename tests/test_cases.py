"""The examples of docs/cases: each runs as it stands, and says what its case is about."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from runpy import run_path

import pytest
from placewise.plans.units import MIB, parse_bytes

from .example_plans import REPOSITORY

Said = Callable[[str], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What an example prints."""

    def run(name: str) -> str:
        run_path(str(REPOSITORY / "docs" / "cases" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_device_is_where_it_computes(said: Said) -> None:
    text = said("compute_device")
    assert "text_encoder.embed_tokens: aten.embedding.default on sim:0 and cpu\n" in text
    assert re.search(r"rests: [1-9]\d* mistakes", text)
    assert "computes: 0 mistakes\n" in text
    assert "rest on cpu, and say sim:0\n" in text
    assert text.endswith("to the bit: True\n")


@pytest.mark.usefixtures("one_thread")
def test_unified_memory_has_one_slot_and_chunks(said: Said) -> None:
    text = said("unified_memory")
    ample, little = re.findall(r"in all: 1 slot, transformer in chunks of (\w+) tokens", text)
    assert ample == "all"
    assert int(little) < 1024
    assert "to the bit: True\n" in text
    assert re.findall(r"^refused: (\w+): hold phase", text, re.MULTILINE) == ["transformer", "video_vae"]


def test_a_rank_without_images_has_all_embeddings() -> None:
    ran = subprocess.run(
        [sys.executable, REPOSITORY / "docs" / "cases" / "idle_rank.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / ".src")},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    right = r"rank (\d): encoded (\d) of (\d), has \((\d), 64\) of torch.bfloat16 on cpu, right: True"
    found = [tuple(map(int, each)) for each in re.findall(right, ran.stdout)]
    assert found == [(0, 2, 3, 3), (0, 1, 1, 1), (0, 0, 0, 0), (1, 1, 3, 3), (1, 0, 1, 1), (1, 0, 0, 0)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="anonymous memory is read from /proc")
def test_weights_stay_on_the_mapping(said: Said) -> None:
    text = said("mapped_weights")
    assert re.search(r"256 GiB: device \S+ GiB\n", text)
    assert re.search(r"32 GiB: device \S+ GiB, mapped \S+ GiB\n", text)
    assert re.search(r"copies nothing: mapped 12\d GiB\n", text)
    loaded, used = (parse_bytes(size) for size in re.findall(r": (\S+ \w*B)", text.partition("nothing:")[2])[-2:])
    assert max(loaded, used) < 64 * MIB

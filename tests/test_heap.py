"""The C library's heap: freed blocks go back to the system, whatever it had learned before."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from placewise.executor.heap import chosen_by, leaves_little
from placewise.models.build import parameters_on_meta
from placewise.plans.machine import Unmeasurable
from placewise.plans.units import GIB, MIB

from .questions import BARE, component_of, host_of, machine_of, plan_of, policy_of

CODE = """
import ctypes, sys
from placewise.executor.heap import fix_heap
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
own = lambda: next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))
c.free(c.malloc(30 << 20))  # A block that was mapped and is freed raises the threshold to its size.
fixed = sys.argv[1] == "fix" and fix_heap()
blocks = [c.malloc(4 << 20) for _ in range(17)]
for block in blocks: ctypes.memset(block, 1, 4 << 20)
held = own()
for block in blocks[:-1]: c.free(block)
print(fixed, held - own())
"""

glibc = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the C library is not glibc")


def given_back(argument: str, **environment: str) -> tuple[bool, int]:
    """Whether the heap was fixed, and the bytes given back of 64 MiB freed below a block that stays."""
    kept = {name: value for name, value in os.environ.items() if not chosen_by({name: value})}
    env = {**kept, "PYTHONPATH": str(Path(__file__).parent.parent / ".src"), **environment}
    ran = subprocess.run([sys.executable, "-c", CODE, argument], env=env, capture_output=True, text=True, check=True)
    fixed, count = ran.stdout.split()
    return fixed == "True", int(count)


@glibc
def test_freed_blocks_are_given_back_only_by_a_fixed_heap() -> None:
    assert given_back("leave") <= (False, 4 * MIB)
    fixed, count = given_back("fix")
    assert fixed
    assert count >= 60 * MIB


@glibc
def test_the_environments_word_stands() -> None:
    fixed, count = given_back("fix", MALLOC_MMAP_THRESHOLD_=str(32 * MIB))
    assert not fixed
    assert count <= 4 * MIB


BUILD = """
import ctypes
from torch import nn
from placewise.models.build import parameters_on_meta
class Figures(ctypes.Structure): _fields_ = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t * 2)]
c = ctypes.CDLL(None)
c.mallinfo2.restype = Figures
with parameters_on_meta():
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.LayerNorm(512)) for _ in range(32)]
print(c.mallinfo2().fordblks[0])
"""


@glibc
def test_a_build_leaves_no_gaps_of_its_weights_size() -> None:
    """Freed one by one, with small blocks between them, they left as much as all layers take: 128 MiB."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / ".src")}
    ran = subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 16 * MIB


@pytest.mark.parametrize("make", [torch.empty, torch.zeros])
def test_what_a_build_maps_by_itself_is_as_torch_makes_it(make: Callable[..., torch.Tensor]) -> None:
    with parameters_on_meta():
        large = [make(512, 1024), make((1024, 1024), dtype=torch.bfloat16), make(MIB, dtype=torch.bool)]
        elsewhere = make(512, 1024, device="meta")
        with torch.device("meta"):
            there = make(512, 1024)
    assert [(each.shape, each.dtype, each.device.type) for each in large] == [
        ((512, 1024), torch.float32, "cpu"),
        ((1024, 1024), torch.bfloat16, "cpu"),
        ((MIB,), torch.bool, "cpu"),
    ]
    assert not any(each.any() for each in large)
    assert all(each.fill_(1).all() for each in large)
    assert elsewhere.is_meta
    assert there.is_meta


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, False),
        ({"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, False),
        ({"MALLOC_ARENA_MAX": "1"}, True),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0:glibc.malloc.trim_threshold=1"}, True),
    ],
)
def test_which_environments_set_the_heap_up(environment: dict[str, str], *, chosen: bool) -> None:
    assert chosen_by(environment) == chosen


@pytest.mark.parametrize(
    ("host", "activations", "little"),
    [(5 * GIB, None, True), (5 * GIB + 1, None, True), (5 * GIB + 2, None, False), (9 * GIB, 4 * GIB, True)],
)
def test_a_heap_is_fixed_where_gaps_may_exceed_what_is_left(
    host: int, activations: int | None, *, little: bool
) -> None:
    """Of 3 GiB that are copied, and activations."""
    part = component_of("encoder", fixed=3 * GIB + 2, activations=activations)
    assert leaves_little(plan_of(machine_of(host), part, policy=policy_of("auto", **BARE))) == little


def test_an_unknown_host_has_little() -> None:
    assert leaves_little(plan_of(machine_of(host_of(Unmeasurable(why="not asked"))), component_of("encoder", fixed=1)))

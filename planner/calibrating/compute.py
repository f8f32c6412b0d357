"""Copies and matrix products, timed with torch, which is imported only when something is measured."""

import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...plans.calibration import ComputeRate, LinkRate
from ...plans.machine import Accelerator
from ...plans.units import GIB, MIB
from ...policies.admission import CPU
from .effort import Effort

if TYPE_CHECKING:
    import torch


_SIMULATED = "sim"
_SMALLEST_MATMUL = 256
_FRESH_BYTES = 4 * MIB
_STEADY_PART = _THIN_PART = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of the accelerators that are here. `pin_s_per_gib` is None where no memory could be pinned."""

    rates: tuple[LinkRate, ...] = ()
    pin_s_per_gib: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Matrix products by device and dtype. What a device cannot multiply is in the notes."""

    rates: tuple[ComputeRate, ...] = ()
    notes: tuple[str, ...] = ()


def measure_copy(effort: Effort) -> float:
    """Bytes per second of a copy from memory to memory, by torch where it is installed."""
    count = effort.copy_bytes
    try:
        import torch
    except ImportError:
        source, target = memoryview(bytes(count)), memoryview(bytearray(count))

        def copy() -> None:
            target[:] = source
    else:
        from_, to = torch.ones(count, dtype=torch.uint8), torch.ones(count, dtype=torch.uint8)

        def copy() -> None:
            to.copy_(from_)

    return count / _best_s(copy, effort.repeats)


def measure_touch(effort: Effort) -> float:
    """Seconds per GiB of fresh memory in blocks of some MiB, each mapped, written to page by page, and given back."""
    blocks = max(1, effort.copy_bytes // _FRESH_BYTES)
    zeros = bytes(len(range(0, _FRESH_BYTES, mmap.PAGESIZE)))

    def touch() -> None:
        for _ in range(blocks):
            with mmap.mmap(-1, _FRESH_BYTES) as block:
                block[:: mmap.PAGESIZE] = zeros

    return _best_s(touch, effort.repeats) * GIB / (blocks * _FRESH_BYTES)


def here(accelerators: tuple[Accelerator, ...]) -> tuple[Accelerator, ...]:
    """Those that torch can use in this process: not the simulated ones, and not those of another machine."""
    real = [each for each in accelerators if each.kind != _SIMULATED]
    if not real:
        return ()
    import torch

    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None:
        return ()
    names = {f"{current.type}:{index}" for index in range(torch.accelerator.device_count())}
    return tuple(each for each in real if each.device in names)


def measure_links(accelerators: tuple[Accelerator, ...], file: Path | None, effort: Effort) -> Links:
    """Copies to each accelerator from pageable, pinned and mapped memory, all of it touched before.

    Args:
        accelerators: devices that are here; each needs `effort.copy_bytes` free.
        file: what is mapped for the mapped copies; without it there are none.
        effort: how much is copied, and how often.
    """
    rates: list[LinkRate] = []
    notes: list[str] = []
    pinning: list[float] = []
    for accelerator in accelerators:
        try:
            # One at a time, so that what was measured before an error stays.
            for link in _links_of(accelerator, file, effort, pinning):
                rates.append(link)
        except RuntimeError as error:
            notes.append(f"{accelerator.device}: not all copies could be measured: {_first_line(error)}")
    return Links(rates=tuple(rates), pin_s_per_gib=min(pinning, default=None), notes=tuple(notes))


def measure_products(devices: tuple[str, ...], effort: Effort) -> Products:
    """Square matrix products in F32, BF16 and F16 on each device, and those of few rows; the best of a few.

    The size is the largest that stays below `effort.compute_s`, so that a dtype which the device only emulates does
    not take minutes.
    """
    import torch

    rates: list[ComputeRate] = []
    notes: list[str] = []
    for device in devices:
        for name, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)):
            try:
                found: list[tuple[int | None, float]] = [(None, _flops_per_s(device, dtype, effort))]
                found += [(rows, _thin_flops_per_s(device, dtype, rows, effort)) for rows in effort.rows]
            except (RuntimeError, TypeError) as error:
                notes.append(f"{device}: no {name} matrix product: {_first_line(error)}")
            else:
                rates += (
                    ComputeRate(device=device, dtype=name, rows=rows, flops_per_s=flops_per_s)
                    for rows, flops_per_s in found
                )
    return Products(rates=tuple(rates), notes=tuple(notes))


def _links_of(accelerator: Accelerator, file: Path | None, effort: Effort, pinning: list[float]) -> Iterator[LinkRate]:
    import torch

    count = effort.copy_bytes
    target = torch.empty(count, dtype=torch.uint8, device=accelerator.device)

    def rate(kind: Literal["pageable", "pinned", "mapped"], source: "torch.Tensor") -> LinkRate:
        into = target[: source.numel()]

        def copy() -> None:
            into.copy_(source, non_blocking=kind == "pinned")
            _synchronize(accelerator.device)

        seconds = _best_s(copy, effort.repeats)
        return LinkRate(device=accelerator.device, source=kind, bytes_per_s=source.numel() / seconds)

    yield rate("pageable", torch.ones(count, dtype=torch.uint8))
    if file is not None and (length := min(count, file.stat().st_size)) > 0:
        with file.open("rb") as opened:
            # A private copy is never written; it only keeps torch from warning of read-only memory.
            mapping = mmap.mmap(opened.fileno(), length, access=mmap.ACCESS_COPY)
        # The first copy, which does not count, brings the pages into memory.
        yield rate("mapped", torch.frombuffer(mapping, dtype=torch.uint8))
    if accelerator.pinned_memory:
        # What torch keeps of earlier pinned memory would be handed out at no cost.
        torch.accelerator.empty_host_cache()
        begun = time.perf_counter()
        pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        pinning.append((time.perf_counter() - begun) * GIB / count)
        yield rate("pinned", pinned.fill_(1))


def _flops_per_s(device: str, dtype: "torch.dtype", effort: Effort) -> float:
    import torch

    size, largest = _SMALLEST_MATMUL, effort.matmul_size * (1 if device == CPU else 2)
    best = 0.0
    while True:
        left = torch.ones((size, size), dtype=dtype, device=device)
        right = torch.ones((size, size), dtype=dtype, device=device)
        out = torch.empty((size, size), dtype=dtype, device=device)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(left, right, out=out)  # noqa: B023 called before the loop goes on
            _synchronize(device)

        seconds = _best_s(lambda: multiply(1), effort.repeats)
        # To start a product and to wait for it costs time of its own, which several in a row share.
        times = max(1, min(64, int(_STEADY_PART * effort.compute_s / seconds)))
        if times > 1:
            seconds = _best_s(lambda: multiply(times), effort.repeats) / times  # noqa: B023 called at once
        best = max(best, 2 * size**3 / seconds)
        if size * 2 > largest or seconds * 8 > effort.compute_s:
            return best
        size *= 2


def _thin_flops_per_s(device: str, dtype: "torch.dtype", rows: int, effort: Effort) -> float:
    """A few rows by many weights, more of them in turn than caches hold, wide and narrow again as layers of models are.

    Wide products are up to a fifth slower than square ones of as many weights.
    """
    import torch

    narrow, wide = effort.matmul_size // 2, effort.matmul_size * 2
    count = max(1, effort.copy_bytes // (narrow * wide * dtype.itemsize))
    shapes = islice(cycle(((wide, narrow), (narrow, wide))), count)
    weights = [torch.full(shape, 1 / shape[1], dtype=dtype, device=device) for shape in shapes]
    ones = torch.ones((rows, narrow), dtype=dtype, device=device)

    def multiply() -> None:
        hidden = ones
        for weight in weights:
            hidden = torch.nn.functional.linear(hidden, weight)
        _synchronize(device)

    # A dtype that is only emulated would take long.
    begun = time.perf_counter()
    torch.nn.functional.linear(ones, weights[0])
    _synchronize(device)
    del weights[max(1, int(_THIN_PART * effort.compute_s / max(time.perf_counter() - begun, 1e-9))) :]
    return 2 * rows * narrow * wide * len(weights) / _best_s(multiply, effort.repeats)


def _best_s(run: Callable[[], None], repeats: int) -> float:
    """The shortest of a few runs in seconds, after one that does not count."""
    run()
    seconds: list[float] = []
    for _ in range(max(1, repeats)):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return max(min(seconds), 1e-9)


def _synchronize(device: str) -> None:
    if device != CPU:
        import torch

        torch.accelerator.synchronize(device)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""Real ranks: processes with a gloo group over this machine's loopback. They are forked from one that has torch."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60


def on_ranks(size: int, folder: Path, job: Callable[..., object], *args: object, backend: str = "gloo") -> list[Any]:
    """What `job(rank, *args)` gives on each rank. The job is a function of an importable module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["placewise.executor.distributed.sharded", "torch._dynamo"])
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        context.Process(target=_run, args=(rank, size, str(folder), backend, job, args)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(_TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    import torch

    failed = "\n".join(path.read_text() for path in sorted(folder.glob("*.failed")))
    assert [process.exitcode for process in processes] == [0] * size, failed
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _run(rank: int, size: int, folder: str, backend: str, job: Callable[..., object], args: tuple[object, ...]) -> None:
    import torch
    from torch import distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_TIMEOUT_S / 2),
        )
        torch.save(job(rank, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        (Path(folder) / f"{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def refused(call: Callable[[], object]) -> tuple[str, str]:
    """The kind and the message of the one error that a call ends with."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")

"""Case 3: a rank without images takes part as any other, with an empty embedding of the right kind."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import placewise
import torch
from placewise.executor.distributed.encoder import DataParallelEncoder, Rows
from placewise.models.reference.components import components_of, save
from torch import distributed as dist
from torch import multiprocessing

RANKS, GRID = 2, (2, 2)


def rank_main(rank: int, name: str) -> None:
    """Plan together, load, and encode three images, then one, then none."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=rank, world_size=RANKS)
    plan = placewise.plan_together(Path(name))
    pipeline = placewise.load(plan, name)
    tower: Any = pipeline["text_encoder"].get_submodule("visual")
    device, sample = pipeline.device("text_encoder"), torch.empty(4, 48, dtype=torch.bfloat16, device="meta")
    # A run on meta tells what a row is: a rank without images has none to read it off.
    rows = Rows.of(components_of("tiny")["text_encoder"].bfloat16().get_submodule("visual")(sample, (GRID,)))
    here: list[int] = []

    def encode(images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        here.append(len(images))
        return [tower(image.to(device), (GRID,)) for image in images]

    encoder = DataParallelEncoder(encode, rows=rows, device=device)
    for count in (3, 1, 0):
        images = [torch.full((4, 48), 0.1 * number, dtype=torch.bfloat16) for number in range(count)]
        here.clear()
        embeddings = encoder(images)
        with torch.no_grad():
            alone = torch.cat([rows.new(0, device), *(tower(image.to(device), (GRID,)) for image in images)])
        shape, dtype, same = tuple(embeddings.shape), embeddings.dtype, torch.equal(embeddings, alone)
        Path(name, f"{rank}.txt").open("a").write(
            f"rank {rank}: encoded {sum(here)} of {count}, has {shape} of {dtype} on {embeddings.device}, right: {same}\n"
        )
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, and print what each has seen."""
    with tempfile.TemporaryDirectory() as name:
        save(Path(name), "tiny", seed=0)
        multiprocessing.spawn(rank_main, (name,), nprocs=RANKS)
        print(*(Path(name, f"{rank}.txt").read_text() for rank in range(RANKS)), sep="", end="")


if __name__ == "__main__":
    main()

"""Case 3: a rank without images takes part as any other, with an empty embedding of the right kind."""

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import placewise
import torch
from placewise.executor.distributed.encoder import DataParallelEncoder, Rows
from placewise.models.reference.components import components_of, save
from torch import distributed as dist

RANKS, GRID = 2, (2, 2)


@torch.no_grad()
def rank_main(rank: int, name: str) -> list[str]:
    """Plan together, load, and encode three images, then one, then none."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{name}/store", timedelta(minutes=1), RANKS, rank)
    pipeline = placewise.load(placewise.plan_together(name), name)
    tower = pipeline["text_encoder"].get_submodule("visual")
    device, sample = pipeline.device("text_encoder"), torch.empty(4, 48, dtype=torch.bfloat16, device="meta")
    # A run on meta tells what a row is: a rank without images has none to read it off.
    rows = Rows.of(components_of("tiny")["text_encoder"].bfloat16().get_submodule("visual")(sample, (GRID,)))
    here, said = list[int](), list[str]()

    def encode(images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        here.append(len(images))
        return [tower(image.to(device), (GRID,)) for image in images]

    encoder = DataParallelEncoder(encode, rows=rows, device=device)
    for count in (3, 1, 0):
        images = [torch.full((4, 48), 0.1 * number, dtype=torch.bfloat16) for number in range(count)]
        here.clear()
        embeddings = encoder(images)
        alone = torch.cat([rows.new(0, device), *(tower(image, (GRID,)) for image in images)])
        kind = f"{tuple(embeddings.shape)} of {embeddings.dtype} on {embeddings.device}"
        said.append(f"rank {rank}: encoded {sum(here)} of {count}, has {kind}, right: {torch.equal(embeddings, alone)}")
    dist.destroy_process_group()
    return said


def main() -> None:
    """Start the ranks, and print what each has seen."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["placewise.executor.load", "torch.distributed"])
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(RANKS, mp_context=context) as pool:
        save(Path(name), "tiny", seed=0)
        for lines in pool.map(rank_main, range(RANKS), [name] * RANKS):
            print(*lines, sep="\n")


if __name__ == "__main__":
    main()

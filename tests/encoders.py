"""Small vision encoders in both forms that embeddings have, and what ranks do with them."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from placewise.executor.distributed.agreement import agree
from placewise.executor.distributed.encoder import DataParallelEncoder, Rows
from torch import distributed as dist
from torch import nn

from .modules import build
from .ranks import refused

PATCH = 8
"""Numbers in a patch."""

IMAGES = (5, 1, 3, 8, 2)
"""Patches of each image, in fours."""


class PackedRope(nn.Module):
    """Rows of `(reduction, hidden)`: a 2-d rope packs neighbouring patches into one row."""

    def __init__(self, reduction: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.reduction = reduction
        self.project = nn.Linear(PATCH, hidden)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.project(patches)
        return embedded.view(-1, self.reduction, embedded.shape[-1])


class Rope3d(nn.Module):
    """Rows of `(out_hidden,)`, in a dtype of its own."""

    def __init__(self, hidden: int = 6, out_hidden: int = 10) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(PATCH, hidden), nn.Linear(hidden, out_hidden)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.out(self.project(patches))
        return embedded.bfloat16()


FORMS = {"packed": PackedRope, "rope_3d": Rope3d}
ROWS = {"packed": Rows(shape=(4, 6), dtype=torch.float32), "rope_3d": Rows(shape=(10,), dtype=torch.bfloat16)}


def images(count: int) -> list[torch.Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4 * size, PATCH, generator=generator) for size in (IMAGES * 2)[:count]]


def plain(form: str, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Embeddings of some images, one by one."""
    module = build(FORMS[form])
    with torch.no_grad():
        return [module(item) for item in items]


def encode_on_ranks(rank: int, counts: Sequence[int]) -> dict[tuple[str, int], torch.Tensor]:
    """Embeddings of so many images in both forms."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for form in FORMS:
        encoder = DataParallelEncoder(partial(plain, form), rows=ROWS[form], device="cpu")
        for count in counts:
            items = images(count)
            found[form, count] = encoder(items, [len(item) for item in items])
    return found


def faults_on_ranks(rank: int) -> dict[str, tuple[str, str]]:
    """What each rank hears when rank 1 does wrong; all of them go on to the next fault."""
    rows = ROWS["packed"]

    def heard(wrong: object, items: int = 4) -> tuple[str, str]:
        def encode(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            found = plain("packed", given)
            if rank != 1:
                return found
            if isinstance(wrong, Exception):
                raise wrong
            return [each.to(wrong) for each in found]  # type: ignore[call-overload]

        return refused(lambda: DataParallelEncoder(encode, rows=rows, device="cpu")(images(items)))

    # What a rank without items met that made its empty result where the inputs were.
    group = cast(dist.ProcessGroup, dist.new_group(backend="cuda:gloo"))
    empty = rows.new(0, torch.device("cpu"))
    return {
        "torch's own": refused(lambda: dist.all_gather([empty], empty, group)),
        "device": heard("meta"),
        "dtype": heard(torch.float64),
        "raised": heard(ValueError("no such image")),
        "items": heard(torch.float32, items=4 + (rank == 1)),
        "backend": refused(lambda: DataParallelEncoder(partial(plain, "packed"), rows=rows, device="cpu", group=group)),
        "after": ("", str(agree(lambda: rank))),
    }

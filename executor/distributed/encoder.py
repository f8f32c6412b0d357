"""Encoders in data parallel: items are spread over ranks, and every rank gets all embeddings, in the items' order.

What decides where an empty result is, and of which shape and dtype, is declared and never read off an input: a rank
without items takes part in the collective as any other.
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import distributed as dist

from ...plans.errors import DeviceMismatchError, ExecutionError
from .agreement import agree, rank_and_size

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One row of an embedding: its shape, which is an embedding's without the first axis, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, embedding: torch.Tensor) -> "Rows":
        """The rows of an embedding that was made anywhere: of a run on meta, which takes no weights."""
        return cls(shape=tuple(embedding.shape[1:]), dtype=embedding.dtype)

    def new(self, rows: int, device: torch.device) -> torch.Tensor:
        """So many of them, uninitialised: `(rows, *shape)`."""
        return torch.empty((rows, *self.shape), dtype=self.dtype, device=device)


def spread(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """The items of each rank, ascending: the dearest first, each to the rank that has the least to do."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        rank = load.index(min(load))
        shares[rank].append(item)
        load[rank] += costs[item]
    return [sorted(share) for share in shares]


class DataParallelEncoder(Generic[_T]):
    """Encodes items on the ranks of a group. All its ranks call it, with the same items.

    Args:
        encode: gives the embedding of each of some items, `(rows, *shape)`; it is not called without items.
        rows: what embeddings are made of, for results without any.
        device: the compute device, where embeddings are, whatever device the items or the weights are on.
        group: null is the group of all.

    Raises:
        DeviceMismatchError: the group has no backend for that device.
        ExecutionError: torch.distributed is not set up.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[_T]], Sequence[torch.Tensor]],
        *,
        rows: Rows,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._encode, self._rows, self._group = encode, rows, group
        self._rank, self._size = rank_and_size(group)
        self._device = rows.new(0, torch.device(device)).device  # with its index
        backends = dist.get_backend_config(group)
        if self._device.type not in [each.partition(":")[0] for each in backends.split(",")]:
            raise DeviceMismatchError(
                f"rank {self._rank}: embeddings are to be on {self._device}, and the group's backends are {backends}",
                hint="give the compute device, or a group with a backend for it",
            )

    @torch.no_grad()
    def __call__(self, items: Sequence[_T], costs: Sequence[int] | None = None) -> torch.Tensor:
        """All items' embeddings, one after another: `(rows, *shape)` on the compute device, without gradients.

        Args:
            items: none, one or many.
            costs: what each takes, in any unit, so that ranks have equally much to do; as many ones where null.

        Raises:
            DeviceMismatchError: an embedding of this rank is not on the compute device.
            ExecutionError: an embedding is not of the declared rows, the ranks have not the same items, or another
                rank failed.
        """
        costs = [1] * len(items) if costs is None else list(costs)
        shares = spread(costs, self._size)
        own: list[torch.Tensor] = []

        def lengths() -> tuple[list[int], list[int]]:
            if len(costs) != len(items):
                raise ExecutionError(f"rank {self._rank}: {len(costs)} costs for {len(items)} items")
            own.extend(self._own([items[item] for item in shares[self._rank]]))
            return costs, [len(embedding) for embedding in own]

        told = agree(lengths, self._group)
        for rank, (theirs, _) in enumerate(told):
            if theirs != costs:
                raise ExecutionError(
                    f"rank {rank} has {len(theirs)} items that cost {sum(theirs)},"
                    f" rank {self._rank} {len(costs)} that cost {sum(costs)}",
                    hint="call the encoder with the same items on every rank",
                )
        embeddings: dict[int, torch.Tensor] = {}
        gathered = self._gathered(own, max(sum(counts) for _, counts in told))
        for share, (_, counts), rows in zip(shares, told, gathered, strict=True):
            embeddings |= zip(share, torch.split(rows[: sum(counts)], counts), strict=True)
        return torch.cat([self._rows.new(0, self._device), *(embeddings[item] for item in range(len(items)))])

    def _own(self, items: Sequence[_T]) -> Sequence[torch.Tensor]:
        """This rank's embeddings, fit for the collective."""
        embeddings = self._encode(items) if items else ()
        if len(embeddings) != len(items):
            raise ExecutionError(f"rank {self._rank}: {len(embeddings)} embeddings of {len(items)} items")
        for number, embedding in enumerate(embeddings):
            if embedding.device != self._device:
                raise DeviceMismatchError(
                    f"rank {self._rank}: embedding {number} is on {embedding.device}, not on {self._device}",
                    hint="make it on the compute device, wherever the inputs and the weights are",
                )
            if embedding.dim() == 0 or Rows.of(embedding) != self._rows:
                raise ExecutionError(
                    f"rank {self._rank}: embedding {number} is {tuple(embedding.shape)} of {embedding.dtype},"
                    f" and its rows are declared as {self._rows.shape} of {self._rows.dtype}",
                    hint="declare what the encoder gives: Rows.of(a run on meta)",
                )
        return embeddings

    def _gathered(self, own: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Each rank's rows, with as many behind them as make them equally many everywhere."""
        mine = self._rows.new(rows, self._device)
        torch.cat([mine[:0], *own], out=mine[: sum(map(len, own))])
        everyones = [torch.empty_like(mine) for _ in range(self._size)]
        if mine.numel():
            dist.all_gather(everyones, mine, self._group)
        return everyones

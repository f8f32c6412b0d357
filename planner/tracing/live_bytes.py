"""Bytes of tensors that are alive, real or fake.

Torch is imported with this module.
"""

# Torch's own types are partial here.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, watches storages come and go: `live` bytes now and after each operation, and the `peak` so far.

    What operations return is seen, and kept in mind until it dies; the scratch memory inside them is not. Bytes are
    those of whole storages, each counted once.

    Args:
        excluded: tensors whose storages never count.
    """

    def __init__(self, excluded: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.history: list[int] = []
        self._sizes: dict[int, int] = {}
        for tensor in excluded:
            storage = tensor.untyped_storage()
            self._sizes[storage._cdata] = storage.nbytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        self.history.append(self.live)
        return results

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._died, key).atexit = False
        self.live += size - self._sizes.get(key, 0)  # A storage may have been resized since it was seen.
        self._sizes[key] = size

    def _died(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

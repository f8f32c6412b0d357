"""Operations of products with weights, by how many rows meet the weights: few rows are slow, for the weights' sake.

Torch is imported with this module.
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch

from ...plans.pipeline import RowFlops


class RowCounter:
    """Formulas for torch's counter of operations that keep in mind how many rows each product had."""

    def __init__(self) -> None:
        self._by_rows: Counter[int] = Counter()

    @property
    def formulas(self) -> dict[Any, Callable[..., int]]:
        """By operation, for `custom_mapping`."""
        return {torch.ops.aten.mm: self._mm, torch.ops.aten.addmm: self._addmm}

    def counted(self) -> tuple[RowFlops, ...]:
        """What was counted, fewer rows first."""
        return tuple(RowFlops(rows=rows, flops=flops) for rows, flops in sorted(self._by_rows.items()) if rows)

    def _mm(self, left: Any, right: Any, *_: Any, **__: Any) -> int:
        """Shapes are (rows, width) and (width, columns)."""
        flops = cast(int, 2 * left[0] * left[1] * right[1])
        self._by_rows[int(left[0])] += flops
        return flops

    def _addmm(self, _: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
        return self._mm(left, right)

"""Operations of matrix products, by their rows: few rows are slow, for the sake of the weights that they meet.

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
        aten = torch.ops.aten
        return {aten.mm: self._mm, aten.addmm: self._addmm, aten.bmm: self._bmm, aten.baddbmm: self._baddbmm}

    def counted(self) -> tuple[RowFlops, ...]:
        """What was counted, fewer rows first."""
        return tuple(RowFlops(rows=rows, flops=flops) for rows, flops in sorted(self._by_rows.items()) if rows)

    def _mm(self, left: Any, right: Any, *_: Any, **__: Any) -> int:
        """Shapes are (rows, width) and (width, columns)."""
        return self._count(left[0], 2 * left[0] * left[1] * right[1])

    def _addmm(self, _: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
        return self._mm(left, right)

    def _bmm(self, left: Any, right: Any, *_: Any, **__: Any) -> int:
        """Shapes are (batch, rows, width) and (batch, width, columns)."""
        return self._count(left[1], 2 * left[0] * left[1] * left[2] * right[2])

    def _baddbmm(self, _: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
        return self._bmm(left, right)

    def _count(self, rows: Any, flops: Any) -> int:
        self._by_rows[int(rows)] += int(flops)
        return cast(int, flops)

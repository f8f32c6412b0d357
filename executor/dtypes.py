"""The safetensors dtype names as torch dtypes."""

import torch

from ..plans.errors import ExecutionError

_TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


def torch_layout(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Torch's dtype and shape for a stored tensor. Two 4-bit elements are one of torch's, so the last axis is halved.

    Raises:
        ExecutionError: torch has no such dtype.
    """
    if dtype not in _TORCH:
        raise ExecutionError(f"torch has no dtype for {dtype}", hint="convert the checkpoint to another dtype")
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    return _TORCH[dtype], shape

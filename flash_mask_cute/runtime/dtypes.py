"""torch dtypes by name, and their names in the DSL."""

from __future__ import annotations

import torch

# keys and values of a cache in 8 bits
FP8 = torch.float8_e4m3fn

CUTLASS_NAMES = {
    "bool": "Boolean",
    "uint8": "Uint8",
    "int8": "Int8",
    "int16": "Int16",
    "int32": "Int32",
    "uint32": "Uint32",
    "int64": "Int64",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "float32": "Float32",
    "float64": "Float64",
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

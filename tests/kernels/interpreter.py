"""Triton's interpreter for machines without CUDA: kernels run on the CPU, in NumPy.

NumPy has no bfloat16 and no float8, so the interpreter keeps their bits as integers. As of Triton
3.9 it narrows to them without carrying into the exponent (1.9999 becomes 1.0) and multiplies
bfloat16 matrices as if their bits were numbers. This module fixes both with torch's conversions,
which round like the hardware. It multiplies matrices in float64: in float32, NumPy's rounding of a
row depends on its place in the matrix.

The interpreter replaces the functions of Triton's language when a kernel begins, and again at each
call of another function. Those calls find them replaced, so this module leaves that out: it took a
third of the time.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def prepare() -> None:
    """Call before importing kernels: Triton decides when they are decorated."""
    if not INTERPRETED:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    narrow = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    unchanged_convert = interpreter._convert_float
    builder = interpreter.InterpreterBuilder

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source != tl.float32 or target not in narrow:
            return unchanged_convert(data, source, target, rounding_mode)
        bits = np.int16 if target.primitive_bitwidth == 16 else np.int8
        values = torch.from_numpy(np.ascontiguousarray(data)).to(narrow[target])
        raw = values.view(torch.int16 if bits is np.int16 else torch.int8).numpy()
        return raw.view(f"u{raw.dtype}").reshape(data.shape)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(operand, tl.float32) for operand in (a, b))
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    replace_language = interpreter._patch_lang

    def replace_language_once(function: Any) -> Any:
        known = function.__globals__.values()
        seen = [each for each in (tl, tl.core) if any(value is each for value in known)]
        is_replaced = not any(tl.core.is_builtin(each.load) for each in seen)
        return interpreter._LangPatchScope() if is_replaced else replace_language(function)

    interpreter._patch_lang = replace_language_once
    interpreter._convert_float = convert
    builder.create_dot = dot

"""Compiles every Triton kernel for compute capability 9.0; needs no card, Triton brings ptxas.

``python -m tests.kernels.compile_for_hopper`` prints one JSON object: for each kernel, whether its
PTX uses tensor cores, and the bytes that ptxas put on the stack. With ``--all`` it also compiles
the variants that differ only in tiles or the kind of cache. It needs its own process, because a
process has either Triton's compiler or its interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels.triton import (
    gate_and_mul,
    paged_decode,
    paged_prefill,
    quantised_linear,
    rms_norm,
    rope_and_write,
    sample,
)
from llorch_worker.kernels.triton.paged_decode import DecodeTiles
from llorch_worker.kernels.triton.paged_prefill import PrefillTiles
from llorch_worker.kernels.triton.quantised_linear import MatmulTiles

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

TYPES: dict[str, str] = {
    **dict.fromkeys(("qkv", "x", "residual", "weight", "total", "gate_up", "out"), "*bf16"),
    **dict.fromkeys(("keys", "values"), "*bf16"),
    **dict.fromkeys(("key_scales", "value_scales", "pieces", "stats", "cos", "sin"), "*fp32"),
    **dict.fromkeys(("logits", "temperatures", "log_min_p"), "*fp32"),
    **dict.fromkeys(
        ("tables", "contexts", "slots", "chosen", "top_k", "seeds", "positions"), "*i64"
    ),
    **dict.fromkeys(("first_rows", "query_lengths"), "*i64"),
    **{"codes": "*u8", "high": "*i32", "scales": "*fp16", "offsets": "*fp16"},
    **{"top_p": "*fp64", "log2_scale": "fp32", "factor": "fp32", "eps": "fp32"},
}
"""By parameter name; others are 32-bit integers."""

ALIGNED_NUMBERS = (
    "qkv_stride",
    "token_stride",
    "x_stride",
    "residual_stride",
    "out_stride",
    "stride",
)
"""A model's widths: launches specialise on them being multiples of 16."""

ATTENTION = {"KV_HEADS": 8, "GROUP": 4, "BLOCK_SIZE": 16, "DIM": 128, "BLOCK_DIM": 128}
PLAIN = {"WINDOW": 0, "CAP": 0.0}
FORMED = {"WINDOW": 4096, "CAP": 72.1}
"""Gemma 2's windows and cap."""
ROPE = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "HEADS": 8, "BLOCK": 64}
Q4_K = {"BITS": 4, "GROUP": 32, "ZERO": 0, "OFFSETS": True}
Q6_K = {"BITS": 6, "GROUP": 16, "ZERO": 32, "OFFSETS": False}
FP8 = {"keys": "*fp8e4nv", "values": "*fp8e4nv"}
INT8 = {"keys": "*i8", "values": "*i8"}
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


def compile_kernel(
    kernel: Any, constants: dict[str, Any], types: dict[str, str] | None = None, **options: int
) -> dict[str, Any]:
    known = TYPES | (types or {})
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else known.get(name, "i32") for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ALIGNED_NUMBERS
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    compiled = triton.compile(source, target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    ptx = compiled.asm["ptx"]
    return {
        "stack_bytes": max(int(size) for size in re.findall(r"STACK:(\d+)", usage)),
        "tensor_cores": "wgmma" in ptx or "mma.sync" in ptx,
    }


def compile_prefill(
    longest: int,
    kv: KvDtype = "auto",
    *,
    wide: bool = False,
    form: dict[str, float] = PLAIN,
) -> dict[str, Any]:
    """As launched for chunks of ``longest`` tokens; ``wide``: in float32."""
    tiles = PrefillTiles.of(torch.float32 if wide else torch.bfloat16, longest)
    constants = {"QUERIES": tiles.queries, "TILE": tiles.tile, "SCALED": kv == "int8"}
    return compile_kernel(
        paged_prefill._prefill,
        ATTENTION | form | constants,
        attention_types(kv, wide=wide),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def compile_decode(
    splits: int,
    kv: KvDtype = "auto",
    *,
    wide: bool = False,
    form: dict[str, float] = PLAIN,
) -> dict[str, Any]:
    """As launched for ``splits`` pieces of a context; ``wide``: in float32."""
    tiles = DecodeTiles.of(torch.float32 if wide else torch.bfloat16, kv)
    constants = {"BLOCK_GROUP": 16, "TILE": tiles.tile, "SPLITS": splits, "SCALED": kv == "int8"}
    return compile_kernel(
        paged_decode._decode,
        ATTENTION | form | constants,
        attention_types(kv, wide=wide) | {"rows": "*i64"},
        num_stages=tiles.num_stages,
    )


def attention_types(kv: KvDtype, *, wide: bool) -> dict[str, str]:
    types = dict.fromkeys(("qkv", "out", "keys", "values"), "*fp32") if wide else {}
    return types | {"auto": {}, "fp8": FP8, "int8": INT8}[kv]


def compile_matmul(tiles: MatmulTiles, form: dict[str, Any]) -> dict[str, Any]:
    constants = {"TOKENS": tiles.tokens, "ROWS": tiles.rows, "BLOCKS": tiles.blocks}
    return compile_kernel(quantised_linear._matmul, constants | form, num_warps=tiles.num_warps)


def compile_each() -> dict[str, dict[str, Any]]:
    """Every kernel, with each kind of arithmetic."""
    matvec = {"ROWS": 8, "BLOCKS": 16}
    join = {"HEADS": 32, "DIM": 128, "BLOCK_DIM": 128, "SPLITS": 16}
    rope, gate = rope_and_write._rope_and_write, gate_and_mul._gate_and_mul
    return {
        "decode split": compile_decode(16),
        "decode int8": compile_decode(16, "int8"),
        "join": compile_kernel(paged_decode._join, join, {"rows": "*i64"}),
        "prefill": compile_prefill(128),
        "decode of a form": compile_decode(16, form=FORMED),
        "prefill of a form": compile_prefill(128, form=FORMED),
        "float32 decode int8": compile_decode(16, "int8", wide=True),
        "float32 prefill int8": compile_prefill(128, "int8", wide=True),
        "rms_norm": compile_kernel(rms_norm._rms_norm, {"ADD": True, "BLOCK": 4096}, num_warps=8),
        "rope_and_write": compile_kernel(rope, ROPE | {"KV_DTYPE": "auto"}),
        "rope_and_write int8": compile_kernel(rope, ROPE | {"KV_DTYPE": "int8"}, INT8),
        "gelu_and_mul": compile_kernel(gate, {"GELU": True, "BLOCK": 1024}),
        "sample": compile_kernel(sample._sample, {"BLOCK": sample._BLOCK}, num_warps=16),
        "matvec Q4_K": compile_kernel(quantised_linear._matvec, matvec | Q4_K),
        "matvec Q6_K": compile_kernel(quantised_linear._matvec, matvec | Q6_K),
        "matmul": compile_matmul(quantised_linear.WIDE[0], Q4_K),
    }


def compile_others() -> dict[str, dict[str, Any]]:
    """The other tiles and kinds of cache."""
    rope = rope_and_write._rope_and_write
    return {
        "decode": compile_decode(1),
        "decode fp8": compile_decode(16, "fp8"),
        "prefill 64": compile_prefill(64),
        **{f"float32 decode {kv}": compile_decode(16, kv, wide=True) for kv in KV_DTYPES},
        **{f"float32 prefill {kv}": compile_prefill(128, kv, wide=True) for kv in KV_DTYPES},
        "float32 prefill 16": compile_prefill(16, "int8", wide=True),
        "silu_and_mul": compile_kernel(gate_and_mul._gate_and_mul, {"GELU": False, "BLOCK": 1024}),
        "rope_and_write fp8": compile_kernel(rope, ROPE | {"KV_DTYPE": "fp8"}, FP8),
        **{
            f"matmul {tiles.tokens} x {tiles.rows}": compile_matmul(tiles, Q4_K)
            for tiles in (
                *quantised_linear.NARROW,
                *quantised_linear.MIDDLE,
                *quantised_linear.WIDE,
            )
        },
        "matmul Q6_K": compile_matmul(quantised_linear.WIDE[0], Q6_K),
    }


if __name__ == "__main__":
    print(json.dumps(compile_each() | (compile_others() if "--all" in sys.argv else {})))

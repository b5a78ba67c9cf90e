"""Compiles every Triton kernel for four kinds of cards; needs none, Triton brings ptxas.

``python -m tests.kernels.compile_for_cards`` prints one JSON object: for each kernel and compute
capability, what ptxas and the machine code say. With ``--all`` it also compiles the variants that
differ only in dtype, form or the kind of cache, and each size of heads on each card. It needs its
own process, because a process has either Triton's compiler or its interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels.triton import (
    attention_work,
    gate_and_mul,
    paged_attention,
    quantised_linear,
    rms_norm,
    rope_and_write,
    sample,
)
from llorch_worker.kernels.triton.attention_tiles import (
    MAX_REGISTERS,
    AttentionTiles,
    padded_group,
)

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""What a program may have, by compute capability: A100; L4, L40S; H100, H200; RTX 50."""
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"

TYPES: dict[str, str] = {
    **dict.fromkeys(("qkv", "x", "residual", "weight", "total", "gate_up", "out"), "*bf16"),
    **dict.fromkeys(("keys", "values"), "*bf16"),
    **dict.fromkeys(("key_scales", "value_scales", "parts", "stats", "cos", "sin"), "*fp32"),
    **dict.fromkeys(("logits", "temperatures", "log_min_p"), "*fp32"),
    **dict.fromkeys(("contexts", "slots", "chosen", "rows"), "*i64"),
    **dict.fromkeys(("top_k", "seeds", "positions"), "*i64"),
    **dict.fromkeys(("tables", "work", "joins", "codes", "high"), "*i32"),
    **dict.fromkeys(("scales", "offsets"), "*fp16"),
    **{"top_p": "*fp64", "log2_scale": "fp32", "factor": "fp32", "eps": "fp32"},
}
"""By parameter name; others are 32-bit integers."""

UNALIGNED = ("tables", "work", "joins")
ALIGNED_NUMBERS = (
    "qkv_stride",
    "token_stride",
    "x_stride",
    "residual_stride",
    "out_stride",
    "stride",
    "columns",
)
"""A model's widths: launches specialise on them being multiples of 16."""

PLAIN = {"WINDOW": 0, "CAP": 0.0}
FORMED = {"WINDOW": 4096, "CAP": 72.1}
"""Gemma 2's windows and cap."""
HEAD_DIMS = (64, 96, 128, 256)
GROUP = 4
ROPE = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "HEADS": 8, "BLOCK": 64}
CELLS: dict[KvDtype, dict[str, str]] = {
    "auto": {},
    "fp8": {"keys": "*fp8e4nv", "values": "*fp8e4nv"},
    "int8": {"keys": "*i8", "values": "*i8"},
}


def compile_kernel(
    capability: int,
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str] | None = None,
    *,
    loop: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What ptxas says of it, and with ``loop`` what its machine code does."""
    known = TYPES | (types or {})
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else known.get(name, "i32") for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if (signature[name].startswith("*") and name not in UNALIGNED) or name in ALIGNED_NUMBERS
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        # To take the code apart takes as long as to make it.
        code = _run("cuobjdump", "-sass", file.name) if loop else ""
    ptx = compiled.asm["ptx"]
    return {
        "stack_bytes": max(int(size) for size in re.findall(r"STACK:(\d+)", usage)),
        "shared_bytes": compiled.metadata.shared,
        "fits": compiled.metadata.shared <= SHARED_BYTES[capability],
        "registers": max(int(count) for count in re.findall(r"REG:(\d+)", usage)),
        "tensor_cores": "wgmma" in ptx or "mma.sync" in ptx,
        **({"loop": _longest_loop(code)} if loop else {}),
    }


def _longest_loop(code: str) -> dict[str, int]:
    """Of the machine code's loops that multiply: what the longest of them does."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)
    found = {"instructions": 0, "products": 0, "barriers": 0, "exchanges": 0}
    for place, line in lines:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", line)
        if target is None or int(target[1], 16) >= int(place, 16):
            continue
        begin, end = int(target[1], 16), int(place, 16)
        body = [text for at, text in lines if begin <= int(at, 16) <= end]
        products = sum("MMA" in text for text in body)
        if products and len(body) > found["instructions"]:
            found = {
                "instructions": len(body),
                "products": products,
                "barriers": sum("BAR." in text for text in body),
                "exchanges": sum(re.search(r"SHFL|LDS|STS", text) is not None for text in body),
            }
    return found


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([BINARIES / tool, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def compile_attention(
    capability: int,
    head_dim: int,
    longest_query: int,
    kv: KvDtype = "auto",
    *,
    wide: bool = False,
    form: dict[str, float] = PLAIN,
) -> dict[str, Any]:
    """As launched for chunks of up to ``longest_query`` tokens, 1 in decode; ``wide``: in float32,
    where prefill has decode's tiles if it must round as decode does."""
    block_dim = triton.next_power_of_2(head_dim)
    dtype = torch.float32 if wide else torch.bfloat16
    shared = SHARED_BYTES[capability]
    tiles = AttentionTiles.of(dtype, block_dim, GROUP, longest_query, shared)
    constants = {
        "KV_HEADS": 8,
        "GROUP": GROUP,
        "BLOCK_GROUP": padded_group(GROUP),
        "BLOCK_SIZE": 16,
        "DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "ROWS": tiles.rows,
        "TILE": tiles.tile,
        "FOLDS": longest_query == 1,
        "SCALED": kv == "int8",
    }
    types = dict.fromkeys(("qkv", "out", "keys", "values"), "*fp32") if wide else {}
    return compile_kernel(
        capability,
        paged_attention._attend,
        constants | form,
        types | CELLS[kv],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=MAX_REGISTERS,
    )


@dataclass(frozen=True)
class CodeForm:
    """How a type of blocks keeps weights; see ``QuantisedMatrix``."""

    bits: int
    group: int
    zero: int
    offsets: bool

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "HIGH": self.bits - 4,
            "GROUPS": max(1, 32 // self.group),
            "CHUNKS": self.group // 64,
            "ZERO": self.zero,
            "OFFSETS": self.offsets,
        }


NUMBERS = {"rows": "i32"}
FORMS = {
    "Q4_0": CodeForm(4, 32, 8, offsets=False),
    "Q4_K": CodeForm(4, 32, 0, offsets=True),
    "Q5_K": CodeForm(5, 32, 0, offsets=True),
    "Q6_K": CodeForm(6, 16, 32, offsets=False),
    "Q8_0": CodeForm(8, 32, 128, offsets=False),
    "Q2_K": CodeForm(4, 16, 0, offsets=True),
    "GPTQ": CodeForm(4, 128, 8, offsets=False),
    "AWQ": CodeForm(5, 128, 16, offsets=False),
}


def compile_product(capability: int, form: CodeForm, tokens: int, tiles: int) -> dict[str, Any]:
    """With ``per_32_weights``: the instructions of a thread in the loop for as many weights."""
    parts = quantised_linear._PARTS
    constants = {"TOKENS": tokens, "TILES": tiles, "PARTS": parts} | form.constants
    found = compile_kernel(
        capability,
        quantised_linear._multiply,
        constants,
        NUMBERS,
        loop=True,
        num_warps=parts,
        num_stages=1,
        maxnreg=MAX_REGISTERS,
    )
    planes = 2 if form.bits == 8 else 1
    # A thread multiplies 32 weights of a tile by 8 tokens, and their sums, in 4 products each.
    each = tokens // 8 * 4 * (tiles * planes + 1)
    passes = found["loop"]["products"] / each
    return found | {"per_32_weights": found["loop"]["instructions"] / passes / tiles}


def kernels_beside_attention(capability: int) -> dict[str, dict[str, Any]]:
    join = {"KV_HEADS": 8, "GROUP": GROUP, "BLOCK_GROUP": 4, "DIM": 128, "BLOCK_DIM": 64}
    work = {"SEQUENCES": 256, "TOKENS": 4, "PIECE": 512, "MOST_PIECES": 128, "WINDOW": 4096}
    rope, gate = rope_and_write._rope_and_write, gate_and_mul._gate_and_mul
    norm = {"ADD": True, "BLOCK": 4096}

    def compiled(
        kernel: Any, constants: dict[str, Any], *types: dict[str, str], **options: Any
    ) -> dict[str, Any]:
        return compile_kernel(capability, kernel, constants, *types, **options)

    return {
        "join": compiled(paged_attention._join, join),
        "work": compiled(attention_work._list, work, num_warps=1),
        "rms_norm": compiled(rms_norm._rms_norm, norm, num_warps=8),
        "rope_and_write": compiled(rope, ROPE | {"KV_DTYPE": "auto"}),
        "rope_and_write int8": compiled(rope, ROPE | {"KV_DTYPE": "int8"}, CELLS["int8"]),
        "silu_and_mul": compiled(gate, {"GELU": False, "BLOCK": 1024}),
        "gelu_and_mul": compiled(gate, {"GELU": True, "BLOCK": 1024}),
        "dequantise": compiled(
            quantised_linear._dequantise, {"PARTS": 4} | FORMS["Q6_K"].constants, NUMBERS
        ),
        "sample": compiled(sample._sample, {"BLOCK": sample._BLOCK}, num_warps=16),
    }


def compile_each() -> Iterator[tuple[str, dict[str, Any]]]:
    """Attention with every size of heads on the card with the least memory for it, and on each
    other with the largest, which takes most registers; the others on one."""
    for capability in SHARED_BYTES:
        for head_dim in HEAD_DIMS if capability == 89 else HEAD_DIMS[-1:]:
            yield from both_attentions(capability, head_dim)
    # Those that come closest to their limits.
    for block_type, tokens in (("Q2_K", 8), ("Q6_K", 16), ("AWQ", 8)):
        name = f"product of {block_type} with {tokens}, 2"
        yield name, compile_product(120, FORMS[block_type], tokens, 2)
    yield from kernels_beside_attention(89).items()


def both_attentions(capability: int, head_dim: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of decode and of prefill."""
    for longest in (1, 64):
        name = f"attention of {longest} with heads of {head_dim} on sm_{capability}"
        yield name, compile_attention(capability, head_dim, longest)


def compile_others() -> Iterator[tuple[str, dict[str, Any]]]:
    """The other dtypes, forms and tiles."""
    kinds: dict[str, dict[str, Any]] = {
        "int8": {"kv": "int8"},
        "fp8": {"kv": "fp8"},
        "formed": {"form": FORMED},
        "formed int8": {"form": FORMED, "kv": "int8"},
        "float32": {"wide": True},
        "float32 int8": {"wide": True, "kv": "int8"},
    }
    for capability in SHARED_BYTES:
        for block_type, code_form in FORMS.items():
            for tokens, tiles in ((8, 1), (8, 2), (16, 2), (32, 1)):
                name = f"product of {block_type} with {tokens}, {tiles} on sm_{capability}"
                yield name, compile_product(capability, code_form, tokens, tiles)
        for head_dim in HEAD_DIMS:
            if capability != 89:
                yield from both_attentions(capability, head_dim)
            for longest in (8, 16):
                name = f"attention of {longest} with heads of {head_dim} on sm_{capability}"
                yield name, compile_attention(capability, head_dim, longest)
            for kind, options in kinds.items():
                if kind == "fp8" and capability < 89:
                    continue  # its cards have no such arithmetic, see ``choose_ops``
                for longest in (1, 64):
                    name = f"{kind} attention of {longest}, {head_dim} on sm_{capability}"
                    yield name, compile_attention(capability, head_dim, longest, **options)


if __name__ == "__main__":
    found = dict(compile_each())
    if "--all" in sys.argv:
        found |= dict(compile_others())
    print(json.dumps(found))

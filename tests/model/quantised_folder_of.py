"""Writes a model of transformers as AWQ, GPTQ and FP8 folders, in the way of their quantisers.

Layouts: AutoAWQ's ``WQLinear_GEMM``, GPTQModel's ``pack_block`` and compressed-tensors'
``float-quantized``. The model's own weights become what a reader must get back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_quantised(
    model: Any,
    folder: Path,
    config: dict[str, Any],
    quantise: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]],
) -> Path:
    """``quantise`` gives a matrix's tensors by suffix, and the matrix that they stand for."""
    tensors = {}
    state = model.state_dict()
    with torch.no_grad():
        for name, values in state.items():
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            if "_proj.weight" not in name:
                tensors[name] = values.clone()
                continue
            packed, meant = quantise(values.float())
            values.copy_(meant)
            stem = name.removesuffix("weight")
            tensors |= {stem + suffix: each.contiguous() for suffix, each in packed.items()}
    model.config.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def _pack(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[n, 8 * words] to [n, words] int32; place i of a word holds column ``order[i]``."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= codes[:, column::8].long() << (4 * place)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def nibbles(
    matrix: torch.Tensor, group_of: torch.Tensor, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and values [in, out], zeros and float16 scales [groups, out] of a matrix [out, in]."""
    w = matrix.T
    zeros, scales = [], []
    for group in range(int(group_of.max()) + 1):
        part = w[group_of == group]
        low, high = part.min(0).values.clamp(max=0), part.max(0).values.clamp(min=0)
        scale = part.abs().max(0).values / 7 if symmetric else (high - low) / 15
        scales.append(scale.half())
        lowest = (-low / scales[-1].float()).round().clamp(0, 15)
        zeros.append(torch.full_like(low, 8) if symmetric else lowest)
    zero, scale = torch.stack(zeros), torch.stack(scales)
    steps = scale.float()[group_of]
    codes = ((w / steps).round() + zero[group_of]).clamp(0, 15)
    return codes, zero, scale, (codes - zero[group_of]) * steps


def _groups(columns: int, group: int) -> torch.Tensor:
    return torch.arange(columns) // (columns if group == -1 else group)


def awq(group: int) -> tuple[dict[str, Any], Any]:
    def quantise(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, values = nibbles(matrix, _groups(matrix.shape[1], group), False)
        words = {"qweight": _pack(codes, _AWQ_ORDER), "qzeros": _pack(zeros, _AWQ_ORDER)}
        return words | {"scales": scales}, values.T

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return config | {"zero_point": True, "modules_to_not_convert": ["lm_head"]}, quantise


def gptq(
    group: int, symmetric: bool, act_order: bool, version: int = 1, named: int | None = None
) -> tuple[Any, Any]:
    """``version``: of the zero points; ``named``: what the configuration says it is."""

    def quantise(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = _groups(matrix.shape[1], group)
        if act_order:
            groups = groups[torch.randperm(len(groups))]
        codes, zeros, scales, values = nibbles(matrix, groups, symmetric)
        words = _pack(zeros).view(torch.uint32).long() - (0x11111111 if version == 1 else 0)
        return {
            "qweight": _pack(codes.T).T,
            "qzeros": (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32),
            "scales": scales,
            "g_idx": groups.int(),
            "bias": torch.zeros(len(matrix), dtype=torch.float16),  # AutoGPTQ's, of all layers
        }, values.T

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric}
    config |= {"desc_act": act_order, "damp_percent": 0.1, "dynamic": {"-:.*lm_head": {}}}
    formats = {1: "gptq", 2: "gptq_v2"}
    return config | {"checkpoint_format": formats[named or version]}, quantise


def _scaled(matrix: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes and scales of a matrix, given its largest values, as broadcast to it."""
    scale = largest / 448
    return (matrix / scale).to(torch.float8_e4m3fn), scale


def fp8_channel(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale = _scaled(matrix, matrix.abs().amax(1, keepdim=True).bfloat16().float())
    scale = scale.bfloat16()
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_tensor(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale = _scaled(matrix, matrix.abs().max())
    tensors = {"weight": codes, "weight_scale": scale.view(1), "input_scale": torch.ones(1)}
    return tensors, codes.float() * scale


def fp8_blocks(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 128 x 128; those at the edges are smaller."""
    meant, codes = torch.empty_like(matrix), torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-matrix.shape[0] // 128), -(-matrix.shape[1] // 128))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            codes[at], scales[row, column] = _scaled(matrix[at], matrix[at].abs().max())
            meant[at] = codes[at].float() * scales[row, column]
    return {"weight": codes, "weight_scale_inv": scales}, meant


def compressed(strategy: str, dynamic: bool) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    rounded = {"num_bits": 8, "type": "float", "dynamic": dynamic}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": rounded}
        },
    }


DEEPSEEK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq-32": awq(32),
    "awq-64": awq(64),
    "awq-128": awq(128),
    "awq-row": awq(-1),
    "gptq": gptq(128, True, False),
    "gptq-asymmetric": gptq(32, False, False),
    "gptq-v2": gptq(64, False, False, 2),
    "gptq-v2-symmetric": gptq(-1, True, False, 2),
    "gptq-8-named-first": gptq(128, True, False, 2, named=1),
    "gptq-7-named-second": gptq(128, True, False, 1, named=2),
    "gptq-act-order": gptq(32, True, True),
    "gptq-small-groups": gptq(16, False, False),
    "fp8-tensor": (compressed("tensor", False), fp8_tensor),
    "fp8-channel": (compressed("channel", True), fp8_channel),
    "fp8-blocks": (DEEPSEEK, fp8_blocks),
}

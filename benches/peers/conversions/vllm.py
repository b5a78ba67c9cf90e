"""``python -m benches.peers.conversions.vllm FOLDER TARGET gptq|w8a8``: a Hugging Face folder,
quantised in a layout that vLLM has CPU kernels for. The output layer stays bfloat16, as usual."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 32
"""Weights that share a scale in 4 bits, as in Q4_0."""
WEIGHTS = "model.safetensors"
Tensors = Iterator[tuple[str, torch.Tensor]]

CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    },
    "w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "channel",
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    },
}


def convert(folder: Path, target: Path, kind: str) -> None:
    """Write ``target``; ``kind`` is a key of :data:`CONFIGS`."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(WEIGHTS))
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            weight = file.get_tensor(name)
            if name.endswith("_proj.weight"):
                tensors |= QUANTISERS[kind](name.removesuffix("weight"), weight.float())
            else:
                tensors[name] = weight
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[kind]
    (target / "config.json").write_text(json.dumps(config))


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    """``weight``: [out, in]. Values 0 to 15 around 8, eight an int32 along the inputs."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scales = (groups.abs().amax(-1) / 7).clamp_min(1e-8)
    values = (groups / scales[..., None]).round().clamp(-8, 7).view(rows, columns) + 8
    yield name + "qweight", _packed(values.t().to(torch.int64), 0)
    yield name + "scales", scales.t().to(torch.bfloat16).contiguous()
    # The layout stores zero points minus one.
    zeros = torch.full((columns // GROUP, rows), 7, dtype=torch.int64)
    yield name + "qzeros", _packed(zeros, 1)
    yield name + "g_idx", (torch.arange(columns) // GROUP).to(torch.int32)


def _packed(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Eight values of 4 bits an int32 along ``axis``, the first in the lowest bits."""
    parts = values.unflatten(axis, (-1, 8))
    shifts = (torch.arange(8) * 4).view([8 if at == axis + 1 else 1 for at in range(parts.dim())])
    packed = (parts << shifts).sum(axis + 1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def _w8a8(name: str, weight: torch.Tensor) -> Tensors:
    """``weight``: [out, in]. One scale a row."""
    scales = (weight.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-8)
    yield name + "weight", (weight / scales).round().clamp(-128, 127).to(torch.int8)
    yield name + "weight_scale", scales


QUANTISERS: dict[str, Callable[[str, torch.Tensor], Tensors]] = {"gptq": _gptq, "w8a8": _w8a8}

if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

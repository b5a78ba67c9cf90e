"""Peak memory of a load, measured where it counts: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB, LAYERS = 1024, 2816, 8192, 2
MEASURE = """
import sys
from pathlib import Path
import torch
from llorch_worker.kernels import TorchOps
from llorch_worker.model import Llama, resolve_config
from llorch_worker.weights import open_checkpoint, select_linears

def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def load(path):
    checkpoint = open_checkpoint(path)
    config = resolve_config(checkpoint)
    dtype, device = getattr(torch, sys.argv[3]), torch.device("cpu")
    return Llama.load(
        checkpoint,
        config,
        dtype=dtype,
        device=device,
        linears=select_linears(device, dtype),
        ops=TorchOps(),
    )

load(sys.argv[1])  # a small one first: what the libraries allocate once is not the model's
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
before = status("VmRSS")
model = load(sys.argv[2])
print(status("VmHWM") - before, model.weight_bytes)
"""

WriteGguf = Callable[..., Path]


def gguf_file(path: Path, write_gguf: WriteGguf, type_: gguf.GGMLQuantizationType) -> Path:
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]

    def matrix(rows: int, columns: int) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        return np.zeros((rows, columns // block * block_bytes), np.uint8), type_

    norm = np.zeros(HIDDEN, np.float32)
    tensors = {
        "token_embd.weight": matrix(VOCAB, HIDDEN),
        "output.weight": matrix(VOCAB, HIDDEN),
        "output_norm.weight": norm,
    }
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        tensors |= {at + "attn_norm.weight": norm, at + "ffn_norm.weight": norm}
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"{at}{name}.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            tensors[f"{at}{name}.weight"] = matrix(INNER, HIDDEN)
        tensors[at + "ffn_down.weight"] = matrix(HIDDEN, INNER)
    metadata = {
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": 16,
        "llama.attention.head_count_kv": 16,
    }
    return write_gguf(path, metadata=metadata, tensors=tensors)


def hugging_face_folder(folder: Path) -> Path:
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        "lm_head.weight": torch.zeros(VOCAB, HIDDEN),
        "model.norm.weight": torch.zeros(HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": torch.zeros(HIDDEN),
            at + "post_attention_layernorm.weight": torch.zeros(HIDDEN),
            at + "mlp.gate_proj.weight": torch.zeros(INNER, HIDDEN),
            at + "mlp.up_proj.weight": torch.zeros(INNER, HIDDEN),
            at + "mlp.down_proj.weight": torch.zeros(HIDDEN, INNER),
        }
        for name in "qkvo":
            tensors[f"{at}self_attn.{name}_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("F32", "bfloat16"),  # a file of twice the model: its pages must go
        ("Q4_0", "float32"),
        ("IQ1_M", "bfloat16"),  # the type with the largest temporaries
        ("safetensors", "bfloat16"),
    ],
)
def test_a_load_peaks_below_the_model_and_15_percent(
    tmp_path: Path, write_gguf: WriteGguf, stored: str, dtype: str
) -> None:
    if stored == "safetensors":
        path = hugging_face_folder(tmp_path / "model")
    else:
        path = gguf_file(tmp_path / "m.gguf", write_gguf, gguf.GGMLQuantizationType[stored])
    small = write_gguf(tmp_path / "small.gguf")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, small, path, dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    peak_bytes, model_bytes = map(int, run.stdout.split())
    assert model_bytes > 80_000_000
    assert peak_bytes < 1.15 * model_bytes, f"{peak_bytes / model_bytes:.3f} of the model"

"""Peak memory of a load, measured in a separate process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

HIDDEN, INNER, VOCAB, LAYERS = 1024, 2816, 8192, 2
MEASURE = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # each has a chunk of its own in memory
from llorch_worker.kernels import TorchOps
from llorch_worker.model import Transformer, resolve_config
from llorch_worker.weights import open_checkpoint, select_linears

def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def load(path):
    checkpoint = open_checkpoint(path)
    config = resolve_config(checkpoint)
    dtype, device = getattr(torch, sys.argv[3]), torch.device("cpu")
    return Transformer.load(
        checkpoint,
        config,
        dtype=dtype,
        device=device,
        linears=select_linears(device, dtype),
        ops=TorchOps(),
    )

load(sys.argv[1])  # a small one first, for what libraries allocate once
Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("F32", "bfloat16"),  # the file is twice the model: its pages must be dropped
        ("Q4_0", "float32"),
        ("IQ1_M", "bfloat16"),  # the type with the largest temporaries
        ("safetensors", "bfloat16"),
    ],
)
def test_a_load_peaks_below_115_percent_of_the_model(
    tmp_path: Path, write_gguf: WriteGguf, save_llama: Callable[..., Path], stored: str, dtype: str
) -> None:
    if stored == "safetensors":
        path = save_llama(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=16,
            num_key_value_heads=16,
        )
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

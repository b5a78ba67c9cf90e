"""Llama 1 to 3, and what has its graph: Mistral 7B, Nemo, SmolLM2, Yi, R1-Distill-Llama."""

from __future__ import annotations

from llorch_worker.model.families.family import Family

LLAMA = Family(
    name="Llama",
    gguf="llama",
    model_types=("llama", "mistral"),
    interleaved=True,
    defaults={
        "llama": {"max_position_embeddings": 2048},
        "mistral": {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    },
)

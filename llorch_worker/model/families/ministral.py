"""Ministral 3 and Mistral Small 3: Llama's graph with YaRN, and queries that grow with position."""

from __future__ import annotations

from llorch_worker.model.config import Graph
from llorch_worker.model.families.family import Family
from llorch_worker.model.reader import Reader


def _from_gguf(read: Reader) -> Graph:
    if not read.value("attention.temperature_scale"):
        return Graph()
    original = read.integer("rope.scaling.original_context_length")
    return Graph(query_growth=(read.number("attention.temperature_scale"), original))


def _from_hugging_face(read: Reader) -> Graph:
    rope = read.value("rope_parameters") or read.value("rope_scaling")
    if not isinstance(rope, dict) or not rope.get("llama_4_scaling_beta"):
        return Graph()
    numbers = Reader(read.path, rope)
    original = numbers.integer("original_max_position_embeddings")
    return Graph(query_growth=(numbers.number("llama_4_scaling_beta"), original))


MINISTRAL = Family(
    name="Ministral",
    gguf="mistral3",
    model_types=("ministral3",),
    interleaved=True,
    from_gguf=_from_gguf,
    from_hugging_face=_from_hugging_face,
    defaults={
        "ministral3": {
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
        }
    },
)

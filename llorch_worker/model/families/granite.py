"""Granite 3 (dense): Llama's graph with four multipliers."""

from __future__ import annotations

from llorch_worker.model.config import Graph
from llorch_worker.model.families.family import Family
from llorch_worker.model.reader import Reader


def _from_gguf(read: Reader) -> Graph:
    scale = read.value("attention.scale")
    return Graph(
        embedding_scale=read.number("embedding_scale", 1.0),
        residual_scale=read.number("residual_scale", 1.0),
        attention_scale=read.number("attention.scale") if scale else None,
        logit_divisor=read.number("logit_scale", 1.0),
    )


def _from_hugging_face(read: Reader) -> Graph:
    return Graph(
        embedding_scale=read.number("embedding_multiplier", 1.0),
        residual_scale=read.number("residual_multiplier", 1.0),
        attention_scale=read.number("attention_multiplier", 1.0),
        logit_divisor=read.number("logits_scaling", 1.0),
    )


GRANITE = Family(
    name="Granite",
    gguf="granite",
    model_types=("granite",),
    interleaved=True,
    from_gguf=_from_gguf,
    from_hugging_face=_from_hugging_face,
    defaults={"granite": {"max_position_embeddings": 2048}},
    scales=frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"}),
)

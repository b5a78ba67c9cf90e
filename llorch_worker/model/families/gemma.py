"""Gemma 2 and 3 (text): norms around each branch, a scaled embedding, tanh-GELU, windows.

Gemma 2 caps scores and logits, and gives every other layer a window. Gemma 3 normalises each head
of Q and of K instead, gives all but every sixth layer a window, and rotates those by another base.
"""

from __future__ import annotations

from dataclasses import replace

from llorch_worker.cache import Rope
from llorch_worker.model.config import Graph
from llorch_worker.model.families.family import Family, other_theta, sliding_layers
from llorch_worker.model.reader import Reader

_LARGEST = (46, 62)
"""Layers of both 27B models, whose scale is that of hidden_size / heads; GGUF does not say so."""


def _common(hidden: int, scale: float | None, window: int, sliding: tuple[bool, ...]) -> Graph:
    return Graph(
        norms="around",
        activation="gelu_tanh",
        embedding_scale=hidden**0.5,
        attention_scale=scale,
        windows=tuple(window if slides else None for slides in sliding),
    )


def _from_gguf(read: Reader, step: int, window: int | None = None) -> Graph:
    """``window``: of a file that names none."""
    hidden, layers = read.integer("embedding_length"), read.integer("block_count")
    heads = read.integer("attention.head_count")
    scale = (hidden / heads) ** -0.5 if layers in _LARGEST else None
    window = read.integer("attention.sliding_window", window)
    return _common(hidden, scale, window, sliding_layers(read, layers, step))


def _from_hugging_face(read: Reader, step: int) -> Graph:
    read.refuse_unless("use_bidirectional_attention", (False,), "only causal models can generate")
    hidden, layers = read.integer("hidden_size"), read.integer("num_hidden_layers")
    scale = read.number("query_pre_attn_scalar") ** -0.5
    window = read.integer("sliding_window")
    return _common(hidden, scale, window, sliding_layers(read, layers, step))


def _capped(graph: Graph, read: Reader, scores: float | None, logits: float | None) -> Graph:
    """With the caps of the file; ``scores`` and ``logits`` are those of one that names none."""

    def cap(key: str, default: float | None) -> float | None:
        return read.number(key) if read.value(key) else default

    return replace(
        graph,
        softcap=cap("attn_logit_softcapping", scores),
        logit_softcap=cap("final_logit_softcapping", logits),
    )


def _gemma2_gguf(read: Reader) -> Graph:
    # The first files name no window, as llama.cpp needs none.
    return _capped(_from_gguf(read, 2, 4096), read, 50.0, 30.0)


def _gemma2_folder(read: Reader) -> Graph:
    return _capped(_from_hugging_face(read, 2), read, None, None)


def _gemma3(graph: Graph, theta: float) -> Graph:
    ropes = tuple(int(window is not None) for window in graph.windows)
    return replace(graph, qk_norm="head", other_ropes=(Rope(theta),), layer_ropes=ropes)


def _gemma3_gguf(read: Reader) -> Graph:
    graph = _capped(_from_gguf(read, 6), read, None, None)
    return _gemma3(graph, read.number("rope.freq_base_swa", 10000.0))


def _gemma3_folder(read: Reader) -> Graph:
    graph = _capped(_from_hugging_face(read, 6), read, None, None)
    return _gemma3(graph, other_theta(read, "rope_local_base_freq", 10000.0))


_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

GEMMA2 = Family(
    name="Gemma 2",
    gguf="gemma2",
    model_types=("gemma2",),
    from_gguf=_gemma2_gguf,
    from_hugging_face=_gemma2_folder,
    norm_offset=1.0,
    defaults={
        "gemma2": {
            **_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    },
)
GEMMA3 = Family(
    name="Gemma 3",
    gguf="gemma3",
    model_types=("gemma3_text",),
    from_gguf=_gemma3_gguf,
    from_hugging_face=_gemma3_folder,
    norm_offset=1.0,
    theta=1000000.0,
    defaults={"gemma3_text": {**_DEFAULTS, "max_position_embeddings": 131072}},
)

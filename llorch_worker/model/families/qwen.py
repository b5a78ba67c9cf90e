"""Qwen 2, 2.5 and 3 (dense), and DeepSeek-R1-Distill-Qwen.

Qwen 2 adds a bias to Q, K and V. Qwen 3 has none, and normalises each head of Q and of K instead;
its head_dim need not be hidden_size / heads.
"""

from __future__ import annotations

from llorch_worker.model.config import Graph
from llorch_worker.model.families.family import Family
from llorch_worker.model.reader import Reader


def _qwen2(read: Reader) -> Graph:  # noqa: ARG001
    return Graph(qkv_bias=True)


def _qwen3(read: Reader) -> Graph:  # noqa: ARG001
    return Graph(qk_norm="head")


_CONTEXT = {"max_position_embeddings": 32768}

QWEN2 = Family(
    name="Qwen2",
    gguf="qwen2",
    model_types=("qwen2",),
    from_gguf=_qwen2,
    from_hugging_face=_qwen2,
    defaults={"qwen2": {**_CONTEXT, "num_key_value_heads": 32, "use_sliding_window": False}},
)
QWEN3 = Family(
    name="Qwen3",
    gguf="qwen3",
    model_types=("qwen3",),
    from_gguf=_qwen3,
    from_hugging_face=_qwen3,
    defaults={
        "qwen3": {
            **_CONTEXT,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "use_sliding_window": False,
        }
    },
)

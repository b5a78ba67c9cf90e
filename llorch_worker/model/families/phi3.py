"""Phi-3, 3.5 and 4: Q, K and V in one tensor, gate and up in another; LongRoPE.

Phi-4-mini rotates only the first numbers of each head.
"""

from __future__ import annotations

from llorch_worker.model.config import Graph
from llorch_worker.model.families.family import Family
from llorch_worker.model.reader import Reader


def _graph(read: Reader) -> Graph:  # noqa: ARG001
    return Graph(fused=True)


PHI3 = Family(
    name="Phi-3",
    gguf="phi3",
    model_types=("phi3",),
    partial_rotation=True,
    from_gguf=_graph,
    from_hugging_face=_graph,
    defaults={"phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}},
)

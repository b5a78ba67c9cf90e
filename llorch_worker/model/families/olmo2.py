"""OLMo 2: norms on the output of each branch, and of the whole of Q and of K."""

from __future__ import annotations

from llorch_worker.model.config import Graph
from llorch_worker.model.families.family import Family
from llorch_worker.model.reader import Reader


def _graph(read: Reader) -> Graph:
    read.refuse_unless(
        "attention.sliding_window_pattern", (), "OLMo 3's windows in some layers are not supported"
    )
    return Graph(norms="after", qk_norm="whole")


OLMO2 = Family(
    name="OLMo 2",
    gguf="olmo2",
    model_types=("olmo2",),
    from_gguf=_graph,
    from_hugging_face=_graph,
    defaults={"olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}},
)

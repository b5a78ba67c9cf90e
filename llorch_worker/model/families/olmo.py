"""OLMo 2 and 3: norms on the output of each branch, and of the whole of Q and of K.

OLMo 3 gives all but every fourth layer a window; those do not scale RoPE.
"""

from __future__ import annotations

from dataclasses import replace

from llorch_worker.cache import Rope
from llorch_worker.model.config import Graph
from llorch_worker.model.families.family import Family, other_theta, sliding_layers
from llorch_worker.model.reader import Reader

_OLMO3_THETA = 500000.0
_OLMO2 = Graph(norms="after", qk_norm="whole")


def _olmo2(read: Reader) -> Graph:  # noqa: ARG001
    return _OLMO2


def _olmo3(window: int, sliding: tuple[bool, ...], theta: float) -> Graph:
    return replace(
        _OLMO2,
        windows=tuple(window if slides else None for slides in sliding),
        other_ropes=(Rope(theta),),
        layer_ropes=tuple(map(int, sliding)),
    )


def _from_gguf(read: Reader) -> Graph:
    """Both are ``olmo2`` there."""
    if not read.value("attention.sliding_window"):
        return _OLMO2
    sliding = sliding_layers(read, read.integer("block_count"), 4)
    theta = read.number("rope.freq_base", 10000.0)
    return _olmo3(read.integer("attention.sliding_window"), sliding, theta)


def _from_hugging_face(read: Reader) -> Graph:
    sliding = sliding_layers(read, read.integer("num_hidden_layers"), 4)
    theta = other_theta(read, "rope_theta", _OLMO3_THETA)
    return _olmo3(read.integer("sliding_window"), sliding, theta)


_CONTEXT = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

OLMO2 = Family(
    name="OLMo 2",
    gguf="olmo2",
    model_types=("olmo2",),
    from_gguf=_from_gguf,
    from_hugging_face=_olmo2,
    defaults={"olmo2": _CONTEXT},
)
OLMO3 = replace(
    OLMO2,
    name="OLMo 3",
    model_types=("olmo3",),
    from_hugging_face=_from_hugging_face,
    theta=_OLMO3_THETA,
    defaults={"olmo3": {**_CONTEXT, "sliding_window": 4096}},
)

"""SmolLM3: Llama's graph without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Sequence

from llorch_worker.cache import Rope
from llorch_worker.model.config import Graph
from llorch_worker.model.families.family import Family, every
from llorch_worker.model.reader import Reader

_STEP = 4


def _still(layers: Sequence[bool]) -> Graph:
    """``layers``: those that do not rotate."""
    return Graph(other_ropes=(Rope(1.0, dim=0),), layer_ropes=tuple(map(int, layers)))


def _from_gguf(read: Reader) -> Graph:
    return _still(every(_STEP, read.integer("block_count")))


def _from_hugging_face(read: Reader) -> Graph:
    layers = read.integer("num_hidden_layers")
    given = read.value("no_rope_layers")  # 1 where there is RoPE
    if not given:
        return _still(every(read.integer("no_rope_layer_interval", _STEP), layers))
    if (
        not isinstance(given, list)
        or len(given) != layers
        or any(item not in (0, 1) for item in given)
    ):
        what = f"no_rope_layers is {str(given)[:50]!r}"
        raise read.refused(what, f"the model needs {layers} of 0 or 1")
    return _still([not rotates for rotates in given])


SMOLLM3 = Family(
    name="SmolLM3",
    gguf="smollm3",
    model_types=("smollm3",),
    interleaved=True,
    from_gguf=_from_gguf,
    from_hugging_face=_from_hugging_face,
    theta=2000000.0,
    defaults={
        "smollm3": {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        }
    },
)

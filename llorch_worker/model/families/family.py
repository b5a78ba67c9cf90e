"""What a file of this package says about its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llorch_worker.model.config import Graph
from llorch_worker.model.reader import Reader

ReadGraph = Callable[[Reader], Graph]


def plain(read: Reader) -> Graph:  # noqa: ARG001 - the signature of ReadGraph
    """Llama's own graph."""
    return Graph()


@dataclass(frozen=True, kw_only=True)
class Family:
    """How files of one family differ from Llama's."""

    name: str
    gguf: str
    """``general.architecture`` in GGUF files."""
    model_types: tuple[str, ...]
    """``model_type`` in config.json."""
    interleaved: bool = False
    """Converters to GGUF reorder the rows of Q and K, so that RoPE's pairs are neighbours."""
    partial_rotation: bool = False
    """Its files may rotate only the first numbers of each head."""
    from_gguf: ReadGraph = plain
    from_hugging_face: ReadGraph = plain
    theta: float = 10000.0
    """RoPE's base if config.json names none."""
    norm_offset: float = 0.0
    """What folders leave out of the weights of norms; converters to GGUF add it."""
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What transformers takes for keys that config.json of a model_type lacks."""
    scales: frozenset[str] = frozenset()
    """GGUF keys of scales that this graph has; any other family's file with one is refused."""


_SLIDING, _FULL = ("sliding_attention", True), ("full_attention", False)


def every(step: int, layers: int) -> tuple[bool, ...]:
    """For each layer whether it is one of every ``step``, the last of each."""
    return tuple((layer + 1) % step == 0 for layer in range(layers))


def sliding_layers(read: Reader, layers: int, step: int) -> tuple[bool, ...]:
    """Which layers have a window: in config.json by layer_types or a pattern's length, in GGUF by a
    list or a length; if neither is there, all but every ``step``-th."""
    for key in ("layer_types", "attention.sliding_window_pattern"):
        given = read.value(key)
        if isinstance(given, list):
            if len(given) != layers or any(kind not in (*_SLIDING, *_FULL) for kind in given):
                raise read.refused(f"{key} is {str(given)[:50]!r}", f"{layers} kinds are needed")
            return tuple(kind in _SLIDING for kind in given)
    for prefix in ("attention.", "", "_"):
        step = read.integer(f"{prefix}sliding_window_pattern", step)
    return tuple(not full for full in every(step, layers))


def other_theta(read: Reader, key: str, default: float) -> float:
    """The base of the sliding layers in config.json: in rope_parameters, or under an older key."""
    group = read.value("rope_parameters")
    if isinstance(group, dict) and isinstance(group.get("sliding_attention"), dict):
        sliding = Reader(read.path, group["sliding_attention"])
        sliding.refuse_unless("rope_type", ("default",), "sliding layers do not scale RoPE")
        return sliding.number("rope_theta", default)
    return read.number(key, default)

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
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What transformers takes for keys that config.json of a model_type lacks."""
    scales: frozenset[str] = frozenset()
    """GGUF keys of scales that this graph has; any other family's file with one is refused."""

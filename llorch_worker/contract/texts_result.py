"""The results of ``llorch.embed``, ``llorch.rerank`` and ``llorch.score``."""

from __future__ import annotations

from array import array
from base64 import b64decode
from sys import byteorder

from pydantic import BaseModel, ConfigDict

from llorch_worker.contract.result import JobResult


class TextsResult(JobResult):
    """What the three have in common. ``usage.prompt`` counts the tokens of all texts."""


class EmbeddingResult(TextsResult):
    """The result of ``llorch.embed``."""

    embeddings: tuple[str, ...] | tuple[tuple[float, ...], ...]
    """One for each text, in order: base64 of float32, or a list of numbers."""
    dimensions: int
    """Numbers of each."""

    def vectors(self) -> list[list[float]]:
        """The vectors as numbers, however they were sent."""
        return [_numbers(each) if isinstance(each, str) else [*each] for each in self.embeddings]

    def __repr__(self) -> str:
        size = f"{len(self.embeddings)} vectors of {self.dimensions}"
        return f"<{size}, {self.usage.prompt} tokens>"

    __str__ = __repr__


class Ranked(BaseModel):
    """One document of a ranking."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    index: int
    """Its place among the documents of the request."""
    relevance_score: float


class RerankResult(TextsResult):
    """The result of ``llorch.rerank``."""

    results: tuple[Ranked, ...]
    """The best first."""

    def __repr__(self) -> str:
        return f"<{len(self.results)} documents ranked, {self.usage.prompt} tokens>"

    __str__ = __repr__


class ScoreResult(TextsResult):
    """The result of ``llorch.score``."""

    scores: tuple[float, ...]
    """One for each pair, in order."""

    def __repr__(self) -> str:
        return f"<{len(self.scores)} scores, {self.usage.prompt} tokens>"

    __str__ = __repr__


def _numbers(encoded: str) -> list[float]:
    numbers = array("f", b64decode(encoded))
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()

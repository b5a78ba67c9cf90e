"""The bodies of ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``, and their answers: OpenAI's,
Jina's and vLLM's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from llorch_worker.contract import (
    AnyTextsRequest,
    EmbeddingResult,
    EmbedRequest,
    Fault,
    JobResult,
    Priority,
    RerankRequest,
    RerankResult,
    ScoreRequest,
    ScoreResult,
    describe,
)
from llorch_worker.contract.texts_request import Encoding
from llorch_worker.openai_api.shape import KeyedBody, request_of


class TextsBody(KeyedBody):
    """What the three have in common. The contract checks the values, once."""

    kind: ClassVar[type[AnyTextsRequest]]
    # They may hold a million token ids.
    bounded_elsewhere = ("input", "documents", "text_1", "text_2")

    model: SkipValidation[str | None] = None
    """By default the only one that is served."""
    truncate: SkipValidation[bool | None] = None
    """Cut texts that are too long at their end. Else they are refused."""
    instruction: SkipValidation[str | None] = None
    """What the texts, or the query, are for: put before them."""
    priority: SkipValidation[Priority | None] = None
    """By default that of the key, or normal."""
    deadline_s: SkipValidation[float | None] = None
    """Seconds from now."""

    def to_requests(self) -> list[AnyTextsRequest]:
        """The one job's. Raises ``InvalidRequest``."""
        names = self.kind.model_fields.keys() & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names} | self._fields()
        return [request_of(self.kind, given, self.refusals())]

    def _fields(self) -> dict[str, Any]:
        """The contract's, where they are not the body's own."""
        return {}

    @abstractmethod
    def answer(self, results: Sequence[JobResult], created: int) -> BaseModel:
        """The document of the one job's result."""


class TokensUsed(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0

    @classmethod
    def of(cls, result: JobResult) -> TokensUsed:
        return cls(prompt_tokens=result.usage.prompt, total_tokens=result.usage.prompt)


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: str | list[float]


class Embeddings(BaseModel):
    """OpenAI's answer."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TokensUsed


class EmbeddingsBody(TextsBody):
    """OpenAI's request."""

    kind = EmbedRequest
    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["Once", "upon a time"]}]})

    input: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    """One text or up to 2,048, as texts or as token ids."""
    dimensions: SkipValidation[int | None] = None
    encoding_format: Encoding | None = None
    """By default ``float``: lists of numbers. ``base64`` is of float32, little-endian."""
    normalize: SkipValidation[bool | None] = None
    """Whether each vector has the length 1; by default as the model's files say."""

    def _fields(self) -> dict[str, Any]:
        # As numbers they would take three times the bytes in Redis.
        return {"encoding_format": "base64"}

    def answer(self, results: Sequence[JobResult], created: int) -> Embeddings:  # noqa: ARG002
        (result,) = results
        assert isinstance(result, EmbeddingResult)
        wants_text = self.encoding_format == "base64"
        vectors: Sequence[Any] = result.embeddings if wants_text else result.vectors()
        return Embeddings.model_construct(
            data=[
                Embedding.model_construct(index=at, embedding=vector)
                for at, vector in enumerate(vectors)
            ],
            model=result.model,
            usage=TokensUsed.of(result),
        )


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(BaseModel):
    """Jina's and vLLM's answer."""

    id: str
    model: str
    usage: TokensUsed
    results: list[RankedDocument]


class RerankBody(TextsBody):
    """Jina's request."""

    kind = RerankRequest
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "Who paints?", "documents": ["A robot", "Rain"]}]}
    )

    query: SkipValidation[str]
    documents: SkipValidation[list[str | dict[str, Any]]]
    """Texts, or objects with a ``text``."""
    top_n: SkipValidation[int | None] = None
    """How many of the best; by default all."""
    return_documents: bool = True

    def _fields(self) -> dict[str, Any]:
        return {"documents": self._texts}

    @property
    def _texts(self) -> Any:
        documents: Any = self.documents  # not checked yet
        if isinstance(documents, str):
            return [documents]
        if not isinstance(documents, list):
            return documents
        return [each.get("text") if isinstance(each, dict) else each for each in documents]

    def answer(self, results: Sequence[JobResult], created: int) -> Ranking:  # noqa: ARG002
        (result,) = results
        assert isinstance(result, RerankResult)
        texts = self._texts

        def document(at: int) -> RankedText | None:
            shown = self.return_documents and isinstance(texts[at], str)
            return RankedText(text=texts[at]) if shown else None

        return Ranking(
            id=result.id,
            model=result.model,
            usage=TokensUsed.of(result),
            results=[
                RankedDocument(
                    index=each.index,
                    relevance_score=each.relevance_score,
                    document=document(each.index),
                )
                for each in result.results
            ],
        )


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(BaseModel):
    """vLLM's answer."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TokensUsed


class ScoreBody(TextsBody):
    """vLLM's request."""

    kind = ScoreRequest
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text_1": "Who paints?", "text_2": ["A robot", "Rain"]}]}
    )

    text_1: SkipValidation[str | list[str]]
    text_2: SkipValidation[str | list[str]]
    encoding_format: SkipValidation[Any] = Field(None, exclude=True)

    def refusals(self) -> list[Fault]:
        faults = super().refusals()
        if self.encoding_format not in (None, "float"):
            rule, got = "must be float: a score is a number", describe(self.encoding_format)
            faults.append(Fault(field="encoding_format", rule=rule, got=got))
        return faults

    def answer(self, results: Sequence[JobResult], created: int) -> Scores:
        (result,) = results
        assert isinstance(result, ScoreResult)
        return Scores(
            id=result.id,
            created=created,
            model=result.model,
            data=[Score(index=at, score=score) for at, score in enumerate(result.scores)],
            usage=TokensUsed.of(result),
        )

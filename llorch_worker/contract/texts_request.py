"""Requests for vectors and scores of texts: ``llorch.embed``, ``llorch.rerank``, ``llorch.score``.

Names follow OpenAI's embeddings, Jina's and vLLM's reranking and vLLM's scoring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from llorch_worker.contract.errors import InvalidRequest
from llorch_worker.contract.job_request import JobRequest
from llorch_worker.contract.message import MAX_PROMPT_CHARS
from llorch_worker.contract.output_format import NOT_EMPTY
from llorch_worker.contract.token_ids import MAX_COUNT

MOST_TEXTS = 2_048
"""As in OpenAI's API."""
MAX_INSTRUCTION_CHARS = 8_192
MOST_RESULT_BYTES = 16 * 2**20
"""Of the vectors in a result: Redis keeps it whole, and Celery reads it at once."""
FLOAT_BYTES = 16
"""What a number of a list takes in JSON at most."""

TEXT_FIELDS = ("input", "documents", "text_2")
"""Those of which a request has one, and most of its texts."""

Encoding = Literal["base64", "float"]
Text = str | tuple[int, ...]
"""A text, or its token ids with those that the model wants around it."""


def _text(value: object) -> Text:
    if isinstance(value, str):
        if not value:
            raise PydanticCustomError("empty", "must have at least 1 character")
        if len(value) > MAX_PROMPT_CHARS:
            most = {"limit": MAX_PROMPT_CHARS}
            raise PydanticCustomError("long", "must have at most {limit} characters", most)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("unicode", "must be valid Unicode") from None
        return value
    if isinstance(value, list | tuple):
        if not value:
            raise PydanticCustomError("empty", "must have at least 1 token id")
        if all(type(each) is int and 0 <= each <= MAX_COUNT for each in value):
            return tuple(value)
        raise PydanticCustomError("ids", "must be a text, or a list of token ids")
    raise PydanticCustomError("text", "must be a text, or a list of token ids")


def _as_texts(value: object) -> object:
    """One text, or the ids of one, as a list of one."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise PydanticCustomError("texts", "must be a text or a list of texts")
    return (value,) if value and all(type(each) is int for each in value) else tuple(value)


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_ONE: dict[str, Any] = {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}
_SOME: dict[str, Any] = {
    "anyOf": [*_ONE["anyOf"], {"type": "array", "maxItems": MOST_TEXTS, "items": _ONE}]
}
OneText = Annotated[Any, PlainValidator(_text), WithJsonSchema(_ONE)]
Texts = Annotated[
    Annotated[tuple[OneText, ...], Field(max_length=MOST_TEXTS), NOT_EMPTY],
    BeforeValidator(_as_texts),
    WithJsonSchema(_SOME),
]


class TextsRequest(JobRequest):
    """What the three have in common."""

    truncate: bool = False
    """Whether a text that is too long is cut at its end. Else it is refused."""
    instruction: str | None = Field(None, min_length=1, max_length=MAX_INSTRUCTION_CHARS)
    """What the texts are for, put before each as the model wants it, in a ranking before the query
    alone. None: as its files say."""

    @property
    def all_texts(self) -> tuple[Text, ...]:
        """Every text of the request, once."""
        groups = [getattr(self, name, ()) for name in ("input", "documents", "text_1", "text_2")]
        query = getattr(self, "query", None)
        return tuple(text for group in groups for text in group) + ((query,) if query else ())

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return {k: v for k, v in fields.items() if v is not None or k not in cls.model_fields}


class EmbedRequest(TextsRequest):
    """The vectors of texts."""

    task = "llorch.embed"

    input: Texts
    """One text or up to 2,048, as texts or as token ids."""
    dimensions: int | None = Field(None, ge=1, le=MAX_COUNT)
    """How many numbers of each vector, from its first on. None: all."""
    normalize: bool | None = None
    """Whether each vector has the length 1. None: as the model's files say."""
    encoding_format: Encoding = "base64"
    """``base64``: of each vector's float32, little-endian; ``float``: lists of numbers, which take
    three times the bytes."""

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**fields)  # for type checkers: fields may be lists


class RerankRequest(TextsRequest):
    """How well documents answer a query."""

    task = "llorch.rerank"

    query: OneText
    documents: Texts
    top_n: int | None = Field(None, ge=1, le=MAX_COUNT)
    """How many of the best. None: all."""

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**fields)  # for type checkers: fields may be lists


class ScoreRequest(TextsRequest):
    """How well texts go together, pair by pair."""

    task = "llorch.score"

    text_1: Texts
    """As many as ``text_2``, or one for all of them."""
    text_2: Texts

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**fields)  # for type checkers: fields may be lists

    @model_validator(mode="after")
    def _pairs(self) -> ScoreRequest:
        first, second = len(self.text_1), len(self.text_2)
        if first not in (1, second):
            rule = f"must be one text, or as many as text_2: {second}"
            raise InvalidRequest.from_fault("text_1", rule, f"{first} texts")
        return self


AnyTextsRequest = EmbedRequest | RerankRequest | ScoreRequest

"""Requests for vectors and scores in the engine's terms: token ids of texts or of pairs."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llorch_worker.contract import (
    AnyTextsRequest,
    EmbedRequest,
    Fault,
    InvalidRequest,
    RerankRequest,
    describe,
)
from llorch_worker.contract.texts_request import FLOAT_BYTES, MOST_RESULT_BYTES, Text
from llorch_worker.intake.prepared import Limits
from llorch_worker.text import Tokenizer, TooManyTokens

_INT = "i"
_JUDGING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""What Qwen3-Reranker's card puts around a pair, and what it asks for by default."""
_JUDGED_BY = "Given a web search query, retrieve relevant passages that answer the query"
_LEFT_OUT: Mapping[str, Any] = dict.fromkeys(
    ("input", "query", "documents", "text_1", "text_2", "instruction", "metadata")
)


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """What the engine needs of a request, as a document without a text."""

    task: str
    options: Mapping[str, Any]
    """The other fields of the request, as it was sent."""
    token_ids: Sequence[Sequence[int]]
    """Of each text, or of each pair."""
    seconds: Sequence[int]
    """Where the second text of each pair begins; empty if these are no pairs."""
    first: int = 0
    """How many of the texts are to be compared with the others; 0 if none are."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        ids = array(_INT, (token_id for text in self.token_ids for token_id in text))
        return {
            "task": self.task,
            "options": self.options,
            "lengths": [*map(len, self.token_ids)],
            "ids": b64encode(ids).decode(),
            "seconds": self.seconds,
            "first": self.first,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PreparedTexts:
        ids, texts, at = array(_INT, b64decode(document["ids"])), [], 0
        for length in document["lengths"]:
            texts.append(ids[at : at + length])
            at += length
        others = {name: document[name] for name in ("task", "options", "seconds", "first")}
        return cls(token_ids=texts, **others)


def prepare_texts(request: AnyTextsRequest, tokenizer: Tokenizer, limits: Limits) -> PreparedTexts:
    """The request in the engine's terms.

    Raises InvalidRequest with each rule of this model that it breaks: a text is too long, an id is
    beyond the vocabulary, the model has no such dimensions, or the result would be too large.
    """
    encoder = _Encoder(request, tokenizer, limits)
    seconds: Sequence[int] = ()
    first = 0
    texts: list[list[int]]
    if isinstance(request, EmbedRequest):
        texts = encoder.texts("input", request.input, request.instruction)
        encoder.faults += _too_large(request, limits)
    elif limits.scores_pairs and limits.asks_as_qwen3:
        texts = encoder.judged()
    elif limits.scores_pairs:
        texts, seconds = encoder.pairs()
    else:
        (name, queries), (other, documents) = _groups(request)
        texts = encoder.texts(name, queries, request.instruction)
        first = len(texts)
        texts += encoder.texts(other, documents)
    if encoder.faults:
        raise InvalidRequest.from_faults(encoder.faults)
    options = {name: each for name, each in request.wire().items() if name not in _LEFT_OUT}
    return PreparedTexts(request.task, options, texts, seconds, first)


def _groups(request: AnyTextsRequest) -> tuple[tuple[str, Sequence[Text]], ...]:
    if isinstance(request, RerankRequest):
        return ("query", (request.query,)), ("documents", request.documents)
    assert not isinstance(request, EmbedRequest)
    return ("text_1", request.text_1), ("text_2", request.text_2)


class _Encoder:
    """Encodes the texts of one request, and notes which rules they break."""

    def __init__(self, request: AnyTextsRequest, tokenizer: Tokenizer, limits: Limits) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._limits = limits
        self._longest = limits.longest_text or limits.max_context
        self._before, self._behind = tokenizer.around_text
        self.faults: list[Fault] = []

    def texts(
        self, field: str, given: Sequence[Text], instruction: str | None = None
    ) -> list[list[int]]:
        """The ids of each text, with those that the model wants around it."""
        return [self._text(name, text, instruction) for name, text in _named(field, given)]

    def _text(self, field: str, text: Text, instruction: str | None) -> list[int]:
        most = self._longest
        if not isinstance(text, str):
            ids = [*text]
            self._check_ids(field, ids)
            if instruction is not None:
                rule = "must be a text: an instruction is not put before token ids"
                self._refuse(field, rule, len(ids))
            if self._request.truncate and len(ids) > most:
                self._refuse(field, f"must be at most {most} tokens: texts alone are cut", len(ids))
                return ids
        else:
            ids = self._inside(field, self._told(instruction) + text)
            around = len(self._before) + len(self._behind)
            if self._request.truncate:
                ids = ids[: most - around]
            ids = [*self._before, *ids, *self._behind]
        if len(ids) > most:
            self._refuse(field, f"must be at most {most} tokens, or truncate true", len(ids))
        return ids

    def _told(self, instruction: str | None) -> str:
        """What says what a text is for."""
        if instruction is None or not self._limits.asks_as_qwen3:
            return instruction or ""
        return f"Instruct: {instruction}\nQuery:"

    def judged(self) -> list[list[int]]:
        """The ids of each pair in a question that yes or no answers, as Qwen3-Reranker's card has
        it."""
        (name, first), (other, second) = _groups(self._request)
        before, behind = (
            self._tokenizer.encode(part, add_special_tokens=False, parse_special=True)
            for part in _JUDGING
        )
        room = self._longest - len(before) - len(behind)
        queries = [self._as_text(each, text) for each, text in _named(name, first)]
        if len(queries) == 1:
            queries *= len(second)
        asked = self._request.instruction or _JUDGED_BY
        texts = []
        for query, (field, document) in zip(queries, _named(other, second), strict=True):
            document = self._as_text(field, document)
            text = f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"
            ids = self._inside(field, text)
            if self._request.truncate:
                ids = ids[:room]
            if len(ids) > room:
                rule = f"must be at most {room} tokens with {name}, or truncate true"
                self._refuse(field, rule, len(ids))
            texts.append([*before, *ids, *behind])
        return texts

    def pairs(self) -> tuple[list[list[int]], list[int]]:
        """The ids of each pair of texts in one, as BERT's cross-encoders want it, and where the
        second of each begins."""
        (name, first), (other, second) = _groups(self._request)
        before = self._request.instruction or ""
        firsts = [self._part(each, text, before) for each, text in _named(name, first)]
        seconds = [self._part(each, text) for each, text in _named(other, second)]
        if len(firsts) == 1:
            firsts *= len(seconds)
        pairs, begins = [], []
        between = self._tokenizer.between_texts
        room = self._longest - len(self._before) - len(between) - len(self._behind)
        for at, (one, two) in enumerate(zip(firsts, seconds, strict=True)):
            if len(one) + len(two) > room:
                if self._request.truncate:
                    most_one, most_two = _cut(len(one), len(two), room)
                    one, two = one[:most_one], two[:most_two]
                else:
                    rule = f"must be at most {room} tokens with {name}, or truncate true"
                    self._refuse(f"{other}.{at}", rule, len(one) + len(two))
            begins.append(len(self._before) + len(one) + len(between))
            pairs.append([*self._before, *one, *between, *two, *self._behind])
        return pairs, begins

    def _part(self, field: str, text: Text, before: str = "") -> list[int]:
        return self._inside(field, before + self._as_text(field, text))

    def _as_text(self, field: str, text: Text) -> str:
        if isinstance(text, str):
            return text
        rule = "must be a text: this model reads pairs"
        self.faults.append(Fault(field=field, rule=rule, got=describe(text)))
        return ""

    def _inside(self, field: str, text: str) -> list[int]:
        # A text that is cut is tokenised whole.
        at_most = None if self._request.truncate else self._longest
        try:
            return self._tokenizer.encode(text, add_special_tokens=False, at_most=at_most)
        except TooManyTokens as too_many:
            rule = f"must be at most {self._longest} tokens, or truncate true"
            self._refuse(field, rule, too_many.at_least, at_least=True)
            return []

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        size = self._limits.vocab_size
        if max(ids) >= size:
            rule = f"token ids must be below {size}, the vocabulary's size"
            self.faults.append(Fault(field=field, rule=rule, got=str(max(ids))))

    def _refuse(self, field: str, rule: str, tokens: int, *, at_least: bool = False) -> None:
        got = f"{'at least ' if at_least else ''}{tokens} tokens"
        self.faults.append(Fault(field=field, rule=rule, got=got))


def _named(field: str, texts: Sequence[Text]) -> Iterator[tuple[str, Text]]:
    if field == "query":
        return iter([(field, texts[0])])
    return ((f"{field}.{at}", text) for at, text in enumerate(texts))


def _cut(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two texts stays, so that both fit: the longer is cut first, as Hugging Face's
    ``longest_first`` does."""
    if swapped := first > second:
        first, second = second, first
    second = first if first > room else max(first, room - first)
    if first + second > room:
        first = room // 2
        second = first + room % 2
    return (second, first) if swapped else (first, second)


def _too_large(request: EmbedRequest, limits: Limits) -> Iterable[Fault]:
    """The faults of the size of the vectors that are asked for."""
    width, sizes = limits.width, limits.sizes
    numbers = request.dimensions or width
    if sizes and numbers not in (*sizes, width):
        named = ", ".join(map(str, sorted({*sizes, width})))
        rule = f"must be one of {named}, to which the model's vectors may be cut"
        yield Fault(field="dimensions", rule=rule, got=str(numbers))
        return
    if numbers > width:
        rule = f"must be at most {width}, what the model has"
        yield Fault(field="dimensions", rule=rule, got=str(numbers))
        return
    count = len(request.input)
    encoded_bytes = count * (-(-4 * numbers // 3) * 4 + 3)
    asked_bytes = encoded_bytes
    if request.encoding_format == "float":
        asked_bytes = count * numbers * FLOAT_BYTES
    if asked_bytes <= MOST_RESULT_BYTES:
        return
    got = f"{count} vectors of {numbers} numbers, up to {asked_bytes} bytes"
    most = f"the result must be at most {MOST_RESULT_BYTES} bytes"
    if encoded_bytes <= MOST_RESULT_BYTES:
        yield Fault(field="encoding_format", rule=f"must be base64: {most}", got=got)
        return
    fitting = MOST_RESULT_BYTES * count // encoded_bytes
    rule = f"must be at most {fitting} texts, or dimensions fewer: {most}"
    yield Fault(field="input", rule=rule, got=got)

"""A request for vectors or scores in the engine: its texts, and what they have given so far."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, Final, Unpack

import torch

from llorch_worker.contract import (
    REQUESTS,
    EmbeddingResult,
    EmbedRequest,
    Finished,
    InternalError,
    RerankRequest,
    RerankResult,
    ScoreResult,
    TextsRequest,
    TextsResult,
    Usage,
    Vectors,
)
from llorch_worker.contract.texts_result import Ranked
from llorch_worker.engine.computed_generation import ComputedGeneration
from llorch_worker.engine.interface import Attempt, ModelFacts
from llorch_worker.engine.sequence import PRIORITY_RANKS
from llorch_worker.intake.texts import PreparedTexts
from llorch_worker.model.encoder.pooling import normalized

_STAND_INS: Final[dict[str, dict[str, Any]]] = {
    "llorch.embed": {"input": "-"},
    "llorch.rerank": {"query": "-", "documents": "-"},
    "llorch.score": {"text_1": "-", "text_2": "-"},
}
"""In the place of texts, of which the engine has the ids."""
FLOAT_DIGITS: Final = 9
"""Enough to write a float32 so that it is read as the same."""


class TextsGeneration(ComputedGeneration[TextsRequest, TextsResult]):
    """The job of a :class:`PreparedTexts`. The engine's thread alone calls what is not public in
    :class:`.GenerationHandle`."""

    def __init__(
        self,
        prepared: PreparedTexts,
        facts: ModelFacts,
        *,
        normalizes: bool,
        request_cancel: Callable[[TextsGeneration], None],
        **attempt: Unpack[Attempt],
    ) -> None:
        """``normalizes``: whether vectors have the length 1 if the request does not say. Raises
        InternalError if the journal is another request's."""
        request = REQUESTS[prepared.task](**_STAND_INS[prepared.task], **prepared.options)
        assert isinstance(request, TextsRequest)
        super().__init__(request, facts, **attempt)
        self.prepared = prepared
        self._cancel = request_cancel
        self._cut: int | None = None
        self._normalizes = bool(prepared.first)
        if isinstance(request, EmbedRequest):
            self._cut = request.dimensions
            self._normalizes = normalizes if request.normalize is None else request.normalize
        self.values = torch.empty(len(prepared.token_ids), self._cut or facts.width)
        """float32 ``[texts, width]``, as far as they are ``computed``."""
        self.computed = 0
        journal = attempt.get("journal")
        for part in journal.vectors if journal else ():
            self._take_journalled(part)
        self.rank = PRIORITY_RANKS[request.priority]
        self.waits_since_s = self.waited_s = 0.0
        """Since when no step has taken some of its texts, and how long that was so before."""

    def _take_journalled(self, part: Vectors) -> None:
        end = part.index + part.count
        if part.width != self.values.shape[1] or end > len(self.values):
            raise InternalError("the journal is of another request")
        read = torch.frombuffer(bytearray(b64decode(part.values)), dtype=torch.float32)
        self.values[part.index : end] = read.view(part.count, part.width)
        self.computed = end

    # The engine's side -----------------------------------------------------------------------

    @property
    def left(self) -> int:
        """Texts that are not computed."""
        return len(self.values) - self.computed

    def start(self, now_s: float) -> None:
        """Emits ``started`` at the first step; later calls do nothing."""
        if self._started_s is None:
            self._started_s = now_s
            self._emit_started(self.prepared.tokens)

    def take(self, rows: torch.Tensor, now_s: float) -> None:
        """Takes what the next texts gave, float32 ``[texts, width]``. It tells them, or ends the
        job if they are its last."""
        if self._cut is not None:
            rows = rows[:, : self._cut]
        if self._normalizes:
            rows = normalized(rows)
        begin, self.computed = self.computed, self.computed + len(rows)
        self.values[begin : self.computed] = rows
        if self.left:
            self._emit(
                Vectors(
                    index=begin,
                    total=len(self.values),
                    width=self.values.shape[1],
                    values=_encoded(self.values[begin : self.computed]),
                )
            )
        else:
            self.finish(now_s)

    def finish(self, now_s: float) -> None:
        """Ends with a result, once all texts are computed."""
        self.start(now_s)
        self._first_token_s = now_s
        self._ended = self._usage(), self._timings(now_s)
        usage, timings = self._ended
        self._emit(Finished(finish_reason="stop", usage=usage, timings=timings))

    # Its submitter's side --------------------------------------------------------------------

    def _request_cancel(self) -> None:
        self._cancel(self)

    def _usage(self) -> Usage:
        return Usage(prompt=self.prepared.tokens, completion=0)

    def _read_result(self) -> TextsResult:
        """Made by the thread that waits for it: a step must not wait for so many numbers."""
        request = self.request
        if isinstance(request, EmbedRequest):
            return EmbeddingResult(
                embeddings=(
                    tuple(map(_encoded, self.values))
                    if request.encoding_format == "base64"
                    else tuple(map(_numbers, self.values))
                ),
                dimensions=self.values.shape[1],
                **self._of_job(*self._ended),
            )
        scores = self._scores()
        if isinstance(request, RerankRequest):
            best = scores.argsort(descending=True, stable=True)[: request.top_n].tolist()
            numbers = _numbers(scores)
            ranked = tuple(Ranked(index=at, relevance_score=numbers[at]) for at in best)
            return RerankResult(results=ranked, **self._of_job(*self._ended))
        return ScoreResult(scores=_numbers(scores), **self._of_job(*self._ended))

    def _scores(self) -> torch.Tensor:
        """float32 ``[pairs]``: the head's, or the cosine of two vectors."""
        first = self.prepared.first
        if not first:
            return self.values[:, 0]
        return (self.values[:first] * self.values[first:]).sum(1)


def _encoded(values: torch.Tensor) -> str:
    # Little-endian, as every machine that runs torch.
    return b64encode(values.contiguous().numpy().tobytes()).decode()


def _numbers(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.{FLOAT_DIGITS}g}") for value in values.tolist())

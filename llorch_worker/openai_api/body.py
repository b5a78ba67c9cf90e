"""What a completion and a chat have in common: a body, its jobs, and the answer from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from pydantic import SkipValidation

from llorch_worker.contract import (
    Fault,
    Finished,
    GenerationRequest,
    GenerationResult,
    LlorchError,
    ResponseFormat,
    Started,
    Tokens,
    describe,
)
from llorch_worker.openai_api.errors import body_of
from llorch_worker.openai_api.sampling import Sampling


class Chunks(Protocol):
    """The documents of one answer's stream. Jobs are numbered as their requests were."""

    needs_results: bool
    """Whether :meth:`finished` needs the job's result."""

    def started(self, job: int, event: Started) -> None: ...

    def tokens(self, job: int, event: Tokens) -> Iterator[Mapping[str, Any]]: ...

    def finished(
        self, job: int, event: Finished, result: GenerationResult | None
    ) -> Iterator[Mapping[str, Any]]: ...

    def end(self) -> Iterator[Mapping[str, Any]]:
        """After the last job has finished."""
        ...


class Body(Sampling):
    """A request that is answered from the results of its jobs."""

    done: ClassVar[bytes] = b"data: [DONE]\n\n"
    """The end of a stream."""

    @abstractmethod
    def to_requests(self) -> list[GenerationRequest]:
        """One for each job. Raises ``InvalidRequest``, with the body's own names."""

    @abstractmethod
    def answer(self, results: Sequence[GenerationResult], created: int) -> Mapping[str, Any]:
        """OpenAI's document. ``results``: one for each request; ``created``: Unix time."""

    @abstractmethod
    def chunks(self, requests: Sequence[GenerationRequest], job_id: str, created: int) -> Chunks:
        """The same answer as a stream. ``job_id``: of the first job."""

    @property
    def wants_prompt_ids(self) -> bool:
        """Whether :meth:`with_prompt_ids` is to be called."""
        return False

    def with_prompt_ids(
        self, document: Mapping[str, Any], ids: Sequence[Sequence[int]], told: set[int]
    ) -> Mapping[str, Any]:
        """``document``, an answer or a chunk of one, with the ``ids`` of the prompts, each once:
        ``told`` notes which are."""
        raise NotImplementedError

    def failure(self, error: LlorchError) -> Mapping[str, Any]:
        """What ends a stream that has begun."""
        return body_of(error).model_dump(mode="json")


class OpenAIBody(Body):
    """A completion's or a chat's, with vLLM's fields for prompts and their ids."""

    prompt_logprobs: SkipValidation[int | None] = None
    """Also the log probabilities of the prompts' tokens, with so many alternatives each."""
    return_token_ids: bool | None = None
    """Also the ids of the prompts and of the answers."""
    response_format: SkipValidation[ResponseFormat | None] = None

    @property
    def wants_prompt_ids(self) -> bool:
        return bool(self.return_token_ids)

    def _faults(self) -> list[Fault]:
        """Rules of OpenAI's that the body breaks."""
        if self.prompt_logprobs is None or not self.stream:
            return []
        got = describe(self.prompt_logprobs)
        return [Fault(field="prompt_logprobs", rule="cannot be streamed", got=got)]

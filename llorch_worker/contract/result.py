"""The one final result of a job."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, computed_field, model_validator

from llorch_worker.contract.plain_objects import mark_plain
from llorch_worker.contract.tools import ToolCall

FinishReason = Literal["stop", "length", "deadline", "cancelled", "tool_calls", "content_filter"]


class _Part(BaseModel):
    # ``ignore``: a dump contains the computed ``text``, and a newer worker may add fields.
    model_config = ConfigDict(frozen=True, extra="ignore")


class TokenLogprob(_Part):
    """A token and its log probability under the model's own distribution."""

    id: int
    text: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    """The token's own bytes, if they are not those of ``text``."""


class TokenLogprobs(TokenLogprob):
    """A generated token's log probability and those of the most likely alternatives."""

    top: tuple[TokenLogprob, ...] = ()

    @model_validator(mode="after")
    def _lets_others_run(self) -> Self:
        """Does nothing. It is Python code, so while pydantic parses a long result the interpreter
        can switch threads here; otherwise the GIL is held throughout."""
        return self


class Usage(_Part):
    """Tokens of the prompt, of the prompt found in a cache, and generated in all choices;
    ``reasoning``: of these, in thoughts; ``accepted_draft_tokens``: of these, guessed by the last
    worker (see ``LLORCH_DRAFTER``); ``estimated``: a server counted none, and there are at least so
    many."""

    prompt: int
    cached: int = 0
    completion: int
    reasoning: int = 0
    accepted_draft_tokens: int = 0
    estimated: Literal[True] | None = None


class Timings(_Part):
    """Milliseconds. ``queue_ms`` runs from the enqueueing, if known, to the first engine step."""

    queue_ms: float
    prefill_ms: float
    first_token_ms: float
    decode_ms: float


class Choice(_Part):
    index: int
    text: str
    reasoning_content: str | None = None
    """The thought before the text, which ``token_ids`` begin with."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    """The one of the request's that ended the text."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    unmet: tuple[str, ...] | None = None
    """Rules of a schema that no grammar holds and that the text breaks: place and keyword."""


class JobResult(_Part):
    """What the results of all tasks have in common. A stock app's ``AsyncResult.get()`` reads one
    as a dict."""

    id: str
    model: str
    model_fingerprint: str = ""
    """Of the weights, tokenizer and chat template that made the whole of it."""
    arithmetic: tuple[str, ...] = ()
    """Dtypes and kernels that computed it, in order; several if a worker with others took over."""
    usage: Usage
    timings: Timings
    worker: str
    attempts: int = 1
    resumed: Literal[True] | None = None
    """Whether it goes on after what an earlier attempt has made."""
    restarted: Literal[True] | None = None
    """Whether what an earlier attempt made is void, which the stream said."""
    metadata: dict[str, Any] | None = None

    @property
    def ended(self) -> FinishReason:
        """Why the job ended."""
        return "stop"

    def __json__(self) -> dict[str, Any]:
        """Called by kombu's JSON serialiser for the result backend."""
        document = self.model_dump(mode="json", exclude_none=True)
        if self.metadata is not None:
            document["metadata"] = mark_plain(document["metadata"])
        return document

    def __repr__(self) -> str:
        # Celery writes repr(result) into its log and into the task-succeeded event. Neither may
        # contain prompts or what was made of them.
        # Flower's list of tasks shows the first 40 characters.
        used = self.usage
        return f"<{self.ended}, {used.prompt} prompt + {used.completion} new tokens>"

    __str__ = __repr__


class GenerationResult(JobResult):
    """The result of ``llorch.generate``."""

    choices: tuple[Choice, ...]
    seed: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry for each token of the prompt; None for the first, which nothing precedes."""
    generation_config: dict[str, int | float] | None = None
    """What the request did not name, and the sender took from the model's files."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def ended(self) -> FinishReason:
        """That of the first choice."""
        return self.choices[0].finish_reason

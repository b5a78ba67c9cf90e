"""The answer to ``/v1/completions``, at once and in chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NotRequired

from llorch_worker.contract import (
    Choice,
    Finished,
    GenerationResult,
    Started,
    TokenLogprobs,
    Tokens,
)
from llorch_worker.openai_api.chunk_frame import ChunkFrame
from llorch_worker.openai_api.fingerprint import TakenConfig, system_fingerprint, taken_config
from llorch_worker.openai_api.logprobs import (
    CompletionLogprobs,
    PromptToken,
    TextOffsets,
    completion_logprobs,
)
from llorch_worker.openai_api.sampling import StreamOptions
from llorch_worker.openai_api.usage import Finish, UsageDocument, finish, usage_document

Prompt = str | list[int]


class CompletionChoice(Finish):
    text: str
    index: int
    """Choices of the first prompt come first."""
    logprobs: CompletionLogprobs | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptToken] | None]]


class Completion(TakenConfig):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageDocument | None]
    system_fingerprint: str | None


def completion(
    results: Sequence[GenerationResult], created: int, echoed: Sequence[Prompt]
) -> Completion:
    """``echoed``: the prompts, if they are part of the texts."""
    choices = [
        _choice(len(result.choices) * job + choice.index, choice, result, echoed[job : job + 1])
        for job, result in enumerate(results)
        for choice in result.choices
    ]
    return {
        "id": completion_id(results[0].id),
        "object": "text_completion",
        "created": created,
        "model": results[0].model,
        "choices": choices,
        "usage": usage_document(result.usage for result in results),
        "system_fingerprint": system_fingerprint(results[0]),
        **taken_config(results[0]),
    }


def completion_id(job_id: str) -> str:
    return f"cmpl-{job_id}"


def _choice(
    index: int, choice: Choice, result: GenerationResult, echoed: Sequence[Prompt]
) -> CompletionChoice:
    prompt, first_text, offset = "", "", 0
    tokens: Sequence[TokenLogprobs | None] | None = choice.logprobs
    if echoed:
        known = result.prompt_logprobs or ()
        rest = "".join(token.text for token in known if token is not None)
        match echoed[0]:
            case str(prompt):
                # Nothing scores the first token, so its text is what the others leave.
                first_text = prompt.removesuffix(rest) if prompt.endswith(rest) else ""
                offset = len(prompt) - len(first_text + rest)
            case _:
                prompt = rest
        tokens = None if tokens is None else (*known, *tokens)
    return {
        "text": prompt + choice.text,
        "index": index,
        "logprobs": None
        if tokens is None
        else completion_logprobs(tokens, TextOffsets(offset), first_text=first_text),
        # mypy takes a ``Finish`` for one that may have what is not required here.
        **finish(choice.finish_reason),  # type: ignore[typeddict-item]
    }


class CompletionChunks:
    """See :class:`llorch_worker.openai_api.body.Chunks`."""

    def __init__(
        self,
        job_id: str,
        created: int,
        *,
        n: int,
        echoed: Sequence[str],
        logprobs: bool,
        options: StreamOptions | None,
        token_ids: bool,
    ) -> None:
        self._ids: dict[int, list[int]] | None = defaultdict(list) if token_ids else None
        """Of tokens that no chunk has named yet, by choice."""
        self.needs_results = n > 1
        self._n = n
        self._echoed = echoed
        self._logprobs = logprobs
        self._frame = ChunkFrame(completion_id(job_id), "text_completion", created, options)
        self._offsets: dict[int, TextOffsets] = {}
        """Of the next token, by choice."""

    def started(self, job: int, event: Started) -> None:
        self._frame.started(job, event)

    def tokens(self, job: int, event: Tokens) -> Iterator[dict[str, Any]]:
        self._frame.tokens(job, event)
        index = self._n * job + event.choice
        text = self._unsent_echo(job, index) + event.text
        if self._ids is not None:
            self._ids[index] += event.ids
        logprobs = None
        if self._logprobs:
            logprobs = completion_logprobs(event.logprobs or (), self._offsets[index])
        if text or event.logprobs:
            yield self._chunk(index, text, logprobs, {"finish_reason": None})

    def finished(
        self, job: int, event: Finished, result: GenerationResult | None
    ) -> Iterator[dict[str, Any]]:
        self._frame.finished(job, event.usage)
        reasons = [event.finish_reason]
        if result is not None:
            reasons = [choice.finish_reason for choice in result.choices]
        for choice, reason in enumerate(reasons):
            index = self._n * job + choice
            yield self._chunk(index, self._unsent_echo(job, index), None, finish(reason))

    def end(self) -> Iterator[dict[str, Any]]:
        return self._frame.end()

    def _unsent_echo(self, job: int, index: int) -> str:
        if index in self._offsets:
            return ""
        echo = self._echoed[job] if self._echoed else ""
        self._offsets[index] = TextOffsets(len(echo))
        return echo

    def _chunk(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, end: Finish
    ) -> dict[str, Any]:
        choice = {"text": text, "index": index, "logprobs": logprobs, **end}
        if self._ids is not None:
            choice["token_ids"] = self._ids.pop(index, [])
        return self._frame.chunk(choice)

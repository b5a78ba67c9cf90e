"""The body of ``/v1/completions``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, SkipValidation
from pydantic_core import PydanticCustomError

from llorch_worker.contract import (
    Fault,
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    describe,
)
from llorch_worker.openai_api.body import OpenAIBody
from llorch_worker.openai_api.completion_answer import (
    Completion,
    CompletionChunks,
    Prompt,
    completion,
)
from llorch_worker.openai_api.known_fields import OF_OTHERS_THAN_COMPLETIONS
from llorch_worker.openai_api.logprobs import prompt_logprobs
from llorch_worker.openai_api.shape import generation_request

MAX_PROMPTS = 1_024
DEFAULT_MAX_TOKENS = 16


def _prompts(value: Any) -> list[Prompt]:
    """One text, or one list of ids, is a list of one; the contract checks the rest of each."""
    several = isinstance(value, list) and value and all(isinstance(e, str | list) for e in value)
    prompts = value if several else [value]
    if not several and not isinstance(value, str) and not _are_ids(value):
        raise PydanticCustomError(
            "prompt", "must be a text, a list of texts, a list of token ids, or a list of these"
        )
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError(
            "prompt", "must be at most {limit} prompts", {"limit": MAX_PROMPTS}
        )
    return list(prompts)


def _key_of(key: str, number: int) -> str:
    """The key of a further prompt: a hash, so its length is fixed and no client's own key equals
    it."""
    return hashlib.sha256(f"{key}#{number}".encode(errors="surrogatepass")).hexdigest()


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


class CompletionRequest(OpenAIBody):
    """OpenAI's request, with our own fields beside it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "Once upon a time", "max_tokens": 32}]}
    )
    of_others = OF_OTHERS_THAN_COMPLETIONS

    prompt: Annotated[
        SkipValidation[list[Prompt]],
        BeforeValidator(
            _prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    """Each prompt is a job of its own."""
    max_tokens: SkipValidation[int | None] = None
    """By default 16, as OpenAI has it; 0 only with echo; at most what the context holds."""
    echo: bool | None = None
    """Put the prompt before the text. With logprobs, the prompt's tokens are scored too."""
    logprobs: SkipValidation[int | None] = None
    """Log probabilities of the tokens, and of so many alternatives each."""
    best_of: int | None = None
    """Only as many as n: every choice is returned."""
    add_special_tokens: SkipValidation[bool | None] = None
    """Whether a text gets what the model puts around it, such as BOS; by default it does."""
    parse_special: SkipValidation[bool | None] = None
    """Whether spellings of control tokens in a text become these tokens; by default they stay
    text. With echo and logprobs a text that has one needs it."""

    def to_requests(self) -> list[GenerationRequest]:
        faults = [*self.refusals(), *self._faults()]
        requests = []
        for number in range(len(self.prompt)):
            try:
                requests.append(self._to_request(number))
            except InvalidRequest as error:
                faults += error.faults
                # The others break the same rules.
                break
        if faults:
            raise InvalidRequest.from_faults(faults)
        return requests

    def answer(self, results: Sequence[GenerationResult], created: int) -> Completion:
        document = completion(results, created, self.prompt if self.echo else ())
        each = ((result, choice) for result in results for choice in result.choices)
        for given, (result, choice) in zip(document["choices"], each, strict=True):
            if self.prompt_logprobs is not None:
                given["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs or ())
            if self.return_token_ids:
                given["token_ids"] = list(choice.token_ids)
        return document

    def chunks(
        self, requests: Sequence[GenerationRequest], job_id: str, created: int
    ) -> CompletionChunks:
        texts = [prompt for prompt in self.prompt if isinstance(prompt, str)]
        return CompletionChunks(
            job_id,
            created,
            n=requests[0].n,
            echoed=texts if self.echo else (),
            logprobs=self.logprobs is not None,
            options=self.stream_options,
            token_ids=bool(self.return_token_ids),
        )

    def with_prompt_ids(
        self, document: Mapping[str, Any], ids: Sequence[Sequence[int]], told: set[int]
    ) -> Mapping[str, Any]:
        choices = [
            choice
            if choice["index"] in told
            else {**choice, "prompt_token_ids": list(ids[choice["index"] // (self.n or 1)])}
            for choice in document["choices"]
        ]
        told |= {choice["index"] for choice in choices}
        return {**document, "choices": choices}

    def _to_request(self, number: int) -> GenerationRequest:
        prompt = self.prompt[number]
        several = len(self.prompt) > 1
        kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        fields = self.passed_on()
        fields |= {kind: prompt, "logprobs": self.logprobs}
        fields |= {name: getattr(self, name) for name in ("prompt_logprobs", "response_format")}
        fields["max_tokens"] = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if isinstance(prompt, str):
            fields |= {"add_special_tokens": self.add_special_tokens}
            fields |= {"parse_special": self._parse_special()}
        names = {kind: f"prompt.{number}" if several else "prompt"}
        if self.echo and self.prompt_logprobs is None:
            fields["prompt_logprobs"] = self._echoed_logprobs()
            names["prompt_logprobs"] = "logprobs"
        # The first has the key itself: a body with another number of prompts is another one.
        if number and isinstance(self.idempotency_key, str):
            fields["idempotency_key"] = _key_of(self.idempotency_key, number)
        return generation_request(fields, names)

    def _parse_special(self) -> bool | None:
        scored = self.echo or self.prompt_logprobs is not None
        if self.parse_special is None and scored and not (self.echo and self.logprobs is not None):
            # Nobody counts the tokens: the answer says which are the prompt's, or has no scores.
            return False
        return self.parse_special

    def _echoed_logprobs(self) -> int | None:
        if self.logprobs is None and self.max_tokens == 0:
            # Nothing to do but to give the prompt back, which the contract knows as scoring it.
            return 0
        return self.logprobs

    def _faults(self) -> list[Fault]:
        faults = []
        if self.best_of is not None and self.best_of != (self.n or 1):
            faults.append(Fault(field="best_of", rule="must equal n", got=describe(self.best_of)))
        faults += super()._faults()
        if self.echo and self.logprobs is not None and self.stream:
            rule = "with echo they come at the end, so they cannot be streamed"
            faults.append(Fault(field="logprobs", rule=rule, got=describe(self.logprobs)))
        if self.echo and self.logprobs is None and not all(isinstance(p, str) for p in self.prompt):
            rule = "needs texts as prompts, or logprobs"
            faults.append(Fault(field="echo", rule=rule, got="token ids"))
        return faults

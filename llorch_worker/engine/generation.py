"""One request in the engine: the handle that the submitter keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, Unpack

from llorch_worker.contract import (
    Choice,
    GenerationRequest,
    GenerationResult,
    Usage,
)
from llorch_worker.contract.result import TokenLogprobs
from llorch_worker.engine.computed_generation import ComputedGeneration
from llorch_worker.engine.interface import Attempt, ModelFacts
from llorch_worker.engine.prompt_logprobs import PromptLogprobs
from llorch_worker.engine.sampling.sampler import RowLogprobs
from llorch_worker.engine.sequence import Sequence, SequenceState
from llorch_worker.engine.told import CallTold, TokenScore, TokensTold
from llorch_worker.intake.constraints.relaxed import Checks

_TEXTS_KEPT: Final = 2**14
_WHOLE: Final = ("stop", "tool_calls")
"""How choices end that are not cut off."""

PromptEntries = Callable[[], tuple[TokenLogprobs | None, ...]]


class Generation(ComputedGeneration):
    """One request's ``n`` sequences, their events and the one result.

    Any thread may call the methods of :class:`.GenerationHandle`; the others belong to the engine
    thread.
    """

    def __init__(
        self,
        request: GenerationRequest,
        facts: ModelFacts,
        sequences: tuple[Sequence, ...],
        *,
        request_cancel: Callable[[Generation], None],
        checks: Checks | None = None,
        **attempt: Unpack[Attempt],
    ) -> None:
        super().__init__(request, facts, **attempt)
        self.sequences = sequences
        self._cancel = request_cancel
        self._first_prefilled: Sequence | None = None
        self._prompt_entries: PromptEntries | None = None
        self._scores: list[list[TokenScore]] | None = None
        """Of each choice, for the first thread that reads the result."""
        self._checks = checks

    @property
    def complete(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    @property
    def seed(self) -> int:
        """The seed of the first choice, from the request or the job's id."""
        return self.sequences[0].seed

    @property
    def is_checked(self) -> bool:
        done = self._result.choices if self._result is not None else ()
        return self._checks is not None and any(each.finish_reason in _WHOLE for each in done)

    def _request_cancel(self) -> None:
        self._cancel(self)

    def _read_result(self) -> GenerationResult:
        assert self._result is not None
        # If two threads come here at once, both make the same result.
        if (entries := self._prompt_entries) is not None:
            self._result = self._result.model_copy(update={"prompt_logprobs": entries()})
            self._prompt_entries = None
        if (scores := self._scores) is not None:
            choices = tuple(
                choice.model_copy(update={"logprobs": tuple(each.entry() for each in of_choice)})
                for choice, of_choice in zip(self._result.choices, scores, strict=True)
            )
            self._result = self._result.model_copy(update={"choices": choices})
            self._scores = None
        if (checks := self._checks) is not None:
            choices = _checked(self._result.choices, checks)
            self._result = self._result.model_copy(update={"choices": choices})
            self._checks = None
        return self._result

    def start(self, sequence: Sequence | None, now_s: float) -> None:
        """Emits ``started`` at the first step, a prefill of ``sequence``; later calls do nothing.

        ``sequence`` is None if no choice is left to run.
        """
        if self._started_s is not None:
            return
        self._started_s = now_s
        self._first_prefilled = sequence
        self._emit_started(self.sequences[0].prompt_length, self._cached_tokens)

    def tell(self, sequence: Sequence, now_s: float) -> None:
        """Emits the tokens that ``sequence`` has taken since the last call and the text that became
        final."""
        told = sequence.told_count
        ids = sequence.token_ids[sequence.prompt_length + told :]
        sequence.told_count = told + len(ids)
        if ids and self._first_token_s is None:
            self._first_token_s = now_s
        text, thought, calls = sequence.text.take()
        if not (ids or text or thought or calls):
            return
        logprobs = sequence.logprobs
        scores = logprobs[told:] if logprobs is not None and ids else None
        told_calls = list(map(CallTold.of, calls)) if calls else None
        self._tell_tokens(
            TokensTold(
                self.handle, sequence.choice, told, ids, text, thought or None, scores, told_calls
            )
        )

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt's tokens, if they were asked for and no deadline cut them short."""
        found = self.sequences[0].prompt_logprobs
        return found if found is not None and found.complete else None

    def finish(self, now_s: float, prompt_logprobs: PromptEntries | None) -> None:
        """Ends with a result; every sequence has a ``finish_reason``.

        ``prompt_logprobs`` is called by the first thread that reads the result: the entries of a
        long prompt take longer than a step.
        """
        self._prompt_entries = prompt_logprobs
        if self.request.logprobs is not None:
            self._scores = [sequence.logprobs or [] for sequence in self.sequences]
        for sequence in self.sequences:
            # Text that a deadline has just released, or that a replay produced beyond its journal.
            self.tell(sequence, now_s)
        choices = tuple(self._choice(sequence) for sequence in self.sequences)
        self._finish_with(choices, self.seed, now_s)

    @property
    def _cached_tokens(self) -> int:
        # The other choices find the prompt that the first one has put into the cache.
        return 0 if self._first_prefilled is None else self._first_prefilled.cached_tokens

    def _choice(self, sequence: Sequence) -> Choice:
        assert sequence.finish_reason is not None
        calls = sequence.text.calls or None
        called = calls is not None and sequence.finish_reason == "stop"
        return Choice(
            index=sequence.choice,
            text=sequence.text.released,
            reasoning_content=sequence.text.thought,
            token_ids=tuple(sequence.generated_ids),
            finish_reason="tool_calls" if called else sequence.finish_reason,
            stop_string=sequence.text.stop_string,
            tool_calls=calls,
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt=self.sequences[0].prompt_length,
            cached=self._cached_tokens,
            completion=sum(len(sequence.generated_ids) for sequence in self.sequences),
            reasoning=sum(sequence.thought_count for sequence in self.sequences),
            accepted_draft_tokens=sum(sequence.accepted_drafts for sequence in self.sequences),
        )


def _checked(choices: tuple[Choice, ...], checks: Checks) -> tuple[Choice, ...]:
    """The choices with what they do not meet."""
    whole = [each for each in choices if each.finish_reason in _WHOLE]
    unmet = checks.unmet([(each.text, each.tool_calls or ()) for each in whole])
    found = {each.index: rules for each, rules in zip(whole, unmet, strict=True)}
    return tuple(
        each.model_copy(update={"unmet": rules}) if (rules := found.get(each.index)) else each
        for each in choices
    )


class LogprobEntries:
    """Makes the entries of a model's tokens in results and events. Any thread may call it."""

    def __init__(self, token_text: Callable[[int], tuple[str, tuple[int, ...] | None]]) -> None:
        """``token_text``: see :meth:`.Tokenizer.text_and_bytes`."""
        # Some tokens come again and again, as the likeliest or among the alternatives.
        self._token_text = lru_cache(_TEXTS_KEPT)(token_text)

    def of_token(self, token_id: int, row: RowLogprobs) -> TokenScore:
        """The entry of a token that was chosen in ``row``."""
        token_text = self._token_text
        top = []
        for other, logprob in zip(row.top_ids, row.top, strict=True):
            text, data = token_text(other)
            top.append(TokenScore(other, text, logprob, data))
        text, data = token_text(token_id)
        return TokenScore(token_id, text, row.chosen, data, tuple(top))

    def of_prompt(self, scored: PromptLogprobs) -> tuple[TokenLogprobs | None, ...]:
        """One entry for each token of a prompt; None for the first."""
        return (
            None,
            *(
                self.of_token(token_id, RowLogprobs(chosen, top_ids, top)).entry()
                for token_id, chosen, top_ids, top in scored.rows()
            ),
        )

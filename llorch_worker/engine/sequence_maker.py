"""Makes a sequence of each choice of a prepared request, and brings it to where a journal ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from llorch_worker.contract import (
    Finished,
    InternalError,
    InvalidRequest,
    Journal,
    JournalledChoice,
)
from llorch_worker.contract.seeds import choice_seed, job_seed
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.drafter import DrafterMaker
from llorch_worker.engine.sequence import Sequence, SequenceState
from llorch_worker.engine.told import TokenScore
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.prepared import PreparedRequest
from llorch_worker.text import Tokenizer
from llorch_worker.text.calls import CallReader, call_ids


class SequenceMaker:
    """Makes the sequences of requests for one model. Any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        compiler: Compiler,
        *,
        vocab_size: int,
        make_drafter: DrafterMaker | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._make_drafter = make_drafter
        self._eos_ids = tokenizer.ends_below(vocab_size)
        self._arrivals = itertools.count()

    def make(
        self,
        prepared: PreparedRequest,
        job_id: str,
        journal: Journal | None,
        *,
        suspect: bool = False,
    ) -> tuple[Sequence, ...]:
        """A sequence for each choice, with a seed, a text and a matcher of its own.

        With ``journal`` the sequences continue there. ``suspect``: see :attr:`.Sequence.suspect`.
        Raises InternalError for another request's
        journal, and what :meth:`.Compiler.compile_again` does.
        """
        request = prepared.request
        matcher = prepared.matcher
        if matcher is None and prepared.grammar is not None:
            matcher = self._compiler.compile_again(prepared.grammar)
        seed = job_seed(job_id) if request.seed is None else request.seed
        arrival = next(self._arrivals)
        make_drafter = self._make_drafter if request.speculation == "auto" else None
        sequences = tuple(
            Sequence(
                prepared.prompt_ids,
                request,
                seed=choice_seed(seed, choice),
                text=self._text(prepared, job_id, choice),
                arrival=arrival,
                choice=choice,
                eos_ids=self._eos_ids,
                matcher=None if matcher is None else matcher.copy(prepared.opening),
                drafter=(
                    None
                    if make_drafter is None
                    else make_drafter(request.tenant, list(prepared.prediction))
                ),
            )
            for choice in range(request.n)
        )
        if journal:
            _resume(sequences, journal, vocab_size=self._vocab_size)
        for sequence in sequences:
            sequence.suspect = suspect
        return sequences

    def _text(self, prepared: PreparedRequest, job_id: str, choice: int) -> ChoiceText:
        marks: Mapping[int, str] | None = prepared.marks
        if marks is None:
            marks = self._tokenizer.decoding_table.control
        reader = None
        if (calls := prepared.calls) is not None:
            reader = CallReader(
                calls.written_as,
                calls.functions,
                call_ids(job_id, choice),
                forced=calls.forced,
                parallel=calls.parallel,
            )
        return ChoiceText(
            self._tokenizer,
            prepared.request.stop,
            None if prepared.thought is None else prepared.thought.splitter(),
            reader,
            marks,
            include_stop=prepared.request.include_stop_str_in_output,
        )


def _resume(sequences: Iterable[Sequence], journal: Journal, *, vocab_size: int) -> None:
    """Brings new ``sequences``, one per choice, to where ``journal`` ends.

    The journalled ids pass through the same detokenizer, grammar, stop rules and limits again,
    which restores the state of the earlier attempt.

    Choices that are complete in the journal get a ``finish_reason`` and are FINISHED, except one
    that must compute the prompt's log probabilities again, which no journal has. Text that the
    replay releases beyond the journal's can still be taken.

    Raises:
        InternalError: the journal does not belong to this request on this model. The message gives
            counts, never text.
    """
    by_choice = {sequence.choice: sequence for sequence in sequences}
    for number, choice in journal.choices.items():
        if number not in by_choice:
            raise InternalError(
                f"the journal has tokens of choice {number}, but the request has choices 0 to "
                f"{len(by_choice) - 1}"
            )
        _replay(by_choice[number], choice, vocab_size)
    for sequence in by_choice.values():
        if sequence.finish_reason is None and isinstance(journal.terminal, Finished):
            # Readers have seen the job end by its deadline; only the result is missing.
            sequence.close("deadline")
        if sequence.ended:
            sequence.state = SequenceState.FINISHED


def _replay(sequence: Sequence, choice: JournalledChoice, vocab_size: int) -> None:
    count = len(choice.token_ids)
    whose = f"the journal of choice {sequence.choice}"
    if count > sequence.max_tokens:
        raise InternalError(f"{whose} has {count} tokens, but max_tokens is {sequence.max_tokens}")
    if any(not 0 <= token_id < vocab_size for token_id in choice.token_ids):
        raise InternalError(f"{whose} has a token id beyond the vocabulary of {vocab_size}")
    for token_id in choice.token_ids:
        if sequence.finish_reason is not None:
            raise InternalError(
                f"{whose} has {count} tokens, but the choice ends after {sequence.generated_count}"
            )
        try:
            sequence.append(token_id)
        except InvalidRequest as error:
            raise InternalError(f"{whose} has a token that does not fit the grammar") from error
    sequence.told_count = count
    _take_logprobs(sequence, choice, whose)
    beyond = len(choice.text) > len(sequence.text.ready) or (
        len(choice.thought) > len(sequence.text.ready_thought)
    )
    if beyond and sequence.finish_reason is None:
        # Only the end of a choice releases held-back text. No token ended the replay, so the
        # deadline did.
        sequence.close("deadline")
    if not sequence.text.skip(choice.text, choice.thought, choice.calls):
        raise InternalError(
            f"{whose} has a text of {len(choice.text)} characters that its {count} tokens do not "
            "produce; was it written with another model?"
        )


def _take_logprobs(sequence: Sequence, choice: JournalledChoice, whose: str) -> None:
    asked, given = sequence.logprobs is not None, choice.logprobs is not None
    if choice.token_ids and asked != given:
        has, asks = "has" if given else "lacks", "asks" if asked else "does not ask"
        raise InternalError(f"{whose} {has} log probabilities, but the request {asks} for them")
    if sequence.logprobs is None or choice.logprobs is None:
        return
    if any(
        entry.id != token_id
        for entry, token_id in zip(choice.logprobs, choice.token_ids, strict=True)
    ):
        raise InternalError(f"{whose} has log probabilities of other tokens than its own")
    sequence.logprobs.extend(map(TokenScore.of, choice.logprobs))

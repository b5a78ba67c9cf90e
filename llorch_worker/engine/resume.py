"""Resumes a redelivered job where its journal ends.

The journalled ids pass through the same detokenizer, grammar, stop rules and limits again, which
restores the state of the earlier attempt.
"""

from __future__ import annotations

from collections.abc import Iterable

from llorch_worker.contract import (
    Finished,
    InternalError,
    InvalidRequest,
    Journal,
    JournalledChoice,
)
from llorch_worker.engine.sequence import Sequence, SequenceState


def resume(sequences: Iterable[Sequence], journal: Journal, *, vocab_size: int) -> None:
    """Brings new ``sequences``, one per choice, to where ``journal`` ends.

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
    sequence.logprobs.extend(choice.logprobs)

"""A job that was delivered again goes on from what its journal holds.

The journalled ids are replayed through the same detokenizer, stop rules and limits that took them
first, so everything that depends on the past stands where the earlier attempt left it.
"""

from __future__ import annotations

from collections.abc import Iterable

from llorch_worker.contract import Finished, InternalError, Journal, JournalledChoice
from llorch_worker.engine.sequence import Sequence, SequenceState


def resume(sequences: Iterable[Sequence], journal: Journal, *, vocab_size: int) -> None:
    """Brings new ``sequences``, one a choice, to where ``journal`` ends.

    Those that it shows complete have a ``finish_reason`` and are FINISHED. Text that the replay
    releases beyond the journal's is left to be taken; what the journal has is not.

    Raises:
        InternalError: the journal is not one of this request on this model. Names what is wrong
            by counts alone, never by text.
    """
    by_choice = {sequence.choice: sequence for sequence in sequences}
    for number, choice in journal.choices.items():
        if number not in by_choice:
            raise InternalError(
                f"the journal has tokens of choice {number}, and the request asks for "
                f"{len(by_choice)} from 0 on"
            )
        _replay(by_choice[number], choice, vocab_size)
    for sequence in by_choice.values():
        if sequence.finish_reason is None and isinstance(journal.terminal, Finished):
            # Readers saw the end, and not by this choice's own rules: only its result is missing.
            sequence.close("deadline")
        if sequence.finish_reason is not None:
            sequence.state = SequenceState.FINISHED


def _replay(sequence: Sequence, choice: JournalledChoice, vocab_size: int) -> None:
    count = len(choice.token_ids)
    whose = f"the journal of choice {sequence.choice}"
    if count > sequence.request.max_tokens:
        raise InternalError(
            f"{whose} has {count} tokens, and max_tokens is {sequence.request.max_tokens}"
        )
    if any(not 0 <= token_id < vocab_size for token_id in choice.token_ids):
        raise InternalError(f"{whose} has a token id beyond the vocabulary of {vocab_size}")
    for token_id in choice.token_ids:
        if sequence.finish_reason is not None:
            raise InternalError(
                f"{whose} has {count} tokens, and the choice ends after {sequence.generated_count}"
            )
        sequence.append(token_id)
    _take_logprobs(sequence, choice, whose)
    if len(choice.text) > len(sequence.text.ready) and sequence.finish_reason is None:
        # Only the end of a choice shows text that was held back. It is none of the tokens', or
        # the replay would have ended too: it is the deadline's.
        sequence.close("deadline")
    if not sequence.text.skip(choice.text):
        raise InternalError(
            f"{whose} has a text of {len(choice.text)} characters that its {count} tokens do not "
            "give; was it written with another model?"
        )


def _take_logprobs(sequence: Sequence, choice: JournalledChoice, whose: str) -> None:
    asked, given = sequence.logprobs is not None, choice.logprobs is not None
    if choice.token_ids and asked != given:
        has, asks = "has" if given else "lacks", "asks" if asked else "does not ask"
        raise InternalError(f"{whose} {has} log probabilities, and the request {asks} for them")
    if sequence.logprobs is None or choice.logprobs is None:
        return
    if any(
        entry.id != token_id
        for entry, token_id in zip(choice.logprobs, choice.token_ids, strict=True)
    ):
        raise InternalError(f"{whose} has log probabilities of other tokens than its own")
    sequence.logprobs.extend(choice.logprobs)

"""Where one choice stands in its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from llorch_worker.contract import InvalidRequest
from llorch_worker.intake.constraints.grammar import GrammarText
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = npt.NDArray[np.int32]
"""One bit for each id of the vocabulary and its end, the lowest bit of the first number first."""

_BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)

_NO_TOKEN: Final = "NoExtension"
_FAILURES: Final = {
    _NO_TOKEN: "a text that no token continues",
    "satisfy the grammar": "a token that the grammar does not allow here",
    " items": "more ways to read the text than the parser follows",
}
"""What parts of llguidance's errors mean. The errors themselves quote the text."""
_TOO_COMPLEX: Final = "more steps or states than the lexer may take"


class Matcher:
    """Follows the tokens of one choice and says which may come next.

    One thread at a time may use it. Its state depends on the tokens alone, so a matcher that reads
    a journal's tokens continues as the one that chose them.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: ConstraintVocabulary,
        grammar: GrammarText,
        opening: Sequence[int] = (),
    ) -> None:
        """``matcher`` has compiled ``grammar``. ``opening``: tokens with which the model may begin
        a thought instead; the grammar then begins after it."""
        self.grammar = grammar
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._forced: list[int] = matcher.compute_ff_tokens()
        if len(opening) > 1 and matcher.validate_tokens([opening[0]]):
            # The first of them may be text of the grammar, too.
            opening = ()
        self._opening = list(opening)
        """Those of a thought's opening that may, or must, still come."""
        self._opened = False
        self.complete = False
        """Whether the text fits the grammar and can only end."""

    @property
    def ll_matcher(self) -> LLMatcher:
        """For llguidance's executor."""
        return self._matcher

    @property
    def forced(self) -> list[int]:
        """The tokens that must come next, or the first of them. The grammar leaves no choice of
        their text."""
        if self._opening:
            return self._opening if self._opened else []
        return self._forced

    def copy(self, opening: Sequence[int] = ()) -> Matcher:
        """Another matcher in the same state, at the beginning of an answer."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary, self.grammar, opening)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end any text, even one whose request ignores them, once it can only end."""
        return self._vocabulary.eos_ids

    def may_begin(self) -> bool:
        """Whether any token may come next, and any after those that are forced. Moves on by them.

        A grammar of too many branches shows it at the first of them.
        """
        if not self._may_continue():
            return False
        # One by one: a call holds Python's lock as long as all its tokens take.
        return all(self._matcher.consume_token(each) for each in self.forced) and (
            self._matcher.is_accepting() or self._may_continue()
        )

    def push(self, token_id: int) -> None:
        """Moves on by a token of the text. Raises InvalidRequest if it does not fit the grammar, or
        if the grammar has become too complex here."""
        if self._opening and token_id == self._opening[0]:
            self._opened = True
            del self._opening[0]
            return
        self._opening.clear()
        if not self._matcher.consume_token(token_id):
            raise self._failure()
        if self._forced[:1] == [token_id]:
            del self._forced[0]
        else:
            # Also where an older worker spelt forced text otherwise: a journal has its tokens.
            self._forced = []
        if not self._forced:
            self._forced = self._matcher.compute_ff_tokens()
        may_end = self._matcher.is_accepting()
        self.complete = may_end and (
            # llguidance may notice late that nothing can follow; without a token that ends the
            # text, now is the last moment.
            self._matcher.is_stopped() or (not self.eos_ids and not self._may_continue())
        )

    def end(self, token_id: int) -> None:
        """Notes that a stop token has ended the text. Raises InvalidRequest if it was chosen only
        because nothing fits any more."""
        early = token_id in self.eos_ids and not self._matcher.is_accepting()
        if early or self._matcher.is_error():
            raise self._failure()

    def finish_row(self, bits: Bits, stop_ids: frozenset[int], may_stop: bool) -> None:
        """Completes ``bits``, which llguidance has filled in, for a request.

        ``stop_ids`` may end the text where the grammar lets it end, if it ``may_stop`` already. If
        nothing else can follow, a token that ends it may, whatever the request ignores.
        """
        if self._matcher.is_error():
            # ``push`` and ``end`` will say so. Until then the row must have a token.
            bits[:] = -1
            return
        if self._opening:
            if self._opened:
                bits[:] = 0
            else:
                self._finish_row(bits, stop_ids, may_stop)
            _allow(bits, self._opening[:1])
            return
        self._finish_row(bits, stop_ids, may_stop)

    def _finish_row(self, bits: Bits, stop_ids: frozenset[int], may_stop: bool) -> None:
        if self._forced:
            bits[:] = 0
            _allow(bits, self._forced[:1])
            return
        may_end = _has(bits, self._vocabulary.end_id)
        _forbid(bits, [self._vocabulary.end_id])
        if may_stop and may_end:
            _allow(bits, stop_ids)
        elif not may_stop:
            whole = bits.copy()
            _forbid(bits, stop_ids)
            if not bits.any():
                bits[:] = whole
        if may_end and not bits.any():
            _allow(bits, self.eos_ids)

    def _may_continue(self) -> bool:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32).copy()
        _forbid(bits, [self._vocabulary.end_id])
        return bool(bits.any())

    def _failure(self) -> InvalidRequest:
        rule = "must stay within the limits of the parser and the vocabulary as the text grows"
        # Without an error, an end came where the grammar has none, because nothing else fitted.
        error = self._matcher.get_error() or _NO_TOKEN
        got = next((got for part, got in _FAILURES.items() if part in error), _TOO_COMPLEX)
        return InvalidRequest.from_fault(self.grammar.field, rule, got)


def _has(bits: Bits, token_id: int) -> bool:
    return bool(bits[token_id >> 5] >> (token_id & 31) & 1)


def _allow(bits: Bits, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        bits[token_id >> 5] |= _BIT[token_id & 31]


def _forbid(bits: Bits, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        bits[token_id >> 5] &= ~_BIT[token_id & 31]

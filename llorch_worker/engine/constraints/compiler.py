"""Compiles the grammar of a request, within bounds of time and size."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from llguidance import LLMatcher, LLParserLimits

from llorch_worker.contract import Fault, GenerationRequest, InvalidRequest, describe
from llorch_worker.engine.constraints.grammar import Grammar, grammar_of
from llorch_worker.engine.constraints.matcher import Matcher
from llorch_worker.engine.constraints.reason import reason
from llorch_worker.engine.constraints.vocabulary import ConstraintVocabulary

PATIENCE_S = 5.0
"""The limits below let no grammar known to us compile for longer than 2 s on a free core."""

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    max_grammar_size=200_000,
    # Of one step: other jobs wait for it. 20 ms of lexing and 50 ms of parsing at the very most.
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class Compiler:
    """Makes matchers. Any thread may call it; llguidance compiles without Python's lock."""

    def __init__(self, vocabulary: ConstraintVocabulary, patience_s: float = PATIENCE_S) -> None:
        self._vocabulary = vocabulary
        self._patience_s = patience_s
        self._building = threading.Lock()

    def compile(self, request: GenerationRequest) -> Matcher | None:
        """A matcher at the beginning of the text, or None if any text will do.

        Raises:
            InvalidRequest: the grammar has an error, is too large, takes too long, fits no text but
                the empty one, or needs text that the vocabulary cannot spell.
        """
        grammar = grammar_of(request)
        if grammar is None:
            return None
        with self._building:
            _ = self._vocabulary.ll_tokenizer
        future: Future[Matcher] = Future()

        def run() -> None:
            try:
                future.set_result(self._compile(grammar))
            except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
                future.set_exception(error)

        # A thread of its own: it cannot be stopped, and no other request may wait behind it.
        threading.Thread(target=run, name="llorch-compile-grammar", daemon=True).start()
        try:
            return future.result(self._patience_s)
        except TimeoutError:
            raise _refusal(grammar, f"must compile within {self._patience_s:g} s") from None

    def _compile(self, grammar: Grammar) -> Matcher:
        if isinstance(grammar.source, tuple) and not all(
            self._vocabulary.spells(text.encode()) for text in grammar.source
        ):
            raise _refusal(grammar, "the model's vocabulary cannot spell each of them")
        ll_matcher = LLMatcher(
            self._vocabulary.ll_tokenizer, grammar.text, log_level=0, limits=_LIMITS
        )
        if ll_matcher.is_error():
            rule = f"must compile: {reason(ll_matcher.get_error(), grammar.source)}"
            raise _refusal(grammar, rule)
        matcher = Matcher(ll_matcher, self._vocabulary, grammar.field)
        # Also builds what the first step would otherwise wait for.
        if not matcher.may_begin():
            rule = "must fit a text that is not empty and that the model's vocabulary can spell"
            raise _refusal(grammar, rule)
        return matcher


def _refusal(grammar: Grammar, rule: str) -> InvalidRequest:
    fault = Fault(field=grammar.field, rule=rule, got=describe(grammar.source))
    return InvalidRequest.from_faults([fault])

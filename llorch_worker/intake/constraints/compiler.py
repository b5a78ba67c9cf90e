"""Compiles the grammar of a request, within bounds of time and size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from llorch_worker.allocator import return_freed_memory
from llorch_worker.contract import GenerationRequest, InvalidRequest, OutOfMemory
from llorch_worker.intake.constraints.grammar import GrammarText, asked_for, grammar_of, refusal
from llorch_worker.intake.constraints.matcher import Matcher
from llorch_worker.intake.constraints.reason import reason
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

PATIENCE_S = 5.0
"""On a free core the limits below let no grammar that we know compile for longer than 2 s."""
MOST_COMPILING: Final = 8
"""How many compile at once, also of requests that were refused meanwhile: 10 to 160 MiB each."""
_STACK_BYTES: Final = 128 * 2**20
"""llguidance compiles each rule within the one that uses it first. A chain of 3,000 rules or
``$ref`` overflows the usual 8 MiB, which ends the process; the longest that a request may have
needs less than this. Only what is used takes memory."""
_stack_size = threading.Lock()
LARGE_VOCABULARY: Final = 65_536
"""From this many tokens on, a worker prepares for grammars before its first job."""
_STEP_ITEMS: Final = 10_000
_USERS_STEP_ITEMS: Final = 200_000
"""Of a mask, in rules that the user wrote. By character, JSON takes 5,000 with 49,000 tokens (1.5
ms) and 22,000 with 100,000 (4 ms), and a language like C 50,000 (5 ms)."""
_USERS_PLACE_ITEMS: Final = 500
"""At one place of the text. A mask's time grows with their square: ``e: e e | "a" | e e e`` took
0.15 s with llguidance's 2,000, and takes 3 ms with these before the job fails. The worst that we
know, ``/[a-z ]/`` for ``"a"``, takes 0.1 s with 49,000 tokens and 0.4 s with 200,000."""


class Compiler:
    """Makes matchers. Any thread may call it; llguidance compiles without Python's lock."""

    def __init__(
        self, vocabulary: ConstraintVocabulary, patience_s: float | None = PATIENCE_S
    ) -> None:
        """``patience_s``: how long a caller waits for a grammar; None: as long as it takes."""
        self._vocabulary = vocabulary
        self._patience_s = patience_s
        self._building = threading.Lock()
        self._places = threading.BoundedSemaphore(MOST_COMPILING)

    def prepare(self) -> None:
        """Builds what all grammars share, unless an earlier grammar needed it.

        Python's other threads wait for it: 0.1 s for a vocabulary of 32,000 tokens, 0.8 s for
        128,000.
        """
        with self._building:
            _ = self._vocabulary.ll_tokenizer

    def compile(self, request: GenerationRequest) -> Matcher | None:
        """A matcher at the beginning of the text, or None if any text will do.

        Raises:
            InvalidRequest: the grammar has an error, is too large, takes too long, fits no text but
                the empty one, or needs text that the vocabulary cannot spell.
            OutOfMemory: too many others compile, or no thread can start.
        """
        asked = asked_for(request)
        if asked is None:
            return None
        self.prepare()
        return self._in_time(partial(self._compile, request), *asked, self._patience_s)

    def compile_again(self, grammar: GrammarText) -> Matcher:
        """A matcher of a grammar that has compiled elsewhere, with the same vocabulary, however
        long it takes on a busy machine.

        Raises what :meth:`compile` does.
        """
        self.prepare()
        return self._in_time(partial(self._made, grammar), grammar.field, grammar.text, None)

    def _in_time(
        self, make: Callable[[], Matcher], field: str, source: Any, patience_s: float | None
    ) -> Matcher:
        if not self._places.acquire(timeout=patience_s):
            raise OutOfMemory(f"the worker compiles {MOST_COMPILING} other grammars; try again")
        future: Future[Matcher] = Future()

        def run() -> None:
            try:
                future.set_result(make())
                return
            except InvalidRequest as error:
                # Its frames hold what was compiled.
                result: BaseException = error.with_traceback(None)
            except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
                result = error
            finally:
                self._places.release()
            return_freed_memory()
            # A caller that has lost its patience has cancelled the future.
            with suppress(InvalidStateError):
                future.set_exception(result)

        # A thread of its own: it cannot be stopped, and no other request may wait behind it.
        thread = threading.Thread(target=run, name="llorch-compile-grammar", daemon=True)
        with _stack_size:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            except RuntimeError:
                self._places.release()
                stack = f"{_STACK_BYTES // 2**20} MiB"
                raise OutOfMemory(f"no thread with {stack} for its stack can start") from None
            finally:
                threading.stack_size(usual)
        try:
            return future.result(patience_s)
        except TimeoutError:
            future.cancel()
            raise refusal(field, f"must compile within {patience_s:g} s", source) from None

    def _compile(self, request: GenerationRequest) -> Matcher:
        grammar = grammar_of(request, self._vocabulary)
        assert grammar is not None
        field, source = grammar.field, grammar.source
        try:
            document = grammar.document()
        except UnicodeEncodeError:
            raise refusal(field, "must be text that UTF-8 can encode", source) from None
        if isinstance(source, tuple) and not all(
            self._vocabulary.spells(text.encode(errors="replace")) for text in source
        ):
            raise refusal(field, "the model's vocabulary cannot spell each of them", source)
        matcher = self._made(document)
        # Also builds what the first steps would otherwise wait for.
        beginning = matcher.copy()
        if beginning.may_begin():
            return matcher
        error = beginning.ll_matcher.get_error()
        if not error or error.startswith("NoExtension"):
            rule = "must fit a text that is not empty and that the model's vocabulary can spell"
            raise refusal(field, rule, source)
        raise refusal(field, f"must compile: {reason(error, source)}", source)

    def _made(self, grammar: GrammarText) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=1_000_000,
            max_grammar_size=200_000,
            # Of one step, for which other jobs wait: a tenth of a second on a slow machine.
            step_lexer_fuel=100_000,
            step_max_items=_USERS_STEP_ITEMS if grammar.is_users_own else _STEP_ITEMS,
            max_items_in_row=_USERS_PLACE_ITEMS if grammar.is_users_own else None,
            # A state takes 1 to 2 kB.
            max_lexer_states=20_000,
            verbose_errors=False,
        )
        tokenizer = self._vocabulary.ll_tokenizer
        ll_matcher = LLMatcher(tokenizer, grammar.text, log_level=0, limits=limits)
        self._explore(ll_matcher)
        return Matcher(ll_matcher, self._vocabulary, grammar)

    def _explore(self, ll_matcher: LLMatcher) -> None:
        """Computes the first mask where llguidance does not hold Python's lock.

        Its other calls do. They find then what this has built: up to 0.6 s of work.
        """
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        bits = allocate_token_bitmask(1, self._vocabulary.end_id + 1)
        fill_next_token_bitmask_par(LLExecutor(1), [(ll_matcher, 0)], bits)

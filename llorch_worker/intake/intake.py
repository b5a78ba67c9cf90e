"""Checks requests against a model and says them in the engine's terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llorch_worker.contract import GenerationRequest
from llorch_worker.intake.asking import Phase
from llorch_worker.intake.constraints.compiler import PATIENCE_S, Compiler
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary
from llorch_worker.intake.prepared import (
    Calls,
    Limits,
    PreparedRequest,
    Thought,
    without_content,
)
from llorch_worker.intake.request_checks import checked_prompt
from llorch_worker.text import Tokenizer

PREDICTED_CHARS: Final = 16
"""Characters that a token of a prediction has at most on average. Tokens have 3 to 5."""


class Intake:
    """Prepares requests for one model in the caller's process. Any thread may call it."""

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, *, patience_s: float | None = PATIENCE_S
    ) -> None:
        """``patience_s``: see :class:`.Compiler`."""
        self._tokenizer = tokenizer
        self._limits = limits
        size = limits.vocab_size
        vocabulary = ConstraintVocabulary(tokenizer, size, tokenizer.ends_below(size))
        self.compiler = Compiler(vocabulary, patience_s)

    def prepare(
        self,
        request: GenerationRequest,
        generated: int = 0,
        doing: Callable[[Phase], None] = lambda _: None,
    ) -> PreparedRequest:
        """The request in the engine's terms. ``generated``: the tokens of earlier attempts;
        ``doing`` hears what comes next.

        Raises:
            ContextLengthExceeded: prompt and ``max_tokens`` do not fit.
            InvalidRequest: an id is beyond the vocabulary, the prompt has no token, or the grammar
                of the text does not compile.
            OutOfMemory: too many grammars compile.
        """
        tokenizer = self._tokenizer
        doing(Phase.ENCODES)
        fitted, ids = checked_prompt(request, tokenizer, self._limits, generated)
        doing(Phase.COMPILES)
        matcher = self.compiler.compile(request)
        doing(Phase.ENCODES)
        tags = tokenizer.thought_tags if request.messages is not None else None
        said = ""
        if request.messages and request.continue_final_message:
            said = request.messages[-1].content or ""
        dialect = tokenizer.dialect if request.may_call else None
        marks = None
        if request.skip_special_tokens:
            spellings = [*(dialect.marks() if dialect else ())]
            spellings += tags.spellings() if tags else ()
            marks = tokenizer.control_spellings(spellings)
        calls = None
        if dialect is not None:
            calls = Calls(
                dialect.name,
                [tool.function.name for tool in request.tools],
                forced=request.forces_a_call,
                parallel=request.calls_in_parallel,
            )
        return PreparedRequest(
            request=without_content(fitted, tuple(ids)),
            thought=Thought(tags, tokenizer.opens_thought(ids, said), said) if tags else None,
            calls=calls,
            marks=marks,
            opening=tokenizer.thought_opening(ids, said) if tags and matcher else (),
            prediction=self._prediction(fitted),
            grammar=None if matcher is None else matcher.grammar,
            matcher=matcher,
        )

    def _prediction(self, request: GenerationRequest) -> list[int]:
        if not request.prediction or not self._limits.drafts or request.speculation != "auto":
            return []
        # A text may leave parts of it out, but far more would only take time.
        most = 2 * (request.max_tokens or 0)
        begins = request.prediction[: most * PREDICTED_CHARS]
        predicted = self._tokenizer.encode(begins, add_special_tokens=False)[:most]
        # A vocabulary may have more tokens than the model has embeddings.
        return [token_id for token_id in predicted if token_id < self._limits.vocab_size]

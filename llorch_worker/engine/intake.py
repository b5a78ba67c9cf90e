"""Takes requests in: checks them against the model and makes a sequence of each choice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from llorch_worker.contract import GenerationRequest, Journal
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.constraints.compiler import Compiler
from llorch_worker.engine.constraints.matcher import Matcher
from llorch_worker.engine.constraints.relaxed import Checks
from llorch_worker.engine.constraints.vocabulary import ConstraintVocabulary
from llorch_worker.engine.drafting.drafter_maker import DrafterMaker
from llorch_worker.engine.request_checks import checked_prompt
from llorch_worker.engine.resume import resume
from llorch_worker.engine.sampling.uniforms import choice_seed, job_seed
from llorch_worker.engine.sequence import Sequence
from llorch_worker.text import Tokenizer
from llorch_worker.text.calls import reader_of

PREDICTED_CHARS: Final = 16
"""Characters that a token of a prediction has at most on average. Tokens have 3 to 5."""


class Intake:
    """Makes the sequences of requests for one model. Any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_context: int,
        pool_tokens: int,
        make_drafter: DrafterMaker | None,
    ) -> None:
        """``pool_tokens`` is the capacity of all KV blocks."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._pool_tokens = pool_tokens
        self._make_drafter = make_drafter
        # A file may name ids for which the model has no logits; they never end a sequence.
        self._eos_ids = frozenset(
            token_id for token_id in tokenizer.eos_token_ids if 0 <= token_id < vocab_size
        )
        self._compiler = Compiler(ConstraintVocabulary(tokenizer, vocab_size, self._eos_ids))
        self._arrivals = itertools.count()

    def prepare_grammars(self) -> None:
        """See :meth:`.Compiler.prepare`."""
        self._compiler.prepare()

    def take(
        self, request: GenerationRequest, job_id: str, journal: Journal | None
    ) -> tuple[GenerationRequest, tuple[Sequence, ...], Checks | None]:
        """The request with the ``max_tokens`` that fit, a sequence for each choice, and what the
        grammar cannot check.

        With ``journal`` the sequences continue there. Raises what ``Engine.submit`` does.
        """
        choices = journal.choices.values() if journal else ()
        request, prompt_ids = checked_prompt(
            request,
            self._tokenizer,
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            pool_tokens=self._pool_tokens,
            generated=max((len(choice.token_ids) for choice in choices), default=0),
        )
        matcher = self._compiler.compile(request)
        sequences = self._sequences(request, prompt_ids, job_id, matcher)
        if journal:
            resume(sequences, journal, vocab_size=self._vocab_size)
        return request, sequences, None if matcher is None else matcher.checks

    def _sequences(
        self,
        request: GenerationRequest,
        prompt_ids: list[int],
        job_id: str,
        matcher: Matcher | None,
    ) -> tuple[Sequence, ...]:
        """The choices, each with a seed, a text and a matcher of its own."""
        tokenizer = self._tokenizer
        seed = job_seed(job_id) if request.seed is None else request.seed
        arrival = next(self._arrivals)
        make_drafter = self._make_drafter if request.speculation == "auto" else None
        dialect = tokenizer.dialect if request.may_call else None
        tags = tokenizer.thought_tags if request.messages is not None else None
        said = ""
        if request.messages and request.continue_final_message:
            said = request.messages[-1].content or ""
        opening = (
            tokenizer.thought_opening(prompt_ids, said) if tags and matcher is not None else []
        )
        marks: Mapping[int, str] = tokenizer.decoding_table.control
        if request.skip_special_tokens:
            spellings = [*(dialect.marks() if dialect else ())]
            spellings += tags.spellings() if tags else ()
            marks = tokenizer.control_spellings(spellings)
        prediction: list[int] = []
        if make_drafter is not None and request.prediction:
            # A text may leave parts of it out, but far more would only take time.
            most = 2 * (request.max_tokens or 0)
            begins = request.prediction[: most * PREDICTED_CHARS]
            predicted = tokenizer.encode(begins, add_special_tokens=False)[:most]
            # A vocabulary may have more tokens than the model has embeddings.
            prediction = [token_id for token_id in predicted if token_id < self._vocab_size]
        return tuple(
            Sequence(
                prompt_ids,
                request,
                seed=choice_seed(seed, choice),
                text=ChoiceText(
                    tokenizer,
                    request.stop,
                    None if request.messages is None else tokenizer.thoughts(prompt_ids, said),
                    reader_of(request, dialect, job_id, choice) if dialect else None,
                    marks,
                    include_stop=request.include_stop_str_in_output,
                ),
                arrival=arrival,
                choice=choice,
                eos_ids=self._eos_ids,
                matcher=None if matcher is None else matcher.copy(opening),
                drafter=None if make_drafter is None else make_drafter(request.tenant, prediction),
            )
            for choice in range(request.n)
        )

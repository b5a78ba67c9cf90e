"""Makes a sequence of each choice of a prepared request."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from llorch_worker.contract import Journal
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.drafter import DrafterMaker
from llorch_worker.engine.resume import resume
from llorch_worker.engine.sequence import Sequence
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.prepared import PreparedRequest
from llorch_worker.kernels.uniforms import choice_seed, job_seed
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
            resume(sequences, journal, vocab_size=self._vocab_size)
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

"""The choices of a request, each a sequence."""

from __future__ import annotations

from collections.abc import Mapping

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.constraints.matcher import Matcher
from llorch_worker.engine.drafting.drafter_maker import DrafterMaker
from llorch_worker.engine.sampling.uniforms import choice_seed
from llorch_worker.engine.sequence import Sequence
from llorch_worker.text import Tokenizer
from llorch_worker.text.calls import reader_of


def sequences_of(
    request: GenerationRequest,
    prompt_ids: list[int],
    tokenizer: Tokenizer,
    *,
    seed: int,
    arrival: int,
    eos_ids: frozenset[int],
    matcher: Matcher | None,
    make_drafter: DrafterMaker | None,
    job_id: str,
) -> tuple[Sequence, ...]:
    """The choices of a request, each with a seed, a text and a matcher of its own."""
    dialect = tokenizer.dialect if request.may_call else None
    tags = tokenizer.thought_tags if request.messages is not None else None
    opening = tokenizer.thought_opening(prompt_ids) if tags and matcher is not None else []
    marks: Mapping[int, str] = tokenizer.decoding_table.control
    if request.skip_special_tokens:
        spellings = [*(dialect.marks() if dialect else ())]
        spellings += (tags.opening, tags.closing) if tags else ()
        marks = tokenizer.control_spellings(spellings)
    prediction: list[int] = []
    if make_drafter is not None and request.prediction:
        prediction = tokenizer.encode(request.prediction, add_special_tokens=False)
        # A text may leave parts of it out, but a search of far more would only take time.
        prediction = prediction[: 2 * request.max_tokens]
    return tuple(
        Sequence(
            prompt_ids,
            request,
            seed=choice_seed(seed, choice),
            text=ChoiceText(
                tokenizer,
                request.stop,
                None if request.messages is None else tokenizer.thoughts(prompt_ids),
                reader_of(request, dialect, job_id, choice) if dialect else None,
                marks,
                include_stop=request.include_stop_str_in_output,
            ),
            arrival=arrival,
            choice=choice,
            eos_ids=eos_ids,
            matcher=None if matcher is None else matcher.copy(opening),
            drafter=None if make_drafter is None else make_drafter(request.tenant, prediction),
        )
        for choice in range(request.n)
    )

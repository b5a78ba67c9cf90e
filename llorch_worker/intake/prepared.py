"""A request as the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.token_ids import PromptTokenIds
from llorch_worker.intake.constraints.grammar import GrammarText
from llorch_worker.intake.constraints.relaxed import Checks
from llorch_worker.text.dialects import DIALECTS, Dialect
from llorch_worker.text.thoughts import Tags, ThoughtSplitter

if TYPE_CHECKING:
    from llorch_worker.intake.constraints.matcher import Matcher

_CONTENT: Mapping[str, Any] = {
    **dict.fromkeys(("prompt", "messages", "prediction", "chat_template_kwargs")),
    **dict.fromkeys(("parse_special", "add_generation_prompt")),
    **dict.fromkeys(("response_format", "structured_outputs", "tool_choice")),
    **{"tools": (), "add_special_tokens": True, "continue_final_message": False},
}
"""What the other fields of :class:`PreparedRequest` say in the engine's terms."""


_NO_PROMPT = (0,)
"""Instead of the ids, which are many, and may be more than a sender may give."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a loaded model bounds. ``vocab_size``: the number of its logits; ``pool_tokens``: the
    capacity of all KV blocks; ``drafts``: whether predictions are of use; ``width``: of vectors;
    ``scores_pairs``: whether a head scores pairs of texts; ``asks_as_qwen3``, ``longest_text``,
    ``sizes``: see :class:`.ModelFacts`."""

    vocab_size: int
    max_context: int
    pool_tokens: int
    drafts: bool = True
    width: int = 0
    scores_pairs: bool = False
    asks_as_qwen3: bool = False
    longest_text: int = 0
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # They come as JSON, and are a key.
        object.__setattr__(self, "sizes", tuple(self.sizes))


@dataclass(frozen=True, slots=True)
class Thought:
    """How the answer to a chat may begin with a thought; see :class:`.ThoughtSplitter`."""

    tags: Tags
    open: bool
    said: str = ""

    def splitter(self) -> ThoughtSplitter:
        return ThoughtSplitter(open=self.open, tags=self.tags, said=self.said)


@dataclass(frozen=True, slots=True)
class Calls:
    """Which calls of tools the answer may be. ``dialect``: the name of one."""

    dialect: str
    functions: Sequence[str]
    forced: bool
    parallel: bool

    @property
    def written_as(self) -> Dialect:
        return next(dialect for dialect in DIALECTS if dialect.name == self.dialect)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """All that the engine needs of a request, as a document.

    No template and no user's text is left to read: the prompt is token ids, and the grammar is in
    llguidance's terms.
    """

    request: GenerationRequest
    """With its prompt as ``prompt_token_ids``, no more ``max_tokens`` than fit if it says so, and
    without what the fields below say."""
    thought: Thought | None = None
    calls: Calls | None = None
    marks: Mapping[int, str] | None = None
    """Control tokens that are shown, with their spellings; None: all."""
    opening: Sequence[int] = ()
    """Tokens with which the answer may open a thought before its grammar begins."""
    prediction: Sequence[int] = ()
    """Tokens that the text may have."""
    grammar: GrammarText | None = None
    matcher: Matcher | None = field(default=None, compare=False, repr=False)
    """The grammar, where it was compiled in this process. No part of the document."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        ids = self.request.prompt_token_ids
        assert ids is not None
        return ids

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        thought, calls, grammar = self.thought, self.calls, self.grammar
        checks = None if grammar is None else grammar.checks
        return {
            "request": self.request.model_copy(update={"prompt_token_ids": _NO_PROMPT}).wire(),
            "prompt_ids": self.prompt_ids,
            "thought": thought and [astuple(thought.tags), thought.open, thought.said],
            "calls": calls and astuple(calls),
            "marks": None if self.marks is None else [*self.marks.items()],
            "opening": self.opening,
            "prediction": self.prediction,
            "grammar": grammar and [grammar.field, grammar.text, grammar.is_users_own],
            "checks": checks and [checks.text, checks.arguments],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PreparedRequest:
        thought, calls, marks = document["thought"], document["calls"], document["marks"]
        grammar, checks = document["grammar"], document["checks"]
        request = GenerationRequest(**document["request"])
        return cls(
            request=request.model_copy(update={"prompt_token_ids": document["prompt_ids"]}),
            thought=thought and Thought(Tags(*thought[0]), *thought[1:]),
            calls=calls and Calls(*calls),
            marks=None if marks is None else dict(marks),
            opening=document["opening"],
            prediction=document["prediction"],
            grammar=grammar and replace(GrammarText(*grammar), checks=checks and Checks(*checks)),
        )


def without_content(request: GenerationRequest, prompt_ids: PromptTokenIds) -> GenerationRequest:
    """``request`` with these ids for its prompt, and nothing that only an intake reads."""
    return request.model_copy(update={**_CONTENT, "prompt_token_ids": prompt_ids})

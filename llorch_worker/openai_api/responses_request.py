"""The body of ``POST /v1/responses``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SkipValidation,
    Tag,
)

from llorch_worker.contract import Fault, GenerationRequest, describe
from llorch_worker.openai_api.chat_message import with_call_ids
from llorch_worker.openai_api.known_fields import OF_OTHERS_THAN_RESPONSES
from llorch_worker.openai_api.responses_items import (
    ElsewhereItem,
    InputItem,
    Read,
    turns_of,
    type_of,
)
from llorch_worker.openai_api.sampling import Sampling
from llorch_worker.openai_api.shape import (
    MOST_OFFERED,
    MOST_TURNS,
    CallbackUrl,
    Label,
    Metadata,
    ReasoningEffort,
    Shape,
    Unsupported,
    generation_request,
    with_effort,
)
from llorch_worker.openai_api.spelling import Spelt

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_WRITABLE = "must be text that UTF-8 can encode, and nest at most 250 levels deep"
_INCLUDED = (LOGPROBS, ENCRYPTED)
"""What of ``include`` is ever there."""

_NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
}
_TURN = re.compile(r"messages\.(\d+)")


class TextFormat(Shape):
    """OpenAI's ``response_format``, with the schema's fields beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: SkipValidation[str | None] = None
    schema_: SkipValidation[dict[str, Any] | None] = Field(None, alias="schema")
    description: SkipValidation[str | None] = None
    strict: SkipValidation[bool | None] = None

    def to_contract(self) -> dict[str, Any]:
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True, warnings=False)
        return {"type": self.type, "json_schema": schema or None}

    def document(self) -> dict[str, Any]:
        """As answers have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return self.model_dump(by_alias=True) | {"strict": bool(self.strict)}


class _Read(Spelt, Shape):
    """What is not declared changes nothing here."""

    model_config = ConfigDict(extra="ignore")


class TextConfig(_Read):
    format: TextFormat | None = None
    verbosity: Label | None = None
    """Accepted and without effect."""


class FunctionTool(_Read):
    """A function with its fields beside its type."""

    type: Literal["function"]
    name: SkipValidation[str]
    description: SkipValidation[str | None] = None
    parameters: SkipValidation[dict[str, Any] | None] = None
    strict: SkipValidation[bool | None] = None

    def to_contract(self) -> dict[str, Any]:
        function = self.model_dump(exclude={"type"}, exclude_none=True, warnings=False)
        return {"type": "function", "function": function}


class OtherTool(Shape):
    """What only another service could run. The model hears nothing of it."""

    model_config = ConfigDict(extra="ignore")

    type: Label


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
    Discriminator(lambda value: "function" if type_of(value) == "function" else "other"),
]


class ChosenFunction(_Read):
    """The one function that the model must call."""

    type: Literal["function"]
    name: SkipValidation[str]


class AllowedTool(_Read):
    type: Label
    name: Label | None = None


class AllowedTools(_Read):
    """Those of the tools that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


def _choice(value: Any) -> str:
    if isinstance(value, str):
        return "mode"
    return "allowed_tools" if type_of(value) == "allowed_tools" else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[ChosenFunction, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_choice),
]


class Reasoning(_Read):
    effort: ReasoningEffort | None = None
    """For the chat template, as in chats."""
    summary: Label | None = None
    """Accepted and without effect: answers have the whole thought."""


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseRequest(Sampling):
    """OpenAI's request, with our own fields beside it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": "Tell me a story.", "max_output_tokens": 32}]}
    )
    of_others = OF_OTHERS_THAN_RESPONSES

    input: Annotated[
        list[InputItem],
        Field(max_length=MOST_TURNS),
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
    ] = Field(default_factory=list)
    """A text is a user's message."""
    instructions: SkipValidation[str | None] = None
    """A system's message before the conversation; not carried over to the next response."""
    previous_response_id: Label | None = None
    """The response whose conversation goes on."""
    store: bool | None = None
    """By default true: keep the response and its conversation for a time."""
    background: bool | None = None
    """Answer at once; the response is made whether or not somebody waits."""
    callback_url: CallbackUrl | None = None
    """With background: an http or https URL that is notified of the end."""
    max_output_tokens: SkipValidation[int | None] = None
    """By default that of the gateway; at most what the context holds beside the prompt."""
    text: TextConfig | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_OFFERED)] | None = None
    """Functions. Other tools are passed over, because nobody here runs them."""
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: SkipValidation[bool | None] = None
    include: list[Label] | None = None
    top_logprobs: SkipValidation[int | None] = None
    """How many alternatives of each token; also asks for log probabilities, like include."""
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: SkipValidation[dict[str, Any] | None] = None
    """Variables for the chat template, which go before reasoning.effort."""
    metadata: Metadata | None = None
    """Returned with the response, like the fields below."""
    user: Label | None = None
    safety_identifier: Label | None = None
    max_tool_calls: int | None = None
    """Accepted and without effect: it limits built-in tools, of which there are none."""

    n: Literal[1] | None = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    moderation: Unsupported = None

    @property
    def format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat()

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def functions(self) -> list[FunctionTool]:
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def ignored(self) -> list[str]:
        """What of the request changes nothing, though it may have been meant to."""
        others = [tool.type for tool in self.tools or () if not isinstance(tool, FunctionTool)]
        items = [item.type for item in self.input if isinstance(item, ElsewhereItem)]
        fields = {
            "text.verbosity": self.text and self.text.verbosity,
            "reasoning.summary": self.reasoning and self.reasoning.summary,
        }
        included = [name for name in self.include or () if name not in _INCLUDED]
        named = [name for name, value in fields.items() if value]
        return [*super().ignored, *named, *others, *items, *included]

    def to_generation(self, conversation: Sequence[Read]) -> GenerationRequest:
        """The request for the next turn of ``conversation``, which ends with ``input``.

        Raises:
            InvalidRequest: with the client's names.
        """
        turns, firsts = turns_of(conversation)
        if self.instructions is not None:
            turns.insert(0, {"role": "system", "content": self.instructions})
        fields = self.passed_on() | {
            "messages": with_call_ids(turns),
            "max_tokens": self.max_output_tokens,
            "logprobs": self._logprobs(),
            "response_format": self.format.to_contract(),
            "tools": [tool.to_contract() for tool in self._allowed()],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": with_effort(
                self.chat_template_kwargs, None if self.reasoning is None else self.reasoning.effort
            ),
        }
        history = len(conversation) - len(self.input)
        places = [
            f"input.{first - history}" if first >= history else "previous_response_id"
            for first in firsts
        ]
        if self.instructions is not None:
            places.insert(0, "instructions")
        faults = [*self.refusals(), *self._faults()]
        return generation_request(fields, _NAMES, faults, lambda field: _flat(field, places))

    def _logprobs(self) -> int | None:
        asked_for = LOGPROBS in (self.include or ())
        return 0 if asked_for and self.top_logprobs is None else self.top_logprobs

    def _allowed(self) -> list[FunctionTool]:
        choice = self.tool_choice
        if not isinstance(choice, AllowedTools):
            return self.functions
        names = {tool.name for tool in choice.tools if tool.type == "function"}
        return [tool for tool in self.functions if tool.name in names]

    def _tool_choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if isinstance(choice, ChosenFunction):
            return {"type": "function", "function": {"name": choice.name}}
        mode = choice.mode if isinstance(choice, AllowedTools) else choice
        # Clients send OpenAI's default without tools too.
        return mode if self._allowed() or mode not in ("auto", "none") else None

    def _faults(self) -> list[Fault]:
        faults = []
        if self.background and not self.stored:
            rule = "must be true with background: you come back for the response"
            faults.append(Fault(field="store", rule=rule, got="False"))
        if self.callback_url is not None and not self.background:
            got = describe(self.callback_url)
            faults.append(Fault(field="callback_url", rule="needs background: true", got=got))
        # The contract checks only tools that may be called, but answers have all.
        tools = enumerate(self.tools or ()) if isinstance(self.tool_choice, AllowedTools) else ()
        faults += [
            Fault(field=f"tools.{number}", rule=_WRITABLE, got="half a character, or more levels")
            for number, tool in tools
            if isinstance(tool, FunctionTool) and not _is_writable(tool)
        ]
        return faults


def _is_writable(tool: FunctionTool) -> bool:
    try:
        tool.model_dump_json(warnings=False)
    except ValueError:
        return False
    return True


def _flat(field: str, places: Sequence[str]) -> str:
    """The client's name of a ``field`` of the contract, which nests what is flat here."""
    turn = _TURN.match(field)
    if turn:
        place = places[int(turn[1])]
        return f"{place}{field[turn.end() :]}" if place.startswith("input") else place
    if field == "messages":
        return "input"
    field = field.replace("text.format.json_schema", "text.format")
    return re.sub(r"^(tools\.\d+|tool_choice)\.function", r"\1", field)

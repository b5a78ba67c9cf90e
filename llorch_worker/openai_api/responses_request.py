"""The body of ``POST /v1/responses``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SkipValidation,
    Tag,
)

from llorch_worker.contract import Fault, GenerationRequest, InvalidRequest, describe
from llorch_worker.openai_api.responses_items import Item, turns_of
from llorch_worker.openai_api.sampling import Sampling
from llorch_worker.openai_api.shape import (
    CallbackUrl,
    Label,
    Metadata,
    ReasoningEffort,
    Shape,
    Unsupported,
    generation_request,
    with_effort,
)

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Only the first is ever there."""

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


class TextConfig(Shape):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Shape):
    """A function with its fields beside its type."""

    type: Literal["function"]
    name: SkipValidation[str]
    description: SkipValidation[str | None] = None
    parameters: SkipValidation[dict[str, Any] | None] = None
    strict: SkipValidation[bool | None] = None

    def to_contract(self) -> dict[str, Any]:
        function = self.model_dump(exclude={"type"}, exclude_none=True, warnings=False)
        return {"type": "function", "function": function}


class ChosenFunction(Shape):
    """The one function that the model must call."""

    type: Literal["function"]
    name: SkipValidation[str]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[ChosenFunction, Tag("function")],
    Discriminator(lambda value: "mode" if isinstance(value, str) else "function"),
]


class Reasoning(Shape):
    effort: ReasoningEffort | None = None
    """For the chat template, as in chats."""
    summary: Unsupported = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseRequest(Sampling):
    """OpenAI's request, with our own fields beside it."""

    input: Annotated[
        list[Item], BeforeValidator(_as_items, json_schema_input_type=str | list[Item])
    ]
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
    """By default 256; prompt and answer must fit into the context."""
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: SkipValidation[bool | None] = None
    include: list[Includable] | None = None
    top_logprobs: SkipValidation[int | None] = None
    """How many alternatives of each token; also asks for log probabilities, like include."""
    truncation: Literal["disabled"] | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    """Returned with the response, like the fields below."""
    user: Label | None = None
    safety_identifier: Label | None = None
    max_tool_calls: int | None = None
    """Accepted and without effect: it limits built-in tools, of which there are none."""

    n: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None

    @property
    def format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat()

    @property
    def stored(self) -> bool:
        return self.store is not False

    def to_generation(self, conversation: Sequence[Item]) -> GenerationRequest:
        """The request for the next turn of ``conversation``, which ends with ``input``.

        Raises:
            InvalidRequest: with the client's names.
        """
        faults = [*self.refusals(), *self._faults()]
        turns, firsts = turns_of(conversation)
        if self.instructions is not None:
            turns.insert(0, {"role": "system", "content": self.instructions})
        fields = self.passed_on() | {
            "messages": turns,
            "max_tokens": self.max_output_tokens,
            "logprobs": self._logprobs(),
            "response_format": self.format.to_contract(),
            "tools": [tool.to_contract() for tool in self.tools or ()],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": with_effort(
                None, None if self.reasoning is None else self.reasoning.effort
            ),
        }
        try:
            request = generation_request(fields, _NAMES)
        except InvalidRequest as error:
            history = len(conversation) - len(self.input)
            places = [
                f"input.{first - history}" if first >= history else "previous_response_id"
                for first in firsts
            ]
            if self.instructions is not None:
                places.insert(0, "instructions")
            faults += [
                fault.model_copy(update={"field": _flat(fault.field, places)})
                for fault in error.faults
            ]
        if faults:
            raise InvalidRequest.from_faults(faults)
        return request

    def _logprobs(self) -> int | None:
        asked_for = LOGPROBS in (self.include or ())
        return 0 if asked_for and self.top_logprobs is None else self.top_logprobs

    def _tool_choice(self) -> str | dict[str, Any] | None:
        if isinstance(self.tool_choice, ChosenFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        # Clients send OpenAI's default without tools too.
        return self.tool_choice if self.tools or self.tool_choice != "auto" else None

    def _faults(self) -> list[Fault]:
        faults = []
        if self.background and not self.stored:
            rule = "must be true with background: you come back for the response"
            faults.append(Fault(field="store", rule=rule, got="False"))
        if self.callback_url is not None and not self.background:
            got = describe(self.callback_url)
            faults.append(Fault(field="callback_url", rule="needs background: true", got=got))
        return faults


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

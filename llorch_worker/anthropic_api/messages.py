"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SkipValidation

from llorch_worker.anthropic_api.answer import Message, MessageEvents, message
from llorch_worker.anthropic_api.blocks import Loose, Texts, Turn, elsewhere, turns_of
from llorch_worker.anthropic_api.errors import error_document
from llorch_worker.contract import (
    Fault,
    GenerationRequest,
    GenerationResult,
    LlorchError,
)
from llorch_worker.contract.token_questions import TokenizeChat
from llorch_worker.openai_api.body import Body
from llorch_worker.openai_api.chat_answer import chat_completion
from llorch_worker.openai_api.chat_chunks import ChatChunks
from llorch_worker.openai_api.errors import body_of, status_of
from llorch_worker.openai_api.known_fields import OF_OTHERS_THAN_MESSAGES
from llorch_worker.openai_api.sampling import StreamOptions
from llorch_worker.openai_api.shape import (
    MOST_OFFERED,
    MOST_TURNS,
    Unsupported,
    generation_request,
    with_effort,
)
from llorch_worker.openai_api.spelling import Spelt

_TURN = re.compile(r"messages\.(\d+)")
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
_MODES = {"auto": "auto", "any": "required", "none": "none"}


class OfferedTool(Loose):
    """A function; or by another ``type`` what only Anthropic runs or has defined."""

    type: str | None = None
    name: SkipValidation[str] = ""
    description: SkipValidation[str | None] = None
    input_schema: SkipValidation[dict[str, Any] | None] = None
    strict: SkipValidation[bool | None] = None

    @property
    def is_function(self) -> bool:
        return self.type in (None, "custom")

    def to_contract(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": given}


class ToolChoice(Spelt, Loose):
    type: Literal["auto", "any", "tool", "none"]
    name: SkipValidation[str | None] = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Spelt, Loose):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Spelt, Loose):
    type: Literal["json_schema"]
    schema_: SkipValidation[dict[str, Any]]

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class OutputConfig(Spelt, Loose):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """For the chat template, as in chats."""
    format: JsonFormat | None = None


class CountTokensRequest(Body):
    """Anthropic's request, with our own fields beside it. What it does not know is ignored."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello"}]}]}
    )
    of_others = OF_OTHERS_THAN_MESSAGES
    done = b""

    messages: Annotated[list[Turn], Field(max_length=MOST_TURNS)]
    system: Texts | None = None
    stop_sequences: SkipValidation[list[str] | None] = None
    tools: Annotated[list[OfferedTool], Field(max_length=MOST_OFFERED)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """Without it the template is asked for no thoughts, and none are shown."""
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """An older place of output_config.format."""
    chat_template_kwargs: SkipValidation[dict[str, Any] | None] = None
    """Variables for the chat template, which go before those of thinking and effort."""

    n: Literal[1] | None = None
    container: Unsupported = None

    @property
    def ignored(self) -> list[str]:
        """What of the request changes nothing, though it may have been meant to."""
        tools = [tool.type for tool in self.tools or () if tool.type and not tool.is_function]
        return [*super().ignored, *tools, *elsewhere(self.messages)]

    @property
    def shows_thoughts(self) -> bool:
        thinking = self.thinking
        return (
            thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
        )

    def to_requests(self) -> list[GenerationRequest]:
        placed = list(turns_of(self.system or (), self.messages))
        places, turns = [place for place, _ in placed], [turn for _, turn in placed]
        names = _NAMES | ({"stop": "stop"} if self.stop else {})
        if self.output_format is not None:
            names["response_format"] = "output_format"
        faults = [*self.refusals(), *self._faults()]
        request = generation_request(
            self._fields(turns), names, faults, lambda field: _renamed(field, places)
        )
        return [request]

    def question(self) -> TokenizeChat:
        """Raises ``InvalidRequest``."""
        (chat,) = self.to_requests()
        return TokenizeChat.of(chat)

    def answer(self, results: Sequence[GenerationResult], created: int) -> Message:
        (result,) = results
        document = chat_completion(result, created)
        return message(document, result.choices[0].stop_string, thoughts=self.shows_thoughts)

    def chunks(
        self, requests: Sequence[GenerationRequest], job_id: str, created: int
    ) -> MessageEvents:
        options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        chat = ChatChunks(requests[0], job_id, created, options)
        return MessageEvents(chat, stops=bool(requests[0].stop), thoughts=self.shows_thoughts)

    def failure(self, error: LlorchError) -> Mapping[str, Any]:
        return error_document(status_of(error), body_of(error).error)

    def _faults(self) -> list[Fault]:
        newer = None if self.output_config is None else self.output_config.format
        twice = {
            "stop | stop_sequences": bool(self.stop and self.stop_sequences),
            "output_config.format | output_format": bool(newer and self.output_format),
        }
        rule = "at most one of them may be given"
        return [Fault(field=field, rule=rule, got="both") for field, both in twice.items() if both]

    def _fields(self, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
        output = self.output_config or OutputConfig()
        thinks = {"enable_thinking": self.thinking is not None and self.thinking.type != "disabled"}
        last = turns[-1] if turns else {}
        prefilled = last.get("role") == "assistant" and "tool_calls" not in last
        fields = self.passed_on() | {
            "messages": turns,
            "tools": [tool.to_contract() for tool in self.tools or () if tool.is_function],
            "chat_template_kwargs": with_effort(
                _over(thinks, self.chat_template_kwargs), output.effort
            ),
            "continue_final_message": prefilled or None,
        }
        if not self.stop:
            fields["stop"] = self.stop_sequences
        if (shape := output.format or self.output_format) is not None:
            schema = {"schema": shape.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        choice = self.tool_choice
        # Without tools there is nothing to choose.
        if choice is not None and (fields["tools"] or choice.type in ("any", "tool")):
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = named if choice.type == "tool" else _MODES[choice.type]
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return fields


class MessagesRequest(CountTokensRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 32}
            ]
        }
    )

    max_tokens: SkipValidation[int]

    def _fields(self, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return super()._fields(turns) | {"max_tokens": self.max_tokens}


def _over(variables: dict[str, Any], given: Any) -> Any:
    """``variables`` with those that the client has ``given``; what is no object stays."""
    return {**variables, **given} if isinstance(given, dict) else given or variables


def _renamed(field: str, places: Sequence[str]) -> str:
    """The client's name of a ``field`` of the contract."""
    turn = _TURN.match(field)
    if turn:
        return places[int(turn[1])] + field[turn.end() :]
    field = field.replace(".function.parameters", ".input_schema")
    return re.sub(r"^(tools\.\d+|tool_choice)\.function", r"\1", field)

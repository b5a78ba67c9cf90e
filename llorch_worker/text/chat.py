"""Chat messages to prompt ids, by the model's own template or in Llama-2's format."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from llorch_worker.contract import Fault, Function, InvalidRequest, Message, Tool, ToolCall
from llorch_worker.contract.tools import MAX_ARGUMENTS_DEPTH, FunctionCall
from llorch_worker.contract.values import nests_deeper
from llorch_worker.text.chat_templates import ChatOptions, ChatTemplates, refusal
from llorch_worker.text.codec import Codec
from llorch_worker.text.dialects import GENERIC, Dialect, dialect_of
from llorch_worker.text.spellings import any_of

logger = logging.getLogger(__name__)

_NONCHARACTERS = 0xFDD0
"""The first of 32 in a row."""
NO_ARGUMENTS = "INVALID_JSON"
"""pydantic-ai's name of arguments that are no object."""


class ChatFormat(Protocol):
    """How a model expects a conversation."""

    @property
    def template(self) -> str | None:
        """The Jinja template that came with the model, if any."""
        ...

    @property
    def dialect(self) -> Dialect:
        """How the model writes calls of tools."""
        ...

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        at_most: int | None,
        options: ChatOptions,
    ) -> list[int]:
        """Prompt ids that end where the assistant's answer begins.

        Raises InvalidRequest, or TooManyTokens if there are certainly more than ``at_most``.
        """
        ...


class Llama2Chat:
    """Llama-2's ``[INST]`` format, for files without a template.

    As in Meta's reference implementation, each question and its answer are one text between BOS
    and EOS ids, the system prompt is part of the first question, and no user text can become a
    control token.
    """

    template: str | None = None
    dialect = GENERIC

    def __init__(self, codec: Codec, bos_token_id: int | None, eos_token_id: int | None) -> None:
        self._codec = codec
        self._bos = [] if bos_token_id is None else [bos_token_id]
        self._eos = [] if eos_token_id is None else [eos_token_id]

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        at_most: int | None,
        options: ChatOptions,
    ) -> list[int]:
        if tools:
            rule = "the model has no chat template, which alone could show it tools"
            raise refusal("tools", rule, f"{len(tools)} tools")
        if options.continue_final_message:
            rule = "the model has no chat template, which alone could leave a turn open"
            raise refusal("continue_final_message", rule, "true")
        _check_turns(messages)
        system = ""
        if messages[0].role == "system":
            system = f"<<SYS>>\n{messages[0].content or ''}\n<</SYS>>\n\n"
            messages = messages[1:]
        questions = [message.content or "" for message in messages[0::2]]
        answers = [message.content or "" for message in messages[1::2]]
        questions[0] = system + questions[0]
        texts = [
            f"[INST] {question.strip()} [/INST] {answer.strip()} "
            for question, answer in zip(questions, answers, strict=False)
        ]
        last = f"[INST] {questions[-1].strip()} [/INST]"
        if at_most is not None:
            self._codec.check_length("".join([*texts, last]), at_most)
        ids: list[int] = []
        for text in texts:
            ids += self._bos + self._codec.encode(text) + self._eos
        return ids + self._bos + self._codec.encode(last)


class NoChat:
    """Refuses chats: a base model's, whose format nobody can know."""

    template: str | None = None
    dialect = GENERIC

    def encode(self, messages: Sequence[Message], *_: object, **__: object) -> list[int]:
        rule = (
            "the model has no chat template: send a prompt, or serve a file with "
            "tokenizer.chat_template or a folder with chat_template.jinja"
        )
        raise refusal("messages", rule, f"{len(messages)} messages")


class TemplateChat:
    """Jinja templates that came with the model.

    ``bos_token_id``: put in front if the template does not write it; None: never.
    """

    def __init__(self, templates: ChatTemplates, codec: Codec, bos_token_id: int | None) -> None:
        self.template = templates.named.get("default")
        self.dialect = dialect_of(templates.named.get("tool_use") or self.template)
        self._templates = templates
        self._codec = codec
        self._bos_token_id = bos_token_id
        self._shown: dict[bool, frozenset[str]] = {}
        spellings = {token for token in codec.special_ids if len(token) > 1}
        self._control_beginning = re.compile(f"(?={any_of(spellings)})(.)", re.DOTALL)

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        at_most: int | None,
        options: ChatOptions,
    ) -> list[int]:
        if not messages:
            raise refusal("messages", "must not be empty", "none")
        template = self._templates.chosen(tools=bool(tools))
        if tools and "tools" not in template:
            rule = "the model's chat template has no place for them"
            raise refusal("tools", rule, f"{len(tools)} tools")
        self._check_places(messages, tools)
        turns = [{"role": m.role, **_turn(m)} for m in messages]
        described = [_described(tool) for tool in tools]
        mark = _new_mark()
        text = self._templates.render(
            self._as_text(turns, mark),
            self._as_text(described, mark),
            replace(options, kwargs=self._as_text(dict(options.kwargs), mark)),
        )
        if at_most is not None:
            self._codec.check_length(text.replace(mark, ""), at_most)
        ids = self._codec.encode(text, parse_special=True, literal_mark=mark)
        bos = self._bos_token_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _check_places(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raises InvalidRequest for calls and results that the template would drop."""
        held = {f"messages.{i}.tool_calls": "calls" for i, m in enumerate(messages) if m.tool_calls}
        held |= {f"messages.{i}": "results" for i, m in enumerate(messages) if m.role == "tool"}
        if held:
            with_tools = bool(tools)
            if with_tools not in self._shown:
                self._shown[with_tools] = self._what_it_shows(tools=with_tools)
            shown = self._shown[with_tools]
            faults = [
                Fault(
                    field=field, rule=f"the model's chat template has no place for {what}", got=what
                )
                for field, what in held.items()
                if what not in shown
            ]
            if faults:
                raise InvalidRequest.from_faults(faults)

    def _what_it_shows(self, *, tools: bool) -> frozenset[str]:
        """Which of ``calls`` and ``results`` of tools a chat shows that has little else."""
        function = FunctionCall(name="shown1calls", arguments="{}")
        call = ToolCall(id="123456789", function=function)
        chat = (
            Message(role="user", content="a"),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="shown1results", tool_call_id=call.id, name=function.name),
        )
        offered = [_described(Tool(function=Function(name="b")))] if tools else []
        everything = frozenset(("calls", "results"))
        try:
            text = self._templates.render([{"role": m.role, **_turn(m)} for m in chat], offered)
        except InvalidRequest:
            # It will say itself what it refuses.
            return everything
        return frozenset(what for what in everything if f"shown1{what}" in text)

    def _as_text(self, value: Any, mark: str) -> Any:
        """``value`` with ``mark`` in every spelling of a control token, in keys too."""
        match value:
            case str():
                return self._control_beginning.sub(rf"\1{mark}", value)
            case dict():
                return {
                    self._as_text(key, mark): self._as_text(item, mark)
                    for key, item in value.items()
                }
            case list():
                return [self._as_text(item, mark) for item in value]
        return value


def chat_format(
    templates: ChatTemplates, codec: Codec, bos: int | None, eos: int | None, *, add_bos: bool
) -> ChatFormat:
    """The format of the file's templates. Without any it is Llama-2's if texts end with its
    ``</s>``; other models refuse chats."""
    if not templates.named:
        if eos is None or codec.special_ids.get("</s>") != eos:
            logger.info("the model has no chat template: it refuses chats")
            return NoChat()
        logger.info("the model has no chat template: chats get Llama-2's [INST] format")
        return Llama2Chat(codec, bos, eos)
    return TemplateChat(templates, codec, bos if add_bos else None)


def _new_mark() -> str:
    """What keeps the spelling of a control token text when it stands inside: one of 2**60 strings
    of Unicode noncharacters, so that no text of a user has it."""
    return "".join(chr(_NONCHARACTERS + byte % 32) for byte in secrets.token_bytes(12))


def _turn(message: Message) -> dict[str, Any]:
    """What templates expect of a turn besides its role."""
    turn: dict[str, Any] = {"content": message.content or ""}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls is not None:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def _arguments(spelling: str) -> dict[str, Any]:
    """Templates write the arguments themselves, so they need an object: under :data:`NO_ARGUMENTS`
    what is none."""
    try:
        value = json.loads(spelling or "{}")
    except (ValueError, RecursionError):
        value = spelling
    if value is None:
        return {}
    if not isinstance(value, dict) or nests_deeper(value, MAX_ARGUMENTS_DEPTH):
        return {NO_ARGUMENTS: spelling}
    return value


def _described(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": tool.type, "function": function}


def _check_turns(messages: Sequence[Message]) -> None:
    """Turns must be [system], user, assistant, user, ..., user. Reports all faults at once."""
    if not messages:
        raise refusal("messages", "must not be empty", "none")
    faults = [
        Fault(
            field=f"messages.{index}.tool_calls",
            rule="the model has no chat template, which alone could show them",
            got=f"{len(message.tool_calls)} calls",
        )
        for index, message in enumerate(messages)
        if message.tool_calls is not None
    ]
    offset = 1 if messages[0].role == "system" else 0
    expected = "user"
    for index, message in enumerate(messages[offset:], start=offset):
        if message.role != expected:
            rule = f"must be {expected}: user and assistant alternate, after an optional system"
            faults.append(Fault(field=f"messages.{index}.role", rule=rule, got=message.role))
        expected = "assistant" if message.role == "user" else "user"
    if messages[-1].role != "user":
        faults.append(
            Fault(field="messages", rule="must end with a user message", got=messages[-1].role)
        )
    if faults:
        raise InvalidRequest.from_faults(faults)

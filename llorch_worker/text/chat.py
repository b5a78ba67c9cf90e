"""Chat messages to prompt ids, by the model's own template or in Llama-2's format."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

from llorch_worker.contract import Fault, Function, InvalidRequest, Message, Tool, ToolCall
from llorch_worker.contract.tools import MAX_ARGUMENTS_DEPTH, FunctionCall
from llorch_worker.contract.values import nests_deeper
from llorch_worker.text.chat_templates import ChatOptions, ChatTemplates
from llorch_worker.text.codec import Codec
from llorch_worker.text.dialects import GENERIC, Dialect, dialect_of
from llorch_worker.text.stand_ins import ControlFinder
from llorch_worker.text.tool_turns import Place, Turn, plain_turns

logger = logging.getLogger(__name__)

NO_ARGUMENTS = "INVALID_JSON"
"""pydantic-ai's name of arguments that are no object."""
_SHORT_ID = re.compile("[0-9A-Za-z]{9}")
_LLAMA2_PLACES: frozenset[Place] = frozenset(("system",))


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
        if options.continue_final_message:
            rule = "the model has no chat template, which alone could leave a turn open"
            raise InvalidRequest.from_fault("continue_final_message", rule, "true")
        described = [_described(tool) for tool in tools]
        turns = [{"role": m.role, **_turn(m)} for m in messages]
        turns = plain_turns(turns, described, self.dialect, _LLAMA2_PLACES)
        _check_turns(turns)
        system = ""
        if turns[0]["role"] == "system":
            system = f"<<SYS>>\n{turns[0]['content']}\n<</SYS>>\n\n"
            turns = turns[1:]
        questions = [turn["content"] for turn in turns[0::2]]
        answers = [turn["content"] for turn in turns[1::2]]
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
        raise InvalidRequest.from_fault("messages", rule, f"{len(messages)} messages")


class TemplateChat:
    """Jinja templates that came with the model.

    ``bos_token_id``: put in front if the template does not write it; None: never.
    """

    def __init__(self, templates: ChatTemplates, codec: Codec, bos_token_id: int | None) -> None:
        self.template = templates.named.get("default")
        self._templates = templates
        self._codec = codec
        self._bos_token_id = bos_token_id
        self._short_ids = any(dialect_of(text).short_ids for text in templates.named.values())
        self._places: dict[bool, frozenset[Place]] = {}
        self._control = ControlFinder(codec.special_ids)

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        at_most: int | None,
        options: ChatOptions,
    ) -> list[int]:
        if not messages:
            raise InvalidRequest.from_fault("messages", "must not be empty", "none")
        turns = [{"role": m.role, **_turn(m, short_ids=self._short_ids)} for m in messages]
        described = [_described(tool) for tool in tools]
        kwargs = dict(options.kwargs)
        given = [turns, described, kwargs]
        try:
            stand_ins = self._control.stand_ins(given, self._templates.named.values())
        except ValueError as error:
            raise InvalidRequest.from_fault(
                "messages", str(error), "text in all of Unicode"
            ) from None
        turns, described, kwargs = self._control.put(given, stand_ins)
        if tools or any(m.tool_calls or m.role == "tool" for m in messages):
            dialect, places = self.dialect, self._places_for(tools=bool(tools))
            # The dialect's marks become control tokens, unlike those that a user writes.
            listed = [] if dialect.tools_in_system else described
            turns = plain_turns(turns, listed, dialect, places)
            if dialect.tools_in_system:
                turns = _with_tools_key(turns, described)
        text = self._templates.render(turns, described, replace(options, kwargs=kwargs))
        text = stand_ins.unescaped(text)
        if at_most is not None:
            self._codec.check_length(stand_ins.meant(text), at_most)
        ids = self._codec.encode(text, parse_special=True, stand_ins=stand_ins)
        bos = self._bos_token_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    @cached_property
    def dialect(self) -> Dialect:
        """That of the template; the generic one if it has no place for tools."""
        named = dialect_of(self._templates.named.get("tool_use") or self.template)
        if named.tools_in_system or "tools" in self._places_for(tools=True):
            return named
        logger.info(
            "the chat template has no place for tools: they are listed in the system message, and "
            "calls are JSON (the generic dialect)"
        )
        return GENERIC

    def _places_for(self, *, tools: bool) -> frozenset[Place]:
        """What the template of a chat with or without ``tools`` shows, found by small chats."""
        if tools not in self._places:
            self._places[tools] = self._find_places(tools=tools)
        return self._places[tools]

    def _find_places(self, *, tools: bool) -> frozenset[Place]:
        call, other = (
            ToolCall(
                id=f"12345678{n}", function=FunctionCall(name=f"shown{n}calls", arguments="{}")
            )
            for n in (1, 2)
        )
        question = Message(role="user", content="a")
        result, another = (
            Message(role="tool", content="shown1results", tool_call_id=each.id, name="b")
            for each in (call, other)
        )
        turns = [question, Message(role="assistant", tool_calls=(call,)), result]
        offered = [_described(Tool(function=Function(name="shown1tools")))]

        def shown(chat: Sequence[Message], offered: Sequence[Any] = ()) -> str | None:
            """None if the template refuses the chat."""
            try:
                return self._templates.render([{"role": m.role, **_turn(m)} for m in chat], offered)
            except InvalidRequest:
                return None

        found: set[Place] = set()
        if "shown1system" in (
            shown((Message(role="system", content="shown1system"), question)) or ""
        ):
            found.add("system")
        if "shown1tools" in (shown((question,), offered) or ""):
            found.add("tools")
        trained = "tools" in found or dialect_of(self.template).tools_in_system
        if tools and not trained:
            return frozenset(found)
        text = shown(turns, offered if tools else ())
        if text is None:
            # A trained one will say itself what it refuses.
            return frozenset((*found, "calls", "several", "results") if trained else found)
        if "shown1calls" in text:
            found.add("calls")
            both = Message(role="assistant", tool_calls=(call, other))
            turns = [question, both, result, another]
            if "shown2calls" in (shown(turns, offered if tools else ()) or ""):
                found.add("several")
        if "shown1results" in text and (trained or "calls" in found):
            found.add("results")
        return frozenset(found)


def chat_format(
    templates: ChatTemplates, codec: Codec, bos: int | None, eos: int | None, *, add_bos: bool
) -> ChatFormat:
    """The format of the file's templates. Without any it is Llama-2's if texts end with its
    ``</s>``; other models refuse chats."""
    if not templates.named:
        if eos is None or codec.special_ids.get("</s>") != eos:
            if "[CLS]" not in codec.special_ids:  # an encoder answers nobody
                logger.info("the model has no chat template: it refuses chats")
            return NoChat()
        logger.info("the model has no chat template: chats get Llama-2's [INST] format")
        return Llama2Chat(codec, bos, eos)
    return TemplateChat(templates, codec, bos if add_bos else None)


def short_id(call_id: str) -> str:
    """An id of nine letters and digits for a call: always the same one, or itself if it is such."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]


def _turn(message: Message, *, short_ids: bool = False) -> dict[str, Any]:
    """What templates expect of a turn besides its role."""
    turn: dict[str, Any] = {"content": message.content or ""}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if short_ids and message.tool_call_id is not None:
        turn["tool_call_id"] = short_id(message.tool_call_id)
    if message.tool_calls is not None:
        turn["tool_calls"] = [
            {
                "id": short_id(call.id) if short_ids else call.id,
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


def _with_tools_key(turns: list[Turn], described: Sequence[Any]) -> list[Turn]:
    """Phi-4-mini's template reads tools from a key of the system message."""
    if not described:
        return turns
    listed = json.dumps([tool["function"] for tool in described], ensure_ascii=False)
    if turns[0]["role"] != "system":
        turns = [{"role": "system", "content": ""}, *turns]
    return [{**turns[0], "tools": listed}, *turns[1:]]


def _check_turns(turns: Sequence[Turn]) -> None:
    """Turns must be [system], user, assistant, user, ..., user. Reports all faults at once."""
    if not turns:
        raise InvalidRequest.from_fault("messages", "must not be empty", "none")
    faults = []
    offset = 1 if turns[0]["role"] == "system" else 0
    expected = "user"
    for index, turn in enumerate(turns[offset:], start=offset):
        role = turn["role"]
        if role != expected:
            rule = f"must be {expected}: user and assistant alternate, after an optional system"
            faults.append(Fault(field=f"messages.{index}.role", rule=rule, got=role))
        expected = "assistant" if role == "user" else "user"
    if (last := turns[-1]["role"]) != "user":
        faults.append(Fault(field="messages", rule="must end with a user message", got=last))
    if faults:
        raise InvalidRequest.from_faults(faults)

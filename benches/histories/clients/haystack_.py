"""haystack: its chat messages, over chats and over responses."""

import os

from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, ReasoningContent, TextContent, ToolCall
from haystack.tools import Tool

from benches.histories.sending import WEATHER, Way
from benches.histories.turns import object_of, text_of


def _sunny(**_):
    return WEATHER


class Chat(Way):
    def __init__(self, kind, limit):
        self.generator = kind(
            model=os.environ["MODEL"],
            api_base_url=os.environ["OPENAI_BASE_URL"],
            generation_kwargs={limit: 24},
            max_retries=0,
        )

    def message(self, turn):
        text, name = text_of(turn), turn["name"]
        match turn["role"]:
            case "system" | "developer":
                return ChatMessage.from_system(text, name=name)
            case "user" if turn["parts"]:
                return ChatMessage.from_user(content_parts=turn["texts"], name=name)
            case "user":
                return ChatMessage.from_user(text, name=name)
            case "tool":
                given = [TextContent(text) for text in turn["texts"]] if turn["parts"] else text
                return ChatMessage.from_tool(given, _call(turn["call"]), error=turn["failed"])
        calls = [_call(call) for call in turn["calls"]]
        said = turn["refusal"] or text
        return ChatMessage.from_assistant(
            said or (None if calls else ""), name=name, tool_calls=calls, reasoning=_thought(turn)
        )

    def asked(self, messages, tools, choice):
        functions = [tool["function"] for tool in tools]
        offered = [Tool(f["name"], f["description"], f["parameters"], _sunny) for f in functions]
        fields = {"generation_kwargs": {"tool_choice": choice}} if choice else {}
        reply = self.generator.run(messages, tools=offered, **fields)["replies"][0]
        return [reply, *(ChatMessage.from_tool(WEATHER, call) for call in reply.tool_calls)]


def _call(call):
    """With both ids of a response's call; chats have one."""
    arguments = object_of(call["arguments"])
    return ToolCall(call["name"], arguments, id=call["id"], extra={"call_id": call["id"]})


def _thought(turn):
    """As a response gives it; chats read nothing but the text."""
    if turn["thought"] is None:
        return None
    return ReasoningContent(turn["thought"], extra={"id": "rs_1", "type": "reasoning"})


def all_ways():
    return {
        "chat": Chat(OpenAIChatGenerator, "max_completion_tokens"),
        "responses": Chat(OpenAIResponsesChatGenerator, "max_output_tokens"),
    }

"""autogen: its messages, with the agents that sent them."""

import asyncio
import os

from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    SystemMessage,
    UserMessage,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient

from benches.histories.sending import WEATHER, Way
from benches.histories.turns import text_of

LOOP = asyncio.new_event_loop()
INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": ModelFamily.UNKNOWN,
    "structured_output": True,
    "multiple_system_messages": True,
}


class Chat(Way):
    def __init__(self, **options):
        self.client = OpenAIChatCompletionClient(
            model=os.environ["MODEL"],
            base_url=os.environ["OPENAI_BASE_URL"],
            model_info=INFO,
            max_tokens=24,
            max_retries=0,
            **options,
        )

    def message(self, turn):
        source = turn["name"] or "writer"
        match turn["role"]:
            case "system" | "developer":
                return SystemMessage(content=text_of(turn))
            case "user":
                said = turn["texts"] if turn["parts"] else text_of(turn)
                return UserMessage(content=said, source=source)
            case "tool":
                call = turn["call"]
                return _result(call["id"], call["name"], text_of(turn), turn["failed"])
        calls = [FunctionCall(**call) for call in turn["calls"]]
        said = turn["refusal"] or text_of(turn)
        thought = turn["thought"] or (said if calls and said else None)
        return AssistantMessage(content=calls or said, thought=thought, source=source)

    def asked(self, messages, tools, choice):
        fields = {"tool_choice": choice} if choice else {}
        offered = [tool["function"] for tool in tools]
        answer = LOOP.run_until_complete(self.client.create(messages, tools=offered, **fields))
        said = AssistantMessage(content=answer.content, thought=answer.thought, source="writer")
        calls = [] if isinstance(answer.content, str) else answer.content
        return [said, *(_result(call.id, call.name, WEATHER, False) for call in calls)]


def _result(id_, name, content, failed):
    result = FunctionExecutionResult(call_id=id_, name=name, content=content, is_error=failed)
    return FunctionExecutionResultMessage(content=[result])


def all_ways():
    return {"chat": Chat(), "names in the text": Chat(add_name_prefixes=True)}

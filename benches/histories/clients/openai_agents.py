"""openai-agents: items of a conversation, over chats and over responses."""

import asyncio
import os

from agents import (
    FunctionTool,
    ModelSettings,
    ModelTracing,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    set_tracing_disabled,
)
from agents.exceptions import ModelBehaviorError
from openai import AsyncOpenAI

from benches.histories.clients.openai_python import Responses as Plain
from benches.histories.sending import WEATHER, Way

set_tracing_disabled(True)
LOOP = asyncio.new_event_loop()


async def _sunny(*_):
    return WEATHER


class Chat(Way):
    def __init__(self, kind):
        self.model = kind(os.environ["MODEL"], AsyncOpenAI(max_retries=0))
        self.plain = Plain(None, None, "dumps")

    def made(self, turns):
        return self.plain.made(turns)

    def asked(self, messages, tools, choice):
        offered = [
            FunctionTool(f["name"], f["description"], f["parameters"], _sunny, False)
            for f in (tool["function"] for tool in tools)
        ]
        options = {"previous_response_id": None, "conversation_id": None, "prompt": None}
        settings = ModelSettings(max_tokens=24, tool_choice=choice, store=False)
        asked = self.model.get_response(
            "Be brief.", messages, settings, offered, None, [], ModelTracing.DISABLED, **options
        )
        try:
            answer = LOOP.run_until_complete(asked)
        except ModelBehaviorError:
            return []  # It takes no answer that its length has cut off.
        items = answer.to_input_items()
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": WEATHER}
            for item in items
            if item["type"] == "function_call"
        ]
        return items + results


def all_ways():
    kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    return {name: Chat(kind) for name, kind in kinds.items()}

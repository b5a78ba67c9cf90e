"""pydantic-ai: its parts, over chats and over responses."""

import json
import os

from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from benches.histories.sending import WEATHER, Way
from benches.histories.turns import text_of


class Chat(Way):
    def __init__(self, kind):
        self.model = kind(os.environ["MODEL"])

    def message(self, turn):
        match turn["role"]:
            case "system" | "developer":
                return ModelRequest(parts=[SystemPromptPart(text) for text in turn["texts"]])
            case "user":
                said = turn["texts"] if turn["parts"] else text_of(turn)
                return ModelRequest(parts=[UserPromptPart(said)])
            case "tool":
                id_, name = turn["call"]["id"], turn["call"]["name"]
                given = turn["texts"] if turn["parts"] else text_of(turn)
                if turn["failed"]:
                    part = RetryPromptPart(text_of(turn), tool_name=name, tool_call_id=id_)
                else:
                    part = ToolReturnPart(name, given, id_)
                return ModelRequest(parts=[part])
        parts = [TextPart(text) for text in turn["texts"]]
        if turn["refusal"]:
            parts = [TextPart(turn["refusal"])]
        if turn["thought"] is not None:
            parts.insert(0, ThinkingPart(turn["thought"]))
        for call in turn["calls"]:
            arguments = call["arguments"]
            if turn["parts"]:
                arguments = _object(arguments)
            parts.append(ToolCallPart(call["name"], arguments, call["id"]))
        return ModelResponse(parts=parts)

    def asked(self, messages, tools, choice):
        settings = ModelSettings(max_tokens=24)
        if choice:
            settings["tool_choice"] = choice
        functions = [tool["function"] for tool in tools]
        offered = [
            ToolDefinition(
                name=f["name"], parameters_json_schema=f["parameters"], description=f["description"]
            )
            for f in functions
        ]
        parameters = ModelRequestParameters(function_tools=offered)
        answer = model_request_sync(
            self.model, messages, model_settings=settings, model_request_parameters=parameters
        )
        calls = [part for part in answer.parts if isinstance(part, ToolCallPart)]
        results = [ToolReturnPart(c.tool_name, WEATHER, c.tool_call_id) for c in calls]
        return [answer, *([ModelRequest(parts=results)] if results else [])]


def _object(arguments):
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else None


def all_ways():
    return {"chat": Chat(OpenAIChatModel), "responses": Chat(OpenAIResponsesModel)}

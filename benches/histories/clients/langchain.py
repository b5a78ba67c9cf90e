"""langchain-openai: its chat model, over chats and over responses."""

import json
import os

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from benches.histories.sending import WEATHER, Way
from benches.histories.turns import content_of


class Chat(Way):
    def __init__(self, *, responses):
        self.model = ChatOpenAI(
            model=os.environ["MODEL"], max_tokens=24, max_retries=0, use_responses_api=responses
        )

    def message(self, turn):
        named = {"name": turn["name"]} if turn["name"] else {}
        match turn["role"]:
            case "system":
                return SystemMessage(content_of(turn), **named)
            case "developer":
                role = {"__openai_role__": "developer"}
                return SystemMessage(content_of(turn), additional_kwargs=role, **named)
            case "user":
                return HumanMessage(content_of(turn), **named)
            case "tool":
                status = "error" if turn["failed"] else "success"
                id_, name = turn["call"]["id"], turn["call"]["name"]
                return ToolMessage(content_of(turn), tool_call_id=id_, name=name, status=status)
        calls, invalid = [], []
        for call in turn["calls"]:
            common = {"id": call["id"], "name": call["name"]}
            try:
                arguments = json.loads(call["arguments"])
            except ValueError:
                arguments = None
            if isinstance(arguments, dict):
                calls.append({**common, "args": arguments})
            else:
                invalid.append({**common, "args": call["arguments"], "error": "no object"})
        extra = {}
        if turn["refusal"]:
            extra["refusal"] = turn["refusal"]
        content = content_of(turn)
        if turn["thought"] is not None:
            extra["reasoning_content"] = turn["thought"]
            if isinstance(content, list):
                content = [{"type": "reasoning", "reasoning": turn["thought"]}, *content]
        return AIMessage(
            content, tool_calls=calls, invalid_tool_calls=invalid, additional_kwargs=extra, **named
        )

    def asked(self, messages, tools, choice):
        fields = {"tool_choice": choice} if choice else {}
        model = self.model.bind_tools(tools, **fields) if tools else self.model
        answer = model.invoke(messages)
        calls = [*answer.tool_calls, *answer.invalid_tool_calls]
        return [answer, *(ToolMessage(WEATHER, tool_call_id=call["id"]) for call in calls)]


def all_ways():
    return {"chat": Chat(responses=False), "responses": Chat(responses=True)}

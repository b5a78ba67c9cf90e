"""openai: plain dictionaries, the package's own objects, and their dumps; chats and responses."""

import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from benches.histories.sending import WEATHER, Way
from benches.histories.turns import content_of, text_of

MOST_TOKENS = 24


def named(turn):
    return {"name": turn["name"]} if turn["name"] else {}


class Chat(Way):
    def __init__(self, api, model, form):
        self.api, self.model, self.form = api, model, form

    def message(self, turn):
        if turn["role"] == "tool":
            id_ = turn["call"]["id"]
            return {"role": "tool", "tool_call_id": id_, "content": content_of(turn)}
        if turn["role"] != "assistant":
            return {"role": turn["role"], "content": content_of(turn), **named(turn)}
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in turn["calls"]
        ]
        said = {"role": "assistant", "content": content_of(turn) if turn["texts"] else None}
        said |= {"refusal": turn["refusal"]} if turn["refusal"] else {}
        said |= {"tool_calls": calls} if calls else {}
        said |= {"reasoning_content": turn["thought"]} if turn["thought"] is not None else {}
        if self.form == "dictionaries":
            if turn["refusal"] and turn["parts"]:
                said |= {"content": [{"type": "refusal", "refusal": turn["refusal"]}]}
            return said | named(turn)
        if isinstance(said["content"], list):
            said["content"] = text_of(turn)
        # As an answer of OpenAI has it: with a list of no annotations, and nulls.
        whole = ChatCompletionMessage.model_validate({"annotations": [], "audio": None, **said})
        return whole if self.form == "objects" else whole.model_dump()

    def asked(self, messages, tools, choice):
        fields = {"tools": tools} if tools else {}
        fields |= {"tool_choice": choice} if choice else {}
        answer = self.api.chat.completions.create(
            model=self.model, messages=messages, max_tokens=MOST_TOKENS, **fields
        )
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
            for call in message.tool_calls or ()
        ]
        return [message.model_dump() if self.form == "dumps" else message, *results]


class Responses(Way):
    """With a conversation that the client keeps: the items of answers go back as they are."""

    def __init__(self, api, model, form):
        self.api, self.model, self.form = api, model, form

    def made(self, turns):
        return [item for turn in turns for item in self._items(turn)]

    def _items(self, turn):
        if turn["role"] == "tool":
            yield {
                "type": "function_call_output",
                "call_id": turn["call"]["id"],
                "output": content_of(turn, "input_text"),
            }
        elif turn["role"] != "assistant":
            yield {"role": turn["role"], "content": content_of(turn, "input_text")}
        else:
            for item in self._answer(turn):
                yield item if self.form == "objects" else item.model_dump()

    def _answer(self, turn):
        if turn["thought"] is not None:
            summary = [{"type": "summary_text", "text": turn["thought"]}]
            yield ResponseReasoningItem(id="rs_1", type="reasoning", summary=summary)
        if turn["refusal"]:
            parts = [{"type": "refusal", "refusal": turn["refusal"]}]
        else:
            parts = [
                {"type": "output_text", "text": text, "annotations": []} for text in turn["texts"]
            ]
        if parts:
            yield ResponseOutputMessage(
                id="msg_1", type="message", role="assistant", status="completed", content=parts
            )
        for call in turn["calls"]:
            yield ResponseFunctionToolCall(
                call_id=call["id"],
                name=call["name"],
                arguments=call["arguments"],
                type="function_call",
            )

    def asked(self, messages, tools, choice):
        fields = {"tools": [{"type": "function", **tool["function"]} for tool in tools]}
        fields |= {"tool_choice": choice} if choice else {}
        answer = self.api.responses.create(
            model=self.model, input=messages, max_output_tokens=MOST_TOKENS, store=False, **fields
        )
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": WEATHER}
            for item in answer.output
            if item.type == "function_call"
        ]
        items = [item.model_dump() if self.form == "dumps" else item for item in answer.output]
        return items + results


def ways(api, model):
    chats = {
        f"chat, {form}": Chat(api, model, form) for form in ("dictionaries", "objects", "dumps")
    }
    return chats | {
        f"responses, {form}": Responses(api, model, form) for form in ("objects", "dumps")
    }


def all_ways():
    return ways(OpenAI(max_retries=0), os.environ["MODEL"])

"""anthropic: plain blocks, the package's own objects, and their dumps."""

import os

from anthropic import Anthropic
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock

from benches.histories.sending import WEATHER, Way
from benches.histories.turns import object_of, text_of

CACHED = {"cache_control": {"type": "ephemeral"}}


def content_of(turn):
    if turn["parts"]:
        blocks = [{"type": "text", "text": text} for text in turn["texts"]]
        return [*blocks[:-1], blocks[-1] | CACHED]
    return text_of(turn)


class Messages(Way):
    def __init__(self, api, model, form):
        self.api, self.model, self.form = api, model, form

    def message(self, turn):
        if turn["role"] in ("system", "developer"):
            return {"role": "system", "content": content_of(turn)}
        if turn["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": turn["call"]["id"]}
            if turn["texts"] != [""]:
                result["content"] = content_of(turn)
            result |= {"is_error": True} if turn["failed"] else {}
            return {"role": "user", "content": [result]}
        if turn["role"] == "user":
            return {"role": "user", "content": content_of(turn)}
        blocks = [TextBlock(type="text", text=text) for text in turn["texts"]]
        if turn["refusal"]:
            blocks = [TextBlock(type="text", text=turn["refusal"])]
        if turn["thought"] is not None:
            thought = turn["thought"]
            blocks.insert(0, ThinkingBlock(type="thinking", thinking=thought, signature="c2ln"))
        for call in turn["calls"]:
            given = object_of(call["arguments"])
            block = ToolUseBlock(type="tool_use", id=call["id"], name=call["name"], input=given)
            blocks.append(block)
        return {"role": "assistant", "content": self._in_form(blocks)}

    def _in_form(self, blocks):
        if self.form == "objects":
            return blocks
        return [block.model_dump(exclude_none=self.form == "dictionaries") for block in blocks]

    def asked(self, messages, tools, choice):
        first = messages[0]
        system = {"system": first["content"]} if first["role"] == "system" else {}
        functions = [tool["function"] for tool in tools]
        offered = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in functions
        ]
        fields = {"tools": offered} if offered else {}
        if choice:
            fields["tool_choice"] = {"type": "any" if choice == "required" else choice}
        answer = self.api.messages.create(
            model=self.model, messages=messages[len(system) :], max_tokens=24, **system, **fields
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": WEATHER}
            for block in answer.content
            if block.type == "tool_use"
        ]
        said = {"role": "assistant", "content": self._in_form(answer.content)}
        return [said, *([{"role": "user", "content": results}] if results else [])]


def ways(api, model):
    return {form: Messages(api, model, form) for form in ("dictionaries", "objects", "dumps")}


def all_ways():
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    return ways(Anthropic(base_url=url, api_key="none", max_retries=0), os.environ["MODEL"])

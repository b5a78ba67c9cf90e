"""litellm: dictionaries with fields of other services, and its own messages."""

import os

import litellm
from litellm import Message

from benches.histories.clients.openai_python import Chat as Plain
from benches.histories.sending import WEATHER, Way

CACHED = {"cache_control": {"type": "ephemeral"}}


class Chat(Way):
    def __init__(self, *, own):
        self.own = own
        self.plain = Plain(None, None, "dictionaries")

    def made(self, turns):
        return [self._message(*pair) for pair in zip(turns, self.plain.made(turns), strict=True)]

    def _message(self, turn, plain):
        if turn["role"] == "tool":
            plain["name"] = turn["call"]["name"]
        if turn["role"] != "assistant":
            if isinstance(plain["content"], list):
                plain["content"][-1] |= CACHED
            return plain
        thought = turn["thought"]
        if thought is not None:
            block = {"type": "thinking", "thinking": thought, "signature": "c2ln"}
            plain["thinking_blocks"] = [block]
        if not self.own:
            return plain
        if isinstance(plain["content"], list):
            plain["content"] = "".join(turn["texts"])
        plain.pop("refusal", None)
        plain.pop("name", None)
        return Message(**plain, provider_specific_fields={"citations": None, "index": 0})

    def asked(self, messages, tools, choice):
        fields = {"tools": tools} if tools else {}
        fields |= {"tool_choice": choice} if choice else {}
        answer = litellm.completion(
            model=f"openai/{os.environ['MODEL']}",
            api_base=os.environ["OPENAI_BASE_URL"],
            messages=messages,
            max_tokens=24,
            max_retries=0,
            **fields,
        )
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": c.id, "name": c.function.name, "content": WEATHER}
            for c in message.tool_calls or ()
        ]
        return [message if self.own else message.model_dump(), *results]


def all_ways():
    return {"dictionaries": Chat(own=False), "messages": Chat(own=True)}

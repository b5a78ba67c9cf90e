"""llama-index: its blocks, over an LLM that is like OpenAI's."""

import os

from llama_index.core.base.llms.types import ThinkingBlock, ToolCallBlock
from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.llms.openai_like import OpenAILike

from benches.histories.sending import WEATHER, Way
from benches.histories.turns import text_of


class Chat(Way):
    def __init__(self):
        self.llm = OpenAILike(
            model=os.environ["MODEL"],
            api_base=os.environ["OPENAI_BASE_URL"],
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            max_tokens=24,
            max_retries=0,
        )

    def message(self, turn):
        role = "system" if turn["role"] == "developer" else turn["role"]
        blocks = [TextBlock(text=text) for text in turn["texts"]]
        if not turn["parts"]:
            blocks = [TextBlock(text=text_of(turn))]
        if role == "tool":
            extra = {"tool_call_id": turn["call"]["id"], "name": turn["call"]["name"]}
            return ChatMessage(role=role, blocks=blocks, additional_kwargs=extra)
        if role == "assistant":
            if turn["refusal"]:
                blocks = [TextBlock(text=turn["refusal"])]
            if turn["thought"] is not None:
                blocks.insert(0, ThinkingBlock(content=turn["thought"]))
            for call in turn["calls"]:
                id_, name, arguments = call["id"], call["name"], call["arguments"]
                blocks.append(
                    ToolCallBlock(tool_call_id=id_, tool_name=name, tool_kwargs=arguments)
                )
        return ChatMessage(role=role, blocks=blocks)

    def asked(self, messages, tools, choice):
        fields = {"tools": tools} if tools else {}
        fields |= {"tool_choice": choice} if choice else {}
        answer = self.llm.chat(messages, **fields).message
        calls = [block for block in answer.blocks if isinstance(block, ToolCallBlock)]
        results = [
            ChatMessage(
                role="tool", content=WEATHER, additional_kwargs={"tool_call_id": c.tool_call_id}
            )
            for c in calls
        ]
        return [answer, *results]


def all_ways():
    return {"chat": Chat()}

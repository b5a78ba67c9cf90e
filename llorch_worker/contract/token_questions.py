"""Questions about a model's tokens, which a worker answers beside its jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llorch_worker.contract.message import MAX_PROMPT_CHARS, Message
from llorch_worker.contract.output_format import Part
from llorch_worker.contract.request import MAX_MESSAGES, GenerationRequest
from llorch_worker.contract.token_ids import MAX_PROMPT_TOKENS, TokenId
from llorch_worker.contract.tools import MAX_TOOLS, Tool


class TokenizeText(Part):
    """The ids of a text, as a job with this ``prompt`` would get them.

    Without ``add_special_tokens``, spellings of control tokens are these tokens, unless
    ``parse_special`` says otherwise.
    """

    ask: Literal["tokenize_text"] = "tokenize_text"
    prompt: str = Field(max_length=MAX_PROMPT_CHARS)
    add_special_tokens: bool = True
    parse_special: bool | None = None
    strings: bool = False
    """Whether to answer each token's text too."""


class TokenizeChat(Part):
    """The ids of a conversation, as a job with these ``messages`` and ``tools`` would get them."""

    ask: Literal["tokenize_chat"] = "tokenize_chat"
    messages: tuple[Message, ...] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: tuple[Tool, ...] = Field((), max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    strings: bool = False

    @classmethod
    def of(cls, chat: GenerationRequest, *, strings: bool = False) -> TokenizeChat:
        """The question for the prompt of a job whose request has messages."""
        return cls(
            messages=chat.messages or (),
            tools=() if chat.tool_choice == "none" else chat.tools,
            chat_template_kwargs=chat.chat_template_kwargs,
            add_generation_prompt=chat.begins_answer,
            continue_final_message=chat.continue_final_message,
            strings=strings,
        )


class Detokenize(Part):
    """The text of ids, with the spellings of control tokens."""

    ask: Literal["detokenize"] = "detokenize"
    tokens: tuple[TokenId, ...] = Field(max_length=MAX_PROMPT_TOKENS)


class DescribeTokenizer(Part):
    """What the tokenizer is."""

    ask: Literal["describe"] = "describe"


TokenQuestion = Annotated[
    TokenizeText | TokenizeChat | Detokenize | DescribeTokenizer, Field(discriminator="ask")
]

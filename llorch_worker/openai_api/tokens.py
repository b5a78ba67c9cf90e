"""vLLM's documents about tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, SkipValidation, model_validator
from pydantic_core import PydanticCustomError

from llorch_worker.contract import InvalidRequest, Tool, describe
from llorch_worker.contract.message import MAX_PROMPT_CHARS
from llorch_worker.contract.request import MAX_MESSAGES
from llorch_worker.contract.token_ids import MAX_PROMPT_TOKENS, TokenId
from llorch_worker.contract.token_questions import Detokenize, TokenizeChat, TokenizeText
from llorch_worker.openai_api.chat import TEMPLATE_FIELDS, tools_of
from llorch_worker.openai_api.chat_message import ChatMessage, turns_of
from llorch_worker.openai_api.shape import WholeBody, generation_request

ModelName = Annotated[str, Field(min_length=1, max_length=200)]


class TokenizeRequest(WholeBody):
    """Exactly one of ``prompt`` and ``messages``.

    A conversation is tokenised as a job would be, by the model's template.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Once upon a time"}]})

    model: ModelName | None = None
    prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: SkipValidation[list[Tool] | None] = None
    add_special_tokens: bool | None = None
    """Whether a prompt gets what the model puts around a text, such as BOS; by default it does."""
    parse_special: bool | None = None
    """Whether spellings of control tokens in a prompt become these tokens; by default they do
    where add_special_tokens is false."""
    return_token_strs: bool = False
    chat_template_kwargs: SkipValidation[dict[str, Any] | None] = None
    add_generation_prompt: SkipValidation[bool | None] = None
    continue_final_message: SkipValidation[bool | None] = None

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "exactly one of prompt and messages must be given")
        return self

    def question(self) -> TokenizeText | TokenizeChat:
        """Raises InvalidRequest for messages that break a rule."""
        if faults := self.refusals():
            raise InvalidRequest.from_faults(faults)
        if self.messages is None:
            if self.tools:
                raise InvalidRequest.from_fault("tools", "need messages", describe(self.tools))
            assert self.prompt is not None
            return TokenizeText(
                prompt=self.prompt,
                add_special_tokens=self.add_special_tokens is not False,
                parse_special=self.parse_special,
                strings=self.return_token_strs,
            )
        if self.add_special_tokens:
            rule = "a chat's template decides that; leave it out with messages"
            raise InvalidRequest.from_fault("add_special_tokens", rule, "true")
        if self.parse_special is not None:
            raise InvalidRequest.from_fault(
                "parse_special", "needs prompt", describe(self.parse_special)
            )
        turns = turns_of(self.messages)
        # The contract has the only copy of the rules for turns and tools.
        fields = {name: getattr(self, name) for name in TEMPLATE_FIELDS}
        fields |= {"messages": turns, "tools": tools_of(self.tools)}
        chat = generation_request(fields, {})
        return TokenizeChat.of(chat, strings=self.return_token_strs)


class DetokenizeRequest(WholeBody):
    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]

    def question(self) -> Detokenize:
        # Checked already.
        return Detokenize.model_construct(tokens=tuple(self.tokens))

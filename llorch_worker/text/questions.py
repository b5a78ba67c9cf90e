"""Answers questions about tokens: in a worker, and wherever else the tokenizer is."""

from __future__ import annotations

from typing import Any

from llorch_worker.contract import Fault, InvalidRequest
from llorch_worker.contract.token_ids import MAX_PROMPT_TOKENS
from llorch_worker.contract.token_questions import (
    DescribeTokenizer,
    Detokenize,
    TokenizeChat,
    TokenizeText,
    TokenQuestion,
)
from llorch_worker.text.chat_templates import ChatOptions
from llorch_worker.text.least_tokens import TooManyTokens
from llorch_worker.text.tokenizer import Tokenizer


def answer(tokenizer: Tokenizer, question: TokenQuestion) -> dict[str, Any]:
    """The answer as plain JSON: ``tokens`` and perhaps ``token_strs``, or ``prompt``, or
    :meth:`Tokenizer.describe`.

    Raises:
        InvalidRequest: ids beyond the vocabulary, turns that the model's chat format refuses, or a
            text of more tokens than a request may have.
    """
    try:
        return _answer(tokenizer, question)
    except TooManyTokens as error:
        rule = f"must be at most {MAX_PROMPT_TOKENS} tokens"
        got = f"at least {error.at_least} tokens"
        raise InvalidRequest.from_fault("prompt", rule, got) from None


def _answer(tokenizer: Tokenizer, question: TokenQuestion) -> dict[str, Any]:
    match question:
        case TokenizeText(prompt=prompt, add_special_tokens=add_special_tokens):
            # Clients that want nothing added write control tokens themselves.
            parse = question.parse_special
            special = not add_special_tokens if parse is None else parse
            ids = tokenizer.encode(prompt, add_special_tokens, special, at_most=MAX_PROMPT_TOKENS)
            return _tokens(tokenizer, ids, strings=question.strings)
        case TokenizeChat(messages=messages, tools=tools):
            options = ChatOptions(
                question.chat_template_kwargs or {},
                question.add_generation_prompt,
                question.continue_final_message,
            )
            ids = tokenizer.encode_chat(messages, tools, at_most=MAX_PROMPT_TOKENS, options=options)
            return _tokens(tokenizer, ids, strings=question.strings)
        case Detokenize(tokens=tokens):
            _check(tokenizer, tokens)
            return {"prompt": tokenizer.decode_whole(tokens)}
        case DescribeTokenizer():
            return tokenizer.describe()


def _tokens(tokenizer: Tokenizer, ids: list[int], *, strings: bool) -> dict[str, Any]:
    if len(ids) > MAX_PROMPT_TOKENS:
        raise TooManyTokens(len(ids))
    texts = [tokenizer.token_text(token_id) for token_id in ids] if strings else None
    return {"tokens": ids, "token_strs": texts}


def _check(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> None:
    size = tokenizer.vocab_size
    beyond = [index for index, token_id in enumerate(tokens) if token_id >= size]
    if beyond:
        raise InvalidRequest.from_faults(
            Fault(field=f"tokens.{index}", rule=f"must be below {size}", got=str(tokens[index]))
            for index in beyond
        )

"""Log probabilities in the shapes of chats and of completions."""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import TypedDict

from llorch_worker.contract import TokenLogprob, TokenLogprobs


class ChatAlternative(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatAlternative):
    top_logprobs: list[ChatAlternative]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]
    refusal: None


def chat_logprobs(tokens: Iterable[TokenLogprobs]) -> ChatLogprobs:
    content: list[ChatToken] = [
        {**_alternative(token), "top_logprobs": [_alternative(each) for each in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _alternative(token: TokenLogprob) -> ChatAlternative:
    own = token.text.encode() if token.bytes is None else token.bytes
    return {"token": token.text, "logprob": token.logprob, "bytes": list(own)}


class CompletionLogprobs(TypedDict):
    """Every list has one entry for each token; a prompt's first token has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def completion_logprobs(
    tokens: Iterable[TokenLogprobs | None], *, first_text: str = "", offset: int = 0
) -> CompletionLogprobs:
    """``first_text``: the text of a prompt's first token. ``offset``: where the first token begins,
    perhaps before the text: SentencePiece puts a space there."""
    document: CompletionLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in tokens:
        text = first_text if token is None else token.text
        document["tokens"].append(text)
        document["token_logprobs"].append(None if token is None else token.logprob)
        document["top_logprobs"].append(None if token is None else _by_text(token))
        document["text_offset"].append(max(0, offset))
        offset += len(text)
    return document


def _by_text(token: TokenLogprobs) -> dict[str, float]:
    """The alternatives and the token itself; of those with the same text, the likeliest."""
    found: dict[str, float] = {}
    for each in (*token.top, token):
        found[each.text] = max(each.logprob, found.get(each.text, each.logprob))
    return found

"""Log probabilities in the shapes of chats and of completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from typing_extensions import TypedDict

from llorch_worker.contract import TokenLogprob, TokenLogprobs
from llorch_worker.openai_api.shape import Label
from llorch_worker.text.thoughts import ALL_TAGS


class ChatAlternative(TypedDict):
    token: Label
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
    return {"token": token.text, "logprob": token.logprob, "bytes": list(_bytes(token))}


def _bytes(token: TokenLogprob) -> bytes:
    return token.text.encode() if token.bytes is None else bytes(token.bytes)


class SentTokens:
    """The tokens of a text that is sent in pieces: their bytes join to it.

    Those of a thought, of the end and of a stop string are left out. One that is sent in part is
    cut to that.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLogprobs] = []
        self._begun: int | None = None
        """Of the first of them, the byte with which the text begins or goes on, if it is sent."""
        self._sent = 0
        """How many bytes of the first are sent."""
        self._behind: tuple[bytes, ...] = ()
        """What the text comes after, if it is still to come."""

    def add(self, tokens: Iterable[TokenLogprobs]) -> None:
        self._waiting += tokens

    def skip(self, thought: str) -> None:
        """``thought`` is sent, which is no part of the text."""
        self.take(thought)
        behind = [tag for tags in ALL_TAGS for tag in (tags.closing, tags.text_opening) if tag]
        self._begun, self._behind = None, tuple(tag.encode() for tag in behind)

    def take(self, text: str) -> list[TokenLogprobs]:
        """The tokens that ``text``, the next piece, completes."""
        if not text or not self._waiting:
            return []
        piece, whole = text.encode(), b"".join(map(_bytes, self._waiting))
        first = self._sent
        for closing in self._behind:
            if closing in whole:
                first = max(first, whole.index(closing) + len(closing))
        self._behind = ()
        begin = whole.find(piece, first)
        if begin < 0:
            # Its characters are not those of the tokens, whose bytes were no UTF-8.
            return self.rest()
        end, at, found, whole_tokens = begin + len(piece), 0, [], 0
        for token in self._waiting:
            length = len(_bytes(token))
            # The part of it that is sent by now.
            part = max(begin - at, 0) if self._begun is None else self._begun, min(end - at, length)
            self._begun, self._sent = None, 0
            if part[1] < length:
                if part[0] < part[1]:
                    self._begun, self._sent = part
                break
            if part[0] < part[1]:
                found.append(_cut(token, *part))
            at += length
            whole_tokens += 1
        del self._waiting[:whole_tokens]
        return found

    def end(self) -> list[TokenLogprobs]:
        """The token that was sent in part, after the last piece."""
        begun, waiting, sent = self._begun, self._waiting, self._sent
        self.rest()
        return [] if begun is None else [_cut(waiting[0], begun, sent)]

    def rest(self) -> list[TokenLogprobs]:
        """All that wait, whether or not they are sent."""
        found, self._waiting = self._waiting, []
        self._begun, self._sent = None, 0
        return found


def _cut(token: TokenLogprobs, begin: int, end: int) -> TokenLogprobs:
    own = _bytes(token)
    if (begin, end) == (0, len(own)):
        return token
    part = own[begin:end]
    text = part.decode(errors="replace")
    given = None if text.encode() == part else tuple(part)
    return token.model_copy(update={"text": text, "bytes": given})


def sent_logprobs(
    tokens: Iterable[TokenLogprobs], thought: str | None, text: str
) -> list[TokenLogprobs]:
    """The ``tokens`` of ``text``, which comes after ``thought``."""
    sent = SentTokens()
    sent.add(tokens)
    if thought:
        sent.skip(thought)
    return [*sent.take(text), *sent.end()]


class PromptToken(TypedDict):
    logprob: float
    rank: int | None
    """From 1, the likeliest; None if it is not among the alternatives."""
    decoded_token: str


def prompt_logprobs(
    tokens: Iterable[TokenLogprobs | None],
) -> list[dict[str, PromptToken] | None]:
    """vLLM's form: for each token of a prompt, it and its alternatives by their ids."""
    return [None if token is None else _by_id(token) for token in tokens]


def _by_id(token: TokenLogprobs) -> dict[str, PromptToken]:
    ranked: list[tuple[int | None, TokenLogprob]] = [(None, token), *enumerate(token.top, 1)]
    return {
        str(each.id): {"logprob": each.logprob, "rank": rank, "decoded_token": each.text}
        for rank, each in ranked
    }


class CompletionLogprobs(TypedDict):
    """Every list has one entry for each token; a prompt's first token has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextOffsets:
    """Where each token begins in a text. A character of several tokens counts with the last."""

    def __init__(self, offset: int = 0) -> None:
        """``offset``: where the first token begins, perhaps before the text: SentencePiece puts a
        space there."""
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, token: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(token))
        return max(0, offset)


def completion_logprobs(
    tokens: Iterable[TokenLogprobs | None], offsets: TextOffsets, *, first_text: str = ""
) -> CompletionLogprobs:
    """``first_text``: the text of a prompt's first token."""
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
        own = first_text.encode() if token is None else _bytes(token)
        document["text_offset"].append(offsets.next(own))
    return document


def _by_text(token: TokenLogprobs) -> dict[str, float]:
    """The alternatives and the token itself; of those with the same text, the likeliest."""
    found: dict[str, float] = {}
    for each in (*token.top, token):
        found[each.text] = max(each.logprob, found.get(each.text, each.logprob))
    return found

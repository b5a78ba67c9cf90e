"""Log probabilities belong to the text that is sent."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from llorch_worker.contract import TokenLogprobs
from llorch_worker.openai_api.logprobs import (
    SentTokens,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    sent_logprobs,
)

WORDS = ("a", " the", "é", "🙂", "\n", "日本", "<", "stop", " ", "</")


def token(own: bytes) -> TokenLogprobs:
    text = own.decode(errors="replace")
    given = None if text.encode() == own else tuple(own)
    return TokenLogprobs(id=1, text=text, logprob=-1.0, bytes=given)


def tokens(data: bytes, chance: random.Random) -> list[TokenLogprobs]:
    """``data``, cut anywhere, also within characters."""
    cuts = sorted(chance.choices(range(len(data) + 1), k=len(data) // 2))
    ends = [0, *cuts, len(data)]
    return [token(data[a:b]) for a, b in pairwise(ends)]


def joined(found: list[TokenLogprobs]) -> bytes:
    return b"".join(bytes(each["bytes"]) for each in chat_logprobs(found)["content"])


@pytest.mark.parametrize("seed", range(200))
def test_the_tokens_of_a_chat_join_to_its_content(seed: int) -> None:
    chance = random.Random(seed)
    thought, text, after = ("".join(chance.choices(WORDS, k=chance.randrange(9))) for _ in "abc")
    thought, text = thought.strip(), f"x{text}"
    before = f"<think>\n{thought}\n</think>\n\n" if thought else " "
    made = tokens((before + text + after).encode(), chance)
    assert joined(sent_logprobs(made, thought, text)).decode() == text
    # The same in a stream, where text may come later than its tokens.
    sent, found, left, seen = SentTokens(), [], text, b""
    for each in made:
        sent.add([each])
        seen += each.text.encode() if each.bytes is None else bytes(each.bytes)
        come = seen.removeprefix(before.encode()).decode(errors="ignore")
        if len(seen) > len(before.encode()):
            if thought:
                sent.skip(thought)
                thought = ""
            ready = len(come) - (len(text) - len(left))
            piece = left[: chance.randrange(max(ready, 0) + 1)]
            found += sent.take(piece)
            left = left[len(piece) :]
    found += [*sent.take(left), *sent.end()]
    assert joined(found).decode() == text


def test_tokens_of_text_that_is_not_theirs_are_kept_as_they_are() -> None:
    made = [token(b"\xff"), token(b"a")]
    assert sent_logprobs(made, None, "�a") == made


def test_offsets_count_the_characters_of_the_text() -> None:
    text = "a🙂é b"
    data = text.encode()
    made = [token(data[:1]), *(token(bytes([each])) for each in data[1:7]), token(b" b")]
    found = completion_logprobs(made, TextOffsets(3))
    assert found["text_offset"] == [3, 4, 4, 4, 4, 5, 5, 6]

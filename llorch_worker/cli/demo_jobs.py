"""The 32 jobs of ``llorch demo``."""

from __future__ import annotations

from typing import Any

from llorch_worker.contract import GenerationRequest

JOBS = 32

_OPENINGS = ("One day", "There was", "A little", "The dragon", "Long ago", "A tiny snail")
_QUESTIONS = (
    "What is a message queue?",
    "Name three animals that live in the sea.",
    "Why do leaves fall in autumn?",
    "What does a lighthouse keeper do?",
    "Write two lines about snow.",
    "How does a bicycle stay upright?",
)
_TEMPERATURES = (0.0, 0.6, 0.9, 1.2)
_LENGTHS_TOKENS = (48, 96, 192, 320)
_ANSWER_TOKENS = (48, 64, 96, 128)


def demo_jobs(*, chats: bool) -> list[GenerationRequest]:
    """32 requests, the same every time: the streamed one, one of each special kind, plain ones.

    ``chats``: for a chat model, which is asked questions.
    """
    chat = {"role": "user", "content": "Tell me a story about a dragon."}
    opening: dict[str, Any] = {"messages": [chat]} if chats else {"prompt": "Once upon a time"}
    streamed = GenerationRequest(
        **opening, max_tokens=220, temperature=0.7, seed=11, priority="high"
    )
    special = [
        # Up to the first full stop.
        GenerationRequest(prompt="The robot", max_tokens=96, temperature=0, stop="."),
        GenerationRequest(prompt="Lily", max_tokens=96, seed=2, stop=("\n", " and ")),
        GenerationRequest(prompt="Every night", max_tokens=96, seed=3, stop="."),
        # Several texts from one prompt.
        GenerationRequest(prompt="The king", max_tokens=40, seed=4, n=4),
        GenerationRequest(prompt="A little", max_tokens=40, seed=5, n=2, temperature=0.8),
        # A chat, through the model's template.
        GenerationRequest(messages=[chat], max_tokens=64, seed=6),
        GenerationRequest(messages=[chat], max_tokens=64, temperature=0),
        # Log probabilities, penalties, narrow sampling, a deadline, other priorities.
        GenerationRequest(prompt="Long ago", max_tokens=32, seed=8, logprobs=3),
        GenerationRequest(prompt="One day", max_tokens=64, seed=9, repetition_penalty=1.2),
        GenerationRequest(prompt="There was", max_tokens=64, seed=10, top_p=0.9, top_k=40),
        GenerationRequest(prompt="It was a", max_tokens=64, seed=11, deadline_s=50),
        GenerationRequest(prompt="Lily", max_tokens=24, seed=12, priority="low"),
    ]
    plain = [
        GenerationRequest(
            **_asked(index, chats),
            temperature=_TEMPERATURES[index // 2 % len(_TEMPERATURES)],
            seed=100 + index,
        )
        for index in range(JOBS - len(special) - 1)
    ]
    return [streamed, *special, *plain]


def _asked(number: int, chats: bool) -> dict[str, Any]:
    if not chats:
        opening = _OPENINGS[number % len(_OPENINGS)]
        return {"prompt": opening, "max_tokens": _LENGTHS_TOKENS[number % len(_LENGTHS_TOKENS)]}
    question = {"role": "user", "content": _QUESTIONS[number % len(_QUESTIONS)]}
    return {"messages": [question], "max_tokens": _ANSWER_TOKENS[number % len(_ANSWER_TOKENS)]}

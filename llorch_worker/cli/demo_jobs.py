"""The jobs of ``llorch demo``: mixed on purpose, the same every time."""

from __future__ import annotations

from llorch_worker.contract import GenerationRequest

JOBS = 32

STREAMED = GenerationRequest(
    prompt="Once upon a time", max_tokens=220, temperature=0.7, seed=11, priority="high"
)
"""The job that is shown token by token."""

_OPENINGS = (
    "Once upon a time",
    "One day",
    "There was",
    "A little",
    "The dragon",
    "Lily",
    "Long ago",
    "The robot",
    "It was a",
    "Every night",
    "A tiny snail",
    "The king",
)
_TEMPERATURES = (0.0, 0.6, 0.9, 1.2)
_LENGTHS_TOKENS = (48, 96, 192, 320)


def demo_jobs() -> list[GenerationRequest]:
    """32 requests: the streamed one, plain ones, and some of every other kind."""
    chat = {"role": "user", "content": "Tell me a story about a dragon."}
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
            prompt=_OPENINGS[index % len(_OPENINGS)],
            max_tokens=_LENGTHS_TOKENS[index % len(_LENGTHS_TOKENS)],
            temperature=_TEMPERATURES[index // 2 % len(_TEMPERATURES)],
            seed=100 + index,
        )
        for index in range(JOBS - len(special) - 1)
    ]
    return [STREAMED, *special, *plain]

"""Requests that are submitted together, the same for every contestant."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

from llorch_worker.contract import GenerationRequest

Bounds: TypeAlias = tuple[int, int]
"""The least and the most tokens."""


@dataclass(frozen=True)
class Load:
    """``jobs`` requests; each length is drawn evenly from its two bounds, both included."""

    jobs: int
    prompt_tokens: Bounds
    new_tokens: Bounds
    seed: int
    temperature: float = 0.0
    """0 is greedy."""

    @classmethod
    def alike(
        cls, jobs: int, prompt_tokens: int, new_tokens: int, seed: int, temperature: float = 0.0
    ) -> Load:
        """A load whose requests have the same lengths."""
        return cls(jobs, (prompt_tokens,) * 2, (new_tokens,) * 2, seed, temperature)

    def requests(self, vocab_size: int) -> list[GenerationRequest]:
        """Random prompts that all differ, so that no prefix cache can help. None ends early."""
        chance = random.Random(self.seed)
        return [
            GenerationRequest(
                prompt_token_ids=[
                    chance.randrange(vocab_size) for _ in range(chance.randint(*self.prompt_tokens))
                ],
                max_tokens=chance.randint(*self.new_tokens),
                ignore_eos=True,
                temperature=self.temperature,
                seed=chance.randrange(2**31),
            )
            for _ in range(self.jobs)
        ]

    @property
    def longest_tokens(self) -> int:
        """The most tokens that a request may hold."""
        return self.prompt_tokens[1] + self.new_tokens[1]


def around(tokens: int) -> Bounds:
    """0.5 to 1.5 times ``tokens``, so that jobs end one by one, as users' jobs do."""
    return max(1, tokens // 2), tokens + tokens // 2

"""Jobs of mixed lengths, the same for every contestant."""

from __future__ import annotations

import random
from dataclasses import dataclass

from llorch_worker.contract import GenerationRequest


@dataclass(frozen=True)
class MixedLoad:
    """``jobs`` jobs; each length is drawn evenly from its two bounds, both included."""

    jobs: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    seed: int

    def requests(self, vocab_size: int) -> list[GenerationRequest]:
        """Greedy jobs of exact lengths; all prompts differ, so that no prefix cache can help."""
        chance = random.Random(self.seed)
        return [
            GenerationRequest(
                prompt_token_ids=[
                    chance.randrange(vocab_size) for _ in range(chance.randint(*self.prompt_tokens))
                ],
                max_tokens=chance.randint(*self.new_tokens),
                ignore_eos=True,
                temperature=0,
                seed=0,
            )
            for _ in range(self.jobs)
        ]

    @property
    def longest_tokens(self) -> int:
        """The most tokens that a job may hold."""
        return self.prompt_tokens[1] + self.new_tokens[1]


def around(tokens: int) -> tuple[int, int]:
    """0.5 to 1.5 times ``tokens``, so that jobs end one by one, as users' jobs do."""
    return max(1, tokens // 2), tokens + tokens // 2

"""Jobs of mixed lengths, the same for whoever runs them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from llorch_worker.contract import GenerationRequest


@dataclass(frozen=True)
class Job:
    """A prompt and how many tokens are to follow it: no more, and no fewer."""

    prompt: tuple[int, ...]
    new_tokens: int

    def request(self) -> GenerationRequest:
        """As our engine and our queue take it: greedy, and no token ends it."""
        return GenerationRequest(
            prompt_token_ids=list(self.prompt),
            max_tokens=self.new_tokens,
            ignore_eos=True,
            temperature=0,
            seed=0,
        )


@dataclass(frozen=True)
class JobLoad:
    """``jobs`` jobs; each length is drawn evenly from its two bounds, both included."""

    jobs: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    seed: int

    def draw(self, vocab_size: int) -> list[Job]:
        """The jobs, all different, so that no cache can know one from another."""
        chance = random.Random(self.seed)
        return [
            Job(
                tuple(
                    chance.randrange(vocab_size) for _ in range(chance.randint(*self.prompt_tokens))
                ),
                chance.randint(*self.new_tokens),
            )
            for _ in range(self.jobs)
        ]

    @property
    def longest_tokens(self) -> int:
        """That a job may hold."""
        return self.prompt_tokens[1] + self.new_tokens[1]


def around(tokens: int) -> tuple[int, int]:
    """Half of ``tokens`` to one and a half times: so jobs end one by one, as users' jobs do."""
    return max(1, tokens // 2), tokens + tokens // 2

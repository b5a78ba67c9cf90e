"""The jobs to send and the strikes, as a function of the seed alone."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benches.battle.ledger import Job

KINDS = SIGKILL, SIGTERM, SIGQUIT, NETWORK = "SIGKILL", "SIGTERM", "SIGQUIT", "network"
KINDS_OF_TEN = (SIGKILL,) * 4 + (SIGTERM,) * 2 + (SIGQUIT,) * 2 + (NETWORK,) * 2
ENGINE = "engine"
MIXED_OF_TEN = (SIGKILL,) * 2 + (ENGINE,) * 4 + (SIGTERM,) + (SIGQUIT,) + (NETWORK,) * 2
"""With engines killed as well as workers."""
ENGINE_FAULTS = ("SIGKILL", "SIGSEGV", "SIGABRT")
NETWORK_FAULTS = ("reset", "blackhole", "hold", "isolate")
SHORTEST_FAULT_S, LONGEST_FAULT_S = 2.0, 8.0
CLIENT, REVOKE, TERMINATE, ELSEWHERE = "client", "revoke", "terminate", "revoke elsewhere"

LONG_SHARE = 0.35
SHORT_TOKENS = 5, 60
LONG_TOKENS = 150, 500


@dataclass(frozen=True)
class Strike:
    """One strike: when (seconds from the start), of what kind, against which worker (0 to 1)."""

    at_s: float
    kind: str
    aim: float
    fault: str = ""
    duration_s: float = 0.0


def strikes(
    seed: int, count: int, total_s: float, kinds_of_ten: Sequence[str] = KINDS_OF_TEN
) -> list[Strike]:
    """``count`` strikes over ``total_s``, each ten of them of these kinds."""
    dice = random.Random(f"strikes {seed}")
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += dice.sample(kinds_of_ten, len(kinds_of_ten))
    found = []
    for number, kind in enumerate(kinds[:count]):
        at_s = (number + dice.random()) * total_s / count
        faults = {NETWORK: NETWORK_FAULTS, ENGINE: ENGINE_FAULTS}.get(kind, ("",))
        fault = faults[0] if len(faults) == 1 else dice.choice(faults)
        lasts = kind == NETWORK and fault != "reset"
        duration_s = dice.uniform(SHORTEST_FAULT_S, LONGEST_FAULT_S) if lasts else 0.0
        found.append(Strike(at_s, kind, dice.random(), fault, duration_s))
    return found


@dataclass(frozen=True)
class Cancel:
    """A cancel, ``after_s`` after its job was sent. ``how``: with our client, or with Celery's
    ``revoke``, of which our workers hear, or only a worker of another application."""

    after_s: float
    how: str


@dataclass(frozen=True)
class Order:
    """One job to send, ``gap_s`` after the previous one."""

    job: Job
    gap_s: float
    watched: bool
    """Whether a reader follows its stream, so that it is flushed often."""
    poison: str = ""
    """A prompt that kills the worker."""
    countdown_s: float = 0.0
    cancel: Cancel | None = None
    ours: dict[str, str] | None = None
    """What only our client sends beside it; None if a stock producer sends it."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return {
            "prompt": self.poison or f"battle {self.job.seed}",
            "max_tokens": self.job.tokens,
            "seed": self.job.seed,
            **(self.ours or {}),
        }


def orders(seed: int, rate_per_s: float) -> Iterator[Order]:
    """Endless short and long jobs, at random intervals with a mean of ``1 / rate_per_s``."""
    dice = random.Random(f"orders {seed}")
    number = 0
    while True:
        number += 1
        job_id = str(uuid.UUID(int=dice.getrandbits(128), version=4))
        bounds = LONG_TOKENS if dice.random() < LONG_SHARE else SHORT_TOKENS
        yield Order(
            Job(job_id, seed=number, tokens=dice.randint(*bounds)),
            gap_s=dice.expovariate(rate_per_s),
            watched=dice.random() < 0.25,
        )

"""What a contestant is given, does and answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

LLORCH = "llorch"
LLAMA_CPP = "llama.cpp"
TRANSFORMERS = "transformers"
TRANSFORMERS_CB = "transformers-cb"

BatchKind = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Terms:
    """What every contestant is loaded with."""

    model: Path
    dtype: str
    """That of whoever computes in torch; llama.cpp computes as the file is."""
    threads: int
    most_sequences: int
    context_tokens: int
    """The most that a sequence will hold."""
    prefill_tokens: int
    """The most that a prefill will hold; it goes through in one step."""


@dataclass(frozen=True)
class Work:
    """One pass. ``prefill``: from the prompts to the first token of each. ``decode``: the steps
    from then on, in which all sequences decode."""

    kind: BatchKind
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, all prompts of one length and no two the same."""
    new_tokens: int
    seed: int
    """What the prompts were drawn with."""

    @property
    def sequences(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt."""
        return len(self.prompts[0])


@dataclass(frozen=True)
class Ready:
    """It is loaded and has warmed up nothing yet."""

    versions: dict[str, str]
    note: str
    """How it was set up, where there was a choice; may be empty."""


@dataclass(frozen=True)
class Rate:
    """What a pass gave. ``note``: a choice that was made in its warm-up."""

    tokens_per_s: float
    note: str = ""


class CannotRun(Exception):
    """The contestant cannot take part, or cannot do this; the message says why."""


@dataclass(frozen=True)
class Failed:
    """It cannot do this, in one sentence."""

    reason: str


class Contestant(Protocol):
    """Loaded by its constructor from :class:`Terms`."""

    ready: Ready

    def warm_up(self, work: Work) -> None:
        """Meets the shapes of ``work``; where there is a choice of settings, makes it."""

    def run(self, work: Work) -> Rate:
        """One timed pass."""

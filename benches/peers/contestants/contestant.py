"""A contestant's interface and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from llorch_worker.engine_options import KvDtype

LLORCH = "llorch"
LLAMA_CPP = "llama.cpp"
TRANSFORMERS = "transformers"

BatchKind = Literal["prefill", "decode"]
WARM_UP_TOKENS = 2
"""The first token of a sequence comes from a prefill, the second one from a decode."""


@dataclass(frozen=True)
class Terms:
    """The parameters with which every contestant is loaded."""

    model: Path
    dtype: str
    """The dtype of contestants that use torch; llama.cpp uses the file's own types."""
    threads: int
    most_sequences: int
    context_tokens: int
    """The most tokens that a sequence will hold."""
    prefill_tokens: int
    """The most tokens of one step of a prefill."""
    kv_dtype: KvDtype = "auto"
    """How the KV cache keeps numbers; auto: f16 in llama.cpp, ``dtype`` elsewhere."""


@dataclass(frozen=True)
class Work:
    """One pass. ``prefill``: from the prompts to the first token of each. ``decode``: the steps
    from then on, in which all sequences decode."""

    kind: BatchKind
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of the prompts, which have equal lengths and all differ."""
    new_tokens: int
    seed: int
    """The seed from which the prompts were drawn."""

    @property
    def sequences(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return len(self.prompts[0])

    @property
    def warm_up_tokens(self) -> int:
        """As few new tokens as run both shapes."""
        return min(WARM_UP_TOKENS, self.new_tokens)


@dataclass(frozen=True)
class Ready:
    """The contestant is loaded but not warmed up."""

    versions: dict[str, str]
    note: str
    """The settings chosen for it; may be empty."""


@dataclass(frozen=True)
class Rate:
    """The result of a pass. ``note``: a setting that its warm-up chose."""

    tokens_per_s: float
    note: str = ""


def rate(work: Work, began_s: float, times_s: Sequence[Sequence[float]]) -> Rate:
    """The rate of ``work``, which began at ``began_s``; ``times_s`` has the times of each
    sequence's tokens, in seconds of the same clock."""
    if [len(each) for each in times_s] != [work.new_tokens] * work.sequences:
        raise RuntimeError("it did not generate as many tokens as it was asked for")
    firsts_s = [each[0] for each in times_s]
    if work.kind == "prefill":
        return Rate(work.sequences * work.prompt_tokens / (max(firsts_s) - began_s))
    # The span in which all decode: from the latest first token to the earliest last token.
    from_s, to_s = max(firsts_s), min(each[-1] for each in times_s)
    tokens = sum(from_s < at <= to_s for each in times_s for at in each)
    if not tokens:
        raise RuntimeError("at no time all sequences decode; raise --new-tokens")
    return Rate(tokens / (to_s - from_s))


class CannotRun(Exception):
    """The contestant cannot take part or cannot do this work; the message says why."""


class Contestant(Protocol):
    """A contestant; its constructor loads it from :class:`Terms`."""

    ready: Ready

    def warm_up(self, work: Work) -> None:
        """Runs the shapes of ``work`` once, and chooses settings if there are several."""

    def run(self, work: Work) -> Rate:
        """Runs one timed pass."""

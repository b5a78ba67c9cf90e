"""The document and the table of ``python -m benches.peers``: ours beside a peer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, Self

from rich.console import RenderableType

from benches.peers.contestants.contestant import BatchKind, Memory
from llorch_worker.bench.instruments.percentiles import spread_of
from llorch_worker.bench.instruments.provenance import Figures, Frozen
from llorch_worker.bench.tables import remark, table, title
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.settings import KvDtype

WIDE_SPREAD = 0.25
WIDE_MARK = "*"


class Side(Frozen):
    """The figures of one side, ours or the peer's."""

    tokens_per_s: float
    """Median over the passes."""
    spread: float | None
    """Largest minus smallest of the passes, as a share of the median; None for one pass."""
    note: str = ""

    @classmethod
    def of(cls, tokens_per_s: Sequence[float], note: str = "") -> Self:
        """``tokens_per_s`` of each pass."""
        return cls(tokens_per_s=median(tokens_per_s), spread=spread_of(tokens_per_s), note=note)


class BatchRow(Frozen):
    """A prefill, or the decoding of this many sequences."""

    kind: BatchKind
    peer: str
    sequences: int
    prompt_tokens: int
    passes: int
    """Those that both sides finished."""
    ours: Side
    theirs: Side
    ratio: float
    """Our tokens per second divided by the peer's: median over the pairs of passes."""


class JobsRow(Frozen):
    """Jobs of mixed lengths, all submitted at once; only generated tokens count."""

    kind: Literal["jobs"] = "jobs"
    peer: str
    jobs: int
    passes: int
    ours: Side
    theirs: Side
    our_jobs_per_s: float
    their_jobs_per_s: float
    ratio: float


class Skipped(Frozen):
    """Something that was not measured, and why."""

    kind: Literal["skipped"] = "skipped"
    peer: str
    what: str
    reason: str


class PeersFigures(Figures):
    """The document of ``python -m benches.peers --json``."""

    model: Path
    file_types: tuple[str, ...]
    dtype: str
    kv_dtype: KvDtype
    threads: int
    prefill_tokens: int
    prompt_tokens: int
    new_tokens: int
    passes: int
    job_prompt_tokens: tuple[int, int]
    job_new_tokens: tuple[int, int]
    slots: int
    versions: dict[str, str]
    notes: dict[str, str]
    """The settings of each peer."""
    memory: dict[str, Memory]
    """Of each process that ran prefills and decodes, after its last pass."""
    rows: tuple[BatchRow | JobsRow | Skipped, ...]
    interrupted: bool
    """Rows are missing."""

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"{self.model.name}  ({', '.join(self.file_types)})")
        if self.versions:
            yield "  " + ", ".join(f"{name} {version}" for name, version in self.versions.items())
        for name, note in self.notes.items():
            yield f"  {name}: {note}{_memory(self.memory.get(name))}"
        passes = "of one pass"
        if self.passes > 1:
            passes = f"medians of {self.passes} passes, which alternate (spread)"
        yield (
            f"  tokens/s, {passes}; decodes of {self.new_tokens} steps after "
            f"{counted(self.prompt_tokens, 'token')}\n"
        )
        measured = [row for row in self.rows if row.kind != "skipped"]
        if measured:
            rows = [
                (
                    _what(row),
                    row.peer,
                    # The line above has the others' number.
                    row.passes if row.passes != self.passes else None,
                    _rate(row.ours),
                    _rate(row.theirs),
                    # A place for the mark on every line keeps the figures in their column.
                    f"{row.ratio:.2f}{WIDE_MARK if _is_wide(row) else ' '}",
                )
                for row in measured
            ]
            titles = ("", "peer", "passes", "llorch", "peer's", "llorch/peer")
            yield table([(each, "") for each in titles], rows, words=2)
        if any(map(_is_wide, measured)):
            yield f"{WIDE_MARK} passes spread by more than {WIDE_SPREAD:.0%}: a rough ratio"
        for row in self.rows:
            if row.kind == "skipped":
                yield remark(f"{row.peer}, {row.what}: skipped: {row.reason}")
        if self.interrupted:
            yield remark("interrupted: passes or rows are missing")


def _what(row: BatchRow | JobsRow) -> str:
    if row.kind == "jobs":
        return counted(row.jobs, "job")
    return f"prefill {row.prompt_tokens}" if row.kind == "prefill" else f"decode x{row.sequences}"


def _memory(memory: Memory | None) -> str:
    if memory is None:
        return ""
    peak = "" if memory.peak_bytes is None else f", {human_bytes(memory.peak_bytes)} at most"
    return f"; {human_bytes(memory.resident_bytes)} resident{peak}"


def _rate(side: Side) -> str:
    spread = "" if side.spread is None else f" ({side.spread:.0%})"
    return f"{side.tokens_per_s:,.1f}{spread}"


def _is_wide(row: BatchRow | JobsRow) -> bool:
    return max(row.ours.spread or 0, row.theirs.spread or 0) > WIDE_SPREAD

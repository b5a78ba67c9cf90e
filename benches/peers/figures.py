"""The document and the table of ``python -m benches.peers``: ours beside a peer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, Self

from rich.console import RenderableType

from benches.peers.contestants.contestant import BatchKind, Rate
from llorch_worker.bench.instruments.client_load import Throughput
from llorch_worker.bench.instruments.percentiles import spread_of
from llorch_worker.bench.instruments.provenance import Figures, Frozen
from llorch_worker.bench.load import Load
from llorch_worker.bench.tables import remark, table, title
from llorch_worker.contract.quantities import counted
from llorch_worker.engine_options import KvDtype

WIDE_SPREAD = 0.25
WIDE_MARK = "*"
Kind = BatchKind | Literal["jobs"]


@dataclass(frozen=True)
class Wanted:
    """The peers and the loads."""

    peers: tuple[str, ...]
    batches: tuple[int, ...]
    prefill_tokens: int
    prompt_tokens: int
    new_tokens: int
    jobs: Load
    slots: int
    threads: int
    llama_server: Path | None


class Side(Frozen):
    """The figures of one side, ours or the peer's: medians over the passes."""

    tokens_per_s: float
    """Of jobs: only generated tokens count."""
    spread: float | None
    """Largest minus smallest of the passes, as a share of the median; None for one pass."""
    jobs_per_s: float | None = None
    note: str = ""

    @classmethod
    def of(cls, passes: Sequence[Rate | Throughput]) -> Self:
        tokens_per_s = [each.tokens_per_s for each in passes]
        jobs_per_s = [each.jobs_per_s for each in passes if isinstance(each, Throughput)]
        return cls(
            tokens_per_s=median(tokens_per_s),
            spread=spread_of(tokens_per_s),
            jobs_per_s=median(jobs_per_s) if jobs_per_s else None,
            note=passes[0].note if isinstance(passes[0], Rate) else "",
        )


class Row(Frozen):
    """A prefill, the decoding of this many sequences, or jobs of mixed lengths at once."""

    kind: Kind
    peer: str
    count: int
    """Sequences, or jobs."""
    prompt_tokens: int | None
    """Of each sequence; None for jobs."""
    passes: int
    """Those that both sides finished."""
    ours: Side
    theirs: Side
    ratio: float
    """Our tokens per second divided by the peer's: median over the pairs of passes."""

    @property
    def what(self) -> str:
        if self.kind == "jobs":
            return counted(self.count, "job")
        return (
            f"prefill {self.prompt_tokens}" if self.kind == "prefill" else f"decode x{self.count}"
        )

    @property
    def is_wide(self) -> bool:
        return max(self.ours.spread or 0, self.theirs.spread or 0) > WIDE_SPREAD


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
    wanted: Wanted
    passes: int
    versions: dict[str, str]
    notes: dict[str, str]
    """The settings of each peer."""
    rows: tuple[Row | Skipped, ...]
    interrupted: bool
    """Rows are missing."""

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"{self.model.name}  ({', '.join(self.file_types)})")
        if self.versions:
            yield "  " + ", ".join(f"{name} {version}" for name, version in self.versions.items())
        for name, note in self.notes.items():
            yield f"  {name}: {note}"
        passes = "of one pass"
        if self.passes > 1:
            passes = f"medians of {self.passes} passes, which alternate (spread)"
        yield (
            f"  tokens/s, {passes}; decodes of {self.wanted.new_tokens} steps after "
            f"{counted(self.wanted.prompt_tokens, 'token')}\n"
        )
        measured = [row for row in self.rows if isinstance(row, Row)]
        if measured:
            rows = [
                (
                    *(row.what, row.peer),
                    # The line above has the others' number.
                    row.passes if row.passes != self.passes else None,
                    *(_rate(row.ours), _rate(row.theirs)),
                    # A place for the mark on every line keeps the figures in their column.
                    f"{row.ratio:.2f}{WIDE_MARK if row.is_wide else ' '}",
                )
                for row in measured
            ]
            titles = ("", "peer", "passes", "llorch", "peer's", "llorch/peer")
            yield table([(each, "") for each in titles], rows, words=2)
        if any(row.is_wide for row in measured):
            yield f"{WIDE_MARK} passes spread by more than {WIDE_SPREAD:.0%}: a rough ratio"
        for row in self.rows:
            if isinstance(row, Skipped):
                yield remark(f"{row.peer}, {row.what}: skipped: {row.reason}")
        if self.interrupted:
            yield remark("interrupted: passes or rows are missing")


def _rate(side: Side) -> str:
    spread = "" if side.spread is None else f" ({side.spread:.0%})"
    return f"{side.tokens_per_s:,.1f}{spread}"

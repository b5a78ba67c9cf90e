"""The document and the table of ``llorch bench engine``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import RenderableType

from llorch_worker.bench.instruments.ceilings import Ceilings
from llorch_worker.bench.instruments.percentiles import Percentiles
from llorch_worker.bench.instruments.provenance import Figures, Frozen
from llorch_worker.bench.tables import Cell, median_of, remark, shown, table, title
from llorch_worker.contract.quantities import counted, human_bytes


class Row(Frozen):
    """The figures for one concurrency. Rates are medians over the passes; percentiles cover all
    passes together. A figure that could not be measured is None, and ``notes`` says why."""

    concurrency: int
    warm_up_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    total_tokens_per_s: float
    """Prompt and generated tokens, from the start to the last token."""
    total_spread: float | None
    """Largest minus smallest total of the passes, as a share of the median; None for one pass."""
    first_token_ms: Percentiles
    """All requests arrive at once, so each waits for its neighbours' prefill."""
    between_tokens_ms: Percentiles | None
    decode_read_bytes_per_s: float | None
    decode_read_share: float | None
    prefill_flops_per_s: float
    prefill_flops_share: float | None
    outside_model_share: float | None
    """The share of a decode step in which no forward pass runs."""
    kv_peak_bytes: int
    kv_peak_share: float
    """Share of all KV blocks."""
    preemptions: int
    notes: tuple[str, ...]


class EngineFigures(Figures):
    """The document of ``llorch bench engine --json``."""

    model: Path
    file_types: tuple[str, ...]
    file_bytes: int
    parameters: int
    device: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    temperature: float
    passes: int
    load_s: float
    ceilings: Ceilings
    weight_bytes: int
    kv_bytes: int
    rows: tuple[Row, ...]
    peak_memory_bytes: int | None
    """Peak resident memory of this process over all rows; None if the system does not report it."""
    peak_device_memory_bytes: int | None
    """Peak memory that torch allocated on the card."""

    def parts(self) -> Iterator[RenderableType]:
        kinds = ", ".join(self.file_types)
        greedy = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        yield title(f"{self.model}  ({kinds}; {self.parameters:,} parameters)")
        yield (
            f"  computed in {self.dtype} on {self.device}; weights "
            f"{human_bytes(self.weight_bytes)}, loaded in {self.load_s:.1f} s\n"
            f"  prompts of {counted(self.prompt_tokens, 'token')}, "
            f"{counted(self.new_tokens, 'new one')} each, {greedy}; "
            f"{median_of(self.passes)} after a warm-up\n"
        )
        rows = self.rows
        lines = [(label, *(shown(cell(row), form) for row in rows)) for label, form, cell in _LINES]
        yield table(
            [("sequences", ""), *((str(row.concurrency), "") for row in rows)],
            [line for line in lines if any(cell is not None for cell in line[1:])],
        )
        for row in rows:
            for note in row.notes:
                yield remark(f"{counted(row.concurrency, 'sequence')}: {note}")
        yield ""
        yield from self._limits()

    def _limits(self) -> Iterator[str]:
        ceilings = self.ceilings
        size = human_bytes(ceilings.read_array_bytes)
        yield f"  reads {ceilings.read_bytes_per_s / 1e9:.1f} GB/s (an array of {size})"
        shape = " x ".join(f"{size:,}" for size in ceilings.gemm_shape)
        rate = f"{ceilings.flops_per_s / 1e9:,.1f} GFLOP/s"
        yield f"  computes {rate} ({ceilings.gemm_dtype}, {shape})"
        if self.peak_memory_bytes is not None:
            yield f"  peak memory of this process {human_bytes(self.peak_memory_bytes)}"
        if self.peak_device_memory_bytes is not None:
            yield f"  peak memory on the card {human_bytes(self.peak_device_memory_bytes)}"


def _giga(per_s: float | None) -> float | None:
    return None if per_s is None else per_s / 1e9


def _between(row: Row, which: str) -> float | None:
    return getattr(row.between_tokens_ms, which, None)


_LINES: tuple[tuple[str, str, Callable[[Row], Cell]], ...] = (
    ("prefill, tokens/s", ",.1f", lambda row: row.prefill_tokens_per_s),
    ("decode, tokens/s", ",.1f", lambda row: row.decode_tokens_per_s),
    ("total, tokens/s", ",.1f", lambda row: row.total_tokens_per_s),
    ("  spread of passes", ".1%", lambda row: row.total_spread),
    ("first token p50, ms", ",.2f", lambda row: row.first_token_ms.p50),
    ("  p95", ",.2f", lambda row: row.first_token_ms.p95),
    ("  p99", ",.2f", lambda row: row.first_token_ms.p99),
    ("between tokens p50, ms", ",.2f", lambda row: _between(row, "p50")),
    ("  p95", ",.2f", lambda row: _between(row, "p95")),
    ("  p99", ",.2f", lambda row: _between(row, "p99")),
    ("decode reads, GB/s", ",.2f", lambda row: _giga(row.decode_read_bytes_per_s)),
    ("  of the machine's", ".1%", lambda row: row.decode_read_share),
    ("prefill computes, GFLOP/s", ",.2f", lambda row: _giga(row.prefill_flops_per_s)),
    ("  of the machine's", ".1%", lambda row: row.prefill_flops_share),
    ("decode step outside the model", ".1%", lambda row: row.outside_model_share),
    ("KV cache at its fullest", "", lambda row: human_bytes(row.kv_peak_bytes)),
    ("warm-up, s", ".2f", lambda row: row.warm_up_s),
)

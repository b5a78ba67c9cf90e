"""Decode steps recorded once and replayed, so that the host launches one graph per step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

import torch

from llorch_worker.cache import DecodeBuffers, Places, UnifiedCache
from llorch_worker.kernels import Ops
from llorch_worker.model import ForwardModel, RaggedBatch


def bucket_sizes(max_sequences: int) -> list[int]:
    """The recorded batch sizes: 1, 2, 4, 8, then multiples of 8, above 256 multiples of 32, and
    ``max_sequences``."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_sequences, 32)]
    return [*(size for size in sizes if size < max_sequences), max_sequences]


def records_decode(device: torch.device, ops: Ops) -> bool:
    """Whether decode steps of ``ops`` on ``device`` can be recorded."""
    return device.type == "cuda" and ops.recordable


_OF_THIS_THREAD = "thread_local"
"""Other engines of the process may run while one records."""


class Recorder(Protocol):
    """Records the device work that a function launches."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs ``run`` at least once. The returned function repeats its work on the device, with
        the same host values and the current contents of the memory that it used."""

    def record_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        """As :meth:`record`, in pieces: where ``run`` calls its argument, one ends and another
        begins."""

    def begin_anew(self) -> None:
        """Shares no memory with what was recorded before."""


class CudaRecorder:
    """Records CUDA graphs, which share one memory pool for temporaries because they never overlap.

    It uses one stream, because cuBLAS keeps a workspace for every stream it ever ran on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def begin_anew(self) -> None:
        """See ``Recorder``."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See ``Recorder``."""
        with torch.cuda.device(self._device):
            # One run before the recording lets kernels compile and libraries allocate.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode=_OF_THIS_THREAD
            ):
                run()
            return graph.replay

    def record_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        """See ``Recorder``."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode=_OF_THIS_THREAD)

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            # Not by torch's context, which collects garbage before each recording.
            with torch.cuda.stream(self._stream):
                run(lambda: None)
                torch.cuda.synchronize()
                begin()
                run(cut)
                graphs[-1].capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
        return [graph.replay for graph in graphs]


class DecodeGraphs:
    """A model that replays decode steps, and leaves all other steps to another.

    A step of n sequences takes the smallest recorded size that is at least n. The rows beyond n
    are blank (see ``DecodeBuffers``) and cost a context of one token each.
    """

    def __init__(
        self,
        model: ForwardModel,
        cache: UnifiedCache,
        recorder: Recorder,
        sizes: Items[int] | None = None,
        *,
        others: ForwardModel | None = None,
    ) -> None:
        """Records every size, or these; ``cache`` must be allocated with ``decode_rows``.
        ``others`` computes other steps; None: ``model`` does."""
        if cache.decode is None:
            raise ValueError("the cache has no buffers for recorded steps")
        self._model = model
        self._others = model if others is None else others
        self._cache = cache
        self._buffers: DecodeBuffers = cache.decode
        self._filled = 0
        self._sizes = bucket_sizes(self._buffers.rows) if sizes is None else sizes
        self._replays: dict[int, Callable[[], None]] = {}
        with torch.inference_mode():
            # Largest first, so that the others reuse its memory from the pool.
            for size in reversed(self._sizes):
                self._replays[size] = recorder.record(partial(self._step, self._batch(size)))

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """See ``ForwardModel``; the logits are valid until the next step."""
        count = len(batch.query_lengths)
        decodes = len(batch.token_ids) == len(batch.logits_rows) == count
        if cache is not self._cache or not decodes or count > self._sizes[-1]:
            return self._others.forward(batch, cache)
        self._fill(batch, count)
        self._replays[self._sizes[bisect_left(self._sizes, count)]]()
        return self._buffers.logits[:count]

    def _batch(self, size: int) -> RaggedBatch:
        """The first ``size`` rows of the buffers."""
        buffers = self._buffers
        return RaggedBatch(
            token_ids=buffers.token_ids[:size],
            positions=buffers.positions[:size],
            query_lengths=(1,) * size,
            context_lengths=(self._cache.max_context,) * size,
            places=tuple(Places(tables[:size], slots[:size]) for tables, slots in buffers.places),
            logits_rows=buffers.logits_rows[:size],
            device_contexts=buffers.contexts[:size],
        )

    def _step(self, batch: RaggedBatch) -> None:
        logits = self._model.forward(batch, self._cache)
        self._buffers.logits[: len(logits)].copy_(logits)

    def _fill(self, batch: RaggedBatch, count: int) -> None:
        buffers = self._buffers
        buffers.token_ids[:count].copy_(batch.token_ids)
        buffers.positions[:count].copy_(batch.positions)
        torch.add(batch.positions, 1, out=buffers.contexts[:count])
        for kept, new in zip(buffers.places, batch.places, strict=True):
            kept.slots[:count].copy_(new.slots)
            # Table columns beyond either width lie after every context and are not read.
            tables = new.block_tables[:, : kept.block_tables.shape[1]]
            kept.block_tables[:count, : tables.shape[1]].copy_(tables)
        if count < self._filled:
            buffers.blank(count, self._filled)
        self._filled = count

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from llorch_worker.engine.runner import Runner, pack, unpack, upload
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import Chunk
from llorch_worker.model import RaggedBatch

CPU = torch.device("cpu")


@pytest.fixture
def batches_of(loaded: Any) -> Callable[..., list[RaggedBatch]]:
    """The batches that a runner makes of lists of chunks, one after the other."""

    def batches(*steps: list[Chunk]) -> list[RaggedBatch]:
        noted: list[RaggedBatch] = []

        class Noting:
            def forward(self, batch: RaggedBatch, cache: Any) -> torch.Tensor:
                noted.append(batch)
                return torch.zeros(len(batch.logits_rows), 32)

        runner = Runner(Noting(), loaded.cache(num_blocks=8), Sampler(32, CPU), CPU)
        for chunks in steps:
            runner.launch(chunks).read()
        return noted

    return batches


def held(sequence: Sequence, blocks: list[int], computed: int) -> Sequence:
    sequence.blocks, sequence.computed = array("q", blocks), computed
    return sequence


def test_a_mixed_step_is_laid_out_in_one_row(
    make_sequence: Callable[..., Sequence], batches_of: Callable[..., list[RaggedBatch]]
) -> None:
    decoding = held(make_sequence([5] * 17, [6]), [3, 1], 17)
    middle = held(make_sequence(list(range(40))), [7, 2, 5], 14)
    ending = held(make_sequence([8, 9]), [0], 0)
    (batch,) = batches_of([Chunk(decoding, 17, 1), Chunk(middle, 14, 4), Chunk(ending, 0, 2)])
    assert batch.token_ids.tolist() == [6, 14, 15, 16, 17, 8, 9]
    assert batch.positions.tolist() == [17, 14, 15, 16, 17, 0, 1]
    assert batch.query_lengths == (1, 4, 2)
    assert batch.context_lengths == (18, 18, 2)
    assert batch.block_tables.tolist() == [[3, 1, 0, 0], [7, 2, 5, 0], [0, 0, 0, 0]]
    assert batch.slots.tolist() == [17, 126, 127, 32, 33, 0, 1]
    assert batch.logits_rows.tolist() == [0, 6]  # ``middle`` has more prompt to come


def test_sequences_with_one_new_token_come_first(
    make_sequence: Callable[..., Sequence], batches_of: Callable[..., list[RaggedBatch]]
) -> None:
    """So attention's decode path takes a slice of the block tables, without an index to upload."""
    prefilling = held(make_sequence([8, 9]), [0], 0)
    decoding = held(make_sequence([5] * 3, [6]), [3], 3)
    (batch,) = batches_of([Chunk(prefilling, 0, 2), Chunk(decoding, 3, 1)])
    assert batch.query_lengths == (1, 2)
    assert batch.token_ids.tolist() == [6, 8, 9]
    assert batch.block_tables[:, 0].tolist() == [3, 0]


def test_a_step_of_decodes_is_one_token_each(
    make_sequence: Callable[..., Sequence], batches_of: Callable[..., list[RaggedBatch]]
) -> None:
    first = held(make_sequence([5] * 3, [6]), [3], 3)
    second = held(make_sequence([7] * 16, [9]), [4, 6], 16)
    (batch,) = batches_of([Chunk(first, 3, 1), Chunk(second, 16, 1)])
    assert batch.token_ids.tolist() == [6, 9]
    assert batch.positions.tolist() == [3, 16]
    assert batch.slots.tolist() == [51, 96]
    assert batch.logits_rows.tolist() == [0, 1]
    assert all(
        tensor.dtype == torch.int64
        for tensor in (batch.token_ids, batch.positions, batch.slots, batch.logits_rows)
    )


ARRAYS = [
    np.arange(5),
    np.zeros(0, np.int64),
    np.arange(6).reshape(2, 3) - 3,
    np.array([2**40]),
    np.arange(8).reshape(2, 4)[:, :3],
]


def test_packed_arrays_are_aligned_and_unpack_unchanged() -> None:
    whole = pack(ARRAYS, pinned=False)
    views = unpack(whole, ARRAYS)
    for view, numbers in zip(views, ARRAYS, strict=True):
        assert torch.equal(view, torch.from_numpy(numbers.copy()))
        assert (view.data_ptr() - whole.data_ptr()) % 16 == 0 or not view.numel()


def test_an_upload_to_the_cpu_copies_nothing() -> None:
    array = np.arange(4)
    (tensor,) = upload([array], torch.device("cpu"))
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]


def test_an_upload_keeps_shapes_and_dtype() -> None:
    tensors = upload(ARRAYS, torch.device("meta"))
    assert [tuple(t.shape) for t in tensors] == [a.shape for a in ARRAYS]
    assert {t.dtype for t in tensors} == {torch.int64}

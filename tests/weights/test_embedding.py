"""Embeddings that keep a file's blocks, against the same embedding dequantised at load."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.weights import DenseEmbedding, FusedWeight, Part, embedding_bytes, load_embedding
from llorch_worker.weights.embedding import SMALL_EMBEDDING_BYTES, StoredEmbedding
from llorch_worker.weights.groups import group_form
from tests.weights.quantised import QUANTISED, random_rows

CPU = torch.device("cpu")
HIDDEN = 512
LARGE = SMALL_EMBEDDING_BYTES // torch.bfloat16.itemsize // HIDDEN + 1
"""Rows of the smallest embedding that keeps its blocks."""


def weight(rows: int) -> FusedWeight:
    return FusedWeight((Part("w", (rows, HIDDEN)),))


def loaded(checkpoint, rows: int, *, as_stored: bool):
    options = {"as_stored": as_stored}
    embedding = load_embedding(checkpoint, weight(rows), torch.bfloat16, CPU, **options)
    assert embedding.nbytes == embedding_bytes(checkpoint, weight(rows), torch.bfloat16, **options)
    return embedding


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_stored_rows_have_the_bits_of_a_dense_embedding(type_, weight_file) -> None:
    raw = random_rows(type_, LARGE, HIDDEN)
    checkpoint = weight_file(w=(raw, type_))
    stored = loaded(checkpoint, LARGE, as_stored=True)
    dense = loaded(checkpoint, LARGE, as_stored=False)

    assert isinstance(stored, StoredEmbedding)
    assert stored.nbytes == raw.nbytes
    assert stored.dtype == dense.dtype == torch.bfloat16
    torch.manual_seed(0)
    for ids in (torch.tensor([LARGE - 1]), torch.tensor([7, 0, 7]), torch.randint(LARGE, (600,))):
        assert torch.equal(stored(ids), dense(ids))


@pytest.mark.parametrize("as_stored", [True, False])
@pytest.mark.parametrize("type_", QUANTISED, ids=lambda type_: type_.name)
def test_scales_that_are_no_finite_numbers_are_refused(type_, as_stored, weight_file) -> None:
    for at in group_form(type_).halves:
        raw = random_rows(type_, LARGE, HIDDEN)
        raw[LARGE - 1, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
        checkpoint = weight_file(w=(raw, type_))
        with pytest.raises(ModelLoadFailed, match="tensor w has weights that are out of range"):
            loaded(checkpoint, LARGE, as_stored=as_stored)


def test_a_small_embedding_is_dense(weight_file) -> None:
    type_ = GGMLQuantizationType.Q8_0
    checkpoint = weight_file(w=(random_rows(type_, LARGE - 1, HIDDEN), type_))
    assert isinstance(loaded(checkpoint, LARGE - 1, as_stored=True), DenseEmbedding)


def test_an_embedding_without_scaled_integers_is_dense(weight_file) -> None:
    raw = np.zeros((LARGE, HIDDEN * 2), np.uint8)
    checkpoint = weight_file(w=(raw, GGMLQuantizationType.BF16))
    assert isinstance(loaded(checkpoint, LARGE, as_stored=True), DenseEmbedding)

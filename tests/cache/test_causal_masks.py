from __future__ import annotations

import pytest
import torch

from llorch_worker.cache import CausalMasks

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_query", [1, 5, 12])
def test_each_view_is_the_causal_mask_of_its_size(max_query: int) -> None:
    masks = CausalMasks(max_query=max_query, max_context=12, device=CPU)
    for context in range(1, 13):
        for query in range(1, min(context, max_query) + 1):
            view = masks.view(query, context)
            expected = torch.ones(query, context, dtype=torch.bool).tril(context - query)
            assert torch.equal(view, expected)


def test_a_view_copies_nothing() -> None:
    masks = CausalMasks(max_query=8, max_context=32, device=CPU)
    storage = masks.strip.untyped_storage().data_ptr()
    assert masks.view(3, 17).untyped_storage().data_ptr() == storage


def test_a_mask_beyond_its_size_is_a_defect() -> None:
    masks = CausalMasks(max_query=8, max_context=32, device=CPU)
    for query, context in [(9, 20), (5, 4), (0, 3), (4, 33)]:
        with pytest.raises(ValueError, match="context"):
            masks.view(query, context)


def test_a_long_context_does_not_square_its_memory() -> None:
    assert CausalMasks(max_query=64, max_context=4096, device=CPU).strip.nbytes == 64 * 4096
    assert CausalMasks(max_query=64, max_context=16, device=CPU).strip.nbytes == 16 * 16

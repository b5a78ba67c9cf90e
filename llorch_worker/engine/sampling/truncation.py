"""min_p, top_k and top_p: which tokens of each row may still be drawn.

Each rule keeps the tokens at or above a threshold, ties included, so that no result depends on the
order of a sort. Thresholds are compared with the scaled logits, which are exact. A softmax may
round neighbouring logits to the same weight.

``torch_ops.truncate_rows`` is the plain form, for any device. On the CPU the native kernel finds
the thresholds without a sort of the vocabulary, which would dominate sampling:
``pytest benches/components/bench_sampler.py`` times the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.kernels import TruncateRows, torch_ops


@dataclass(frozen=True, slots=True)
class Truncation:
    """min_p, top_k and top_p of the random rows that use one of them.

    ``rows`` [truncated] int64 index into the random rows, or None for all of them; ``log_min_p``
    [truncated, 1] float32, -inf when off; ``top_k`` [truncated, 1] int64, the vocabulary's size
    when off; ``top_p`` [truncated, 1] float64, inf when off.
    """

    rows: torch.Tensor | None
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


def truncate(
    weights: torch.Tensor,
    scaled: torch.Tensor,
    truncation: Truncation,
    truncate_rows: TruncateRows | None = None,
) -> None:
    """Sets the ``weights`` of the excluded tokens to 0.

    Args:
        weights: [random, vocab] float32, the probabilities of all tokens; changed in place.
        scaled: [random, vocab] float32, logits over temperature.
        truncate_rows: the native kernel, if there is one.
    """
    columns = (truncation.log_min_p, truncation.top_k, truncation.top_p)
    form = torch_ops.truncate_rows if truncate_rows is None else truncate_rows
    form(weights, scaled, truncation.rows, *(column.squeeze(1) for column in columns))

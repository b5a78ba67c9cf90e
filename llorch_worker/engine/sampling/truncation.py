"""min_p, top_k and top_p: which tokens of each row may still be drawn.

Each rule keeps the tokens at or above a threshold, ties included, so that no result depends on the
order of a sort. Thresholds are compared with the scaled logits, which are exact. A softmax may
round neighbouring logits to the same weight.

:func:`truncate_by_sorting` is the plain form, for any device. On the CPU the native kernel finds
the thresholds without a sort of the vocabulary, which would dominate sampling:
``pytest benches/components/bench_sampler.py`` times the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llorch_worker.kernels import TruncateRows


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
    if truncate_rows is None:
        truncate_by_sorting(weights, scaled, truncation)
        return
    columns = (truncation.log_min_p, truncation.top_k, truncation.top_p)
    truncate_rows(weights, scaled, truncation.rows, *(column.squeeze(1) for column in columns))


def truncate_by_sorting(
    weights: torch.Tensor, scaled: torch.Tensor, truncation: Truncation
) -> None:
    """All truncated rows at once; both tensors are [random, vocab] float32."""
    if (rows := truncation.rows) is not None:
        truncated = weights[rows]
        truncate_by_sorting(truncated, scaled[rows], replace(truncation, rows=None))
        weights[rows] = truncated
        return
    falling, order = scaled.sort(dim=-1, descending=True)
    inside = torch.arange(falling.shape[-1], device=falling.device) < truncation.top_k
    # Equivalent to p >= min_p * p_max.
    inside &= falling >= falling[:, :1] + truncation.log_min_p
    # Each of these takes 8 bytes for each logit of the batch: none stays longer than it is read.
    masses = weights.gather(1, order).to(torch.float64).mul_(inside)
    del order
    cumulative = masses.cumsum(dim=-1)
    del masses
    before = cumulative.roll(1, dims=-1)
    before[:, 0] = 0  # the likeliest token always stays
    inside &= before < truncation.top_p * cumulative[:, -1:]
    kept = inside.sum(dim=-1, keepdim=True).clamp_(min=1)
    weights.mul_(scaled >= falling.gather(1, kept - 1))

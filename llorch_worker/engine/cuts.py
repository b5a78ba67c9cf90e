"""What min_p, top_k and top_p leave of each row's distribution.

Each cut keeps the tokens at or above a threshold, ties included, so that no result hangs on the
order of a sort. Thresholds are compared with the scaled logits, which are exact, not with the
weights, in which a softmax may round neighbours into one.
"""

from __future__ import annotations

import torch

from llorch_worker.engine.reach import reach
from llorch_worker.engine.sampling_batch import Limits, RandomRows
from llorch_worker.engine.segments import totals


def cut(weights: torch.Tensor, scaled: torch.Tensor, random: RandomRows) -> None:
    """Sets the ``weights`` of the tokens that fall to 0.

    Args:
        weights: [random, vocab] float32, proportional to the probabilities; changed in place.
        scaled: [random, vocab] float32, logits over temperature.
    """
    if random.log_min_p is not None:
        # p >= min_p * p_max, without computing any p.
        _keep(weights, scaled, scaled.amax(dim=-1, keepdim=True) + random.log_min_p)
    surplus = None
    if random.top_k is not None:
        surplus = _keep_top_k(weights, scaled, random.top_k)
    if random.top_p is not None:
        _keep_top_p(weights, scaled, random.top_p, surplus)


def _keep_top_k(weights: torch.Tensor, scaled: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Returns [random, 1] float64: what the weights of ties beyond top_k come to."""
    values = _of(scaled, limits.rows)
    kept = _of(weights, limits.rows)
    ones = torch.ones((), dtype=torch.float64, device=weights.device).expand(values.shape)
    floors = reach(values, ones, limits.values)
    excess = (floors.weights - limits.values).mul_(kept.gather(1, floors.tokens))
    _keep(kept, values, floors.values)
    if limits.rows is None:
        return excess
    weights[limits.rows] = kept
    return excess.new_zeros(len(weights), 1).index_copy_(0, limits.rows, excess)


def _keep_top_p(
    weights: torch.Tensor, scaled: torch.Tensor, limits: Limits, surplus: torch.Tensor | None
) -> None:
    """Keeps the shortest prefix, in falling order, that reaches top_p of what top_k left."""
    values = _of(scaled, limits.rows)
    kept = _of(weights, limits.rows)
    mass = totals(kept)
    if surplus is not None:
        mass -= _of(surplus, limits.rows)
    floors = reach(values, kept.to(torch.float64), mass.mul_(limits.values))
    _keep(kept, values, floors.values)
    if limits.rows is not None:
        weights[limits.rows] = kept


def _keep(weights: torch.Tensor, values: torch.Tensor, floors: torch.Tensor) -> None:
    # A mask of float32 takes a fifth of the time of one of bool, which must be converted.
    weights.mul_(torch.ge(values, floors, out=torch.empty_like(values)))


def _of(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return values if rows is None else values[rows]

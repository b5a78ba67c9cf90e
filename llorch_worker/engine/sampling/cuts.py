"""What min_p, top_k and top_p leave of each row's distribution.

Each cut keeps the tokens at or above a threshold, ties included, so that no result hangs on the
order of a sort. Thresholds are compared with the scaled logits, which are exact, not with the
weights, in which a softmax may round neighbours into one.
"""

from __future__ import annotations

import torch

from llorch_worker.engine.sampling.batch import Cuts
from llorch_worker.engine.sampling.row_cut import cut_row
from llorch_worker.kernels import CutRows


def cut(
    weights: torch.Tensor, scaled: torch.Tensor, cuts: Cuts, cut_rows: CutRows | None = None
) -> None:
    """Sets the ``weights`` of the tokens that fall to 0.

    Args:
        weights: [random, vocab] float32, the probabilities before any cut; changed in place.
        scaled: [random, vocab] float32, logits over temperature.
        cut_rows: does it for all rows at once, where there is such a kernel.
    """
    if cut_rows is not None:
        columns = (cuts.log_min_p, cuts.top_k, cuts.top_p)
        cut_rows(weights, scaled, cuts.rows, *(column.squeeze(1) for column in columns))
    elif weights.is_cpu:
        _cut_one_by_one(weights, scaled, cuts)
    elif cuts.rows is None:
        cut_by_sorting(weights, scaled, cuts)
    else:
        kept = weights[cuts.rows]
        cut_by_sorting(kept, scaled[cuts.rows], cuts)
        weights[cuts.rows] = kept


def _cut_one_by_one(weights: torch.Tensor, scaled: torch.Tensor, cuts: Cuts) -> None:
    rows = range(len(weights)) if cuts.rows is None else cuts.rows.tolist()
    weight_rows, value_rows = weights.numpy(), scaled.numpy()
    for row, log_min_p, top_k, top_p in zip(
        rows,
        cuts.log_min_p.squeeze(1).numpy(),
        cuts.top_k.squeeze(1).tolist(),
        cuts.top_p.squeeze(1).tolist(),
        strict=True,
    ):
        cut_row(weight_rows[row], value_rows[row], log_min_p, top_k, top_p)


def cut_by_sorting(weights: torch.Tensor, scaled: torch.Tensor, cuts: Cuts) -> None:
    """The plain form, for any device: all rows at once; both [cut, vocab] float32."""
    falling, order = scaled.sort(dim=-1, descending=True)
    inside = torch.arange(falling.shape[-1], device=falling.device) < cuts.top_k
    # p >= min_p * p_max, without computing any p.
    inside &= falling >= falling[:, :1] + cuts.log_min_p
    masses = weights.gather(1, order).to(torch.float64).mul_(inside)
    cumulative = masses.cumsum(dim=-1)
    before = cumulative.roll(1, dims=-1)
    before[:, 0] = 0  # the likeliest token always stays
    inside &= before < cuts.top_p * cumulative[:, -1:]
    kept = inside.sum(dim=-1, keepdim=True).clamp_(min=1)
    weights.mul_(scaled >= falling.gather(1, kept - 1))

"""The order in which a file stores the rows of Q and K."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeOrder:
    """The rows of ``heads`` heads of ``head_dim``, as a file orders them.

    The model's order is the half-split one: a head's pair i is its rows i and i + head_dim / 2. A
    file may store pairs as neighbours, or may rotate only the first ``rotary_dim`` rows of a head;
    the pairs of the others then follow those that rotate. Rows after the heads keep their places.
    """

    heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool

    def destination(self, rows: int) -> torch.Tensor:
        """The target of each stored row: [rows] int64."""
        row = torch.arange(rows)
        within = row % self.head_dim
        rotating, still = self.rotary_dim // 2, (self.head_dim - self.rotary_dim) // 2
        if self.interleaved:
            pair, side = within // 2, within % 2
        else:
            pair, side = within % max(1, rotating), within // max(1, rotating)
        rest = within - self.rotary_dim
        pair = torch.where(rest >= 0, rotating + rest % max(1, still), pair)
        side = torch.where(rest >= 0, rest // max(1, still), side)
        moved = row - within + pair + side * (self.head_dim // 2)
        return torch.where(row < self.heads * self.head_dim, moved, row)

    def arrange(self, stored: torch.Tensor) -> torch.Tensor:
        """``stored`` with its rows in the model's order, in new memory."""
        out = torch.empty_like(stored)
        out[self.destination(len(stored))] = stored
        return out

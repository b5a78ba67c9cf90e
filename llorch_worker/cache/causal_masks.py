"""One causal mask; every mask that attention needs is a view of it."""

from __future__ import annotations

import torch


class CausalMasks:
    """The bottom ``max_query`` rows of the causal [max_context, max_context] mask, as bool.

    Query i of the last q tokens of a context of c tokens may see keys 0 .. c - q + i. That is the
    bottom right [q, c] corner of the square, whatever q and c are, so as many bottom rows as a step
    has query tokens are enough.
    """

    def __init__(self, *, max_query: int, max_context: int, device: torch.device) -> None:
        self.max_query = min(max_query, max_context)
        self.max_context = max_context
        self.strip = torch.ones(self.max_query, max_context, dtype=torch.bool, device=device).tril_(
            max_context - self.max_query
        )

    def view(self, query_len: int, context_len: int) -> torch.Tensor:
        """[query_len, context_len] bool, True where a query may look; no copy."""
        if not 0 < query_len <= min(context_len, self.max_query):
            raise ValueError(
                f"no mask for {query_len} queries in a context of {context_len}: "
                f"at most {self.max_query} queries at once"
            )
        if context_len > self.max_context:
            raise ValueError(f"context of {context_len} exceeds {self.max_context} tokens")
        return self.strip[self.max_query - query_len :, self.max_context - context_len :]

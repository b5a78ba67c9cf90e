"""One token for each row of logits in one launch: greedy, or a draw without top_k and top_p."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    log_min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """See ``kernels.torch_ops.sample``, its twin."""
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _sample[(rows,)](
        logits,
        temperatures,
        log_min_p,
        uniforms,
        chosen,
        vocab,
        logits.stride(0),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
    return chosen


@triton.jit
def _sample(logits, temperatures, log_min_p, uniforms, chosen, vocab, stride, BLOCK: tl.constexpr):
    """One row: its maximum, the mass that min_p leaves, then the token that the draw selects."""
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    at = tl.arange(0, BLOCK)
    best = float("-inf")
    best_token = 0
    for first in range(0, vocab, BLOCK):
        token = first + at
        values = tl.load(here + token, mask=token < vocab, other=float("-inf"))
        peak, where = tl.max(values, axis=0, return_indices=True)
        better = peak > best
        best = tl.where(better, peak, best)
        best_token = tl.where(better, first + where, best_token)
    temperature = tl.load(temperatures + row)
    token_id = best_token
    if temperature > 0:
        floor = tl.load(log_min_p + row)
        mass = tl.full([], 0.0, tl.float64)
        for first in range(0, vocab, BLOCK):
            weights = _weights(here, first + at, vocab, best, temperature, floor)
            mass += tl.sum(weights, axis=0)
        target = tl.load(uniforms + row) * mass
        before = tl.full([], 0.0, tl.float64)
        found = vocab
        for first in range(0, vocab, BLOCK):
            token = first + at
            weights = _weights(here, token, vocab, best, temperature, floor)
            # A token of weight 0 is never drawn, however the running sum is rounded.
            passed = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0)
            found = tl.minimum(found, tl.min(tl.where(passed, token, vocab), axis=0))
            before += tl.sum(weights, axis=0)
        token_id = tl.where(found < vocab, found, best_token)
    tl.store(chosen + row, token_id)


@triton.jit
def _weights(here, token, vocab, best, temperature, floor):
    """[BLOCK] float64: exp((logit - best) / temperature), 0 below min_p's floor."""
    values = tl.load(here + token, mask=token < vocab, other=float("-inf"))
    scaled = (values - best) / temperature
    return tl.where(scaled >= floor, tl.exp(scaled), 0.0).to(tl.float64)

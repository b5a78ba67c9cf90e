"""One token for each row of logits in one launch: greedy, or a draw after min_p, top_k and top_p.

A threshold is the smallest key above which no more than k tokens, or than a share of the mass, lie:
a search that counts above eight pivots at once and so takes at most 11 passes of a row, whatever
its values. A radix histogram would need a sum by bin; Triton's counts only. No pass sorts, stores
or compares with another row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llorch_worker.contract.seeds import FACTOR_1, FACTOR_2, GAMMA
from llorch_worker.kernels.interface import SampledRows
from llorch_worker.kernels.uniforms import BITS, signed

_BLOCK = 2048
_PIVOTS = tl.constexpr(8)
_GAMMA = tl.constexpr(signed(GAMMA))
_FACTOR_1 = tl.constexpr(signed(FACTOR_1))
_FACTOR_2 = tl.constexpr(signed(FACTOR_2))
_DROPPED_BITS = tl.constexpr(64 - BITS)
_UNIT = tl.constexpr(2.0**-BITS)


def sample(logits: torch.Tensor, rows: SampledRows, positions: torch.Tensor) -> torch.Tensor:
    """See ``kernels.torch_ops.sample``, its twin."""
    count, vocab = logits.shape
    chosen = torch.empty(count, dtype=torch.int64, device=logits.device)
    _sample[(count,)](
        logits,
        rows.temperatures,
        rows.log_min_p,
        rows.top_k,
        rows.top_p,
        rows.seeds,
        positions,
        chosen,
        vocab,
        logits.stride(0),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=16,
    )
    return chosen


@triton.jit
def _sample(
    logits,
    temperatures,
    log_min_p,
    top_k,
    top_p,
    seeds,
    positions,
    chosen,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """One row: its maximum, the thresholds, the mass they leave, then the token of the draw."""
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
        best = tl.div_rn(best, temperature)
        floor = best + tl.load(log_min_p + row)
        highest = _key(best)
        lowest = _key(floor)
        most = tl.load(top_k + row)
        share = tl.load(top_p + row)
        if most < vocab:
            # Not below the floor: min_p keeps no more than it keeps alone.
            kth = _threshold(
                here, vocab, best, temperature, lowest, highest, most.to(tl.float64), False, BLOCK
            )
        else:
            kth = lowest
        if share < 1.0:
            limit = share * _mass_of(here, vocab, best, temperature, kth, most, BLOCK)
            kth = _threshold(here, vocab, best, temperature, kth, highest, limit, True, BLOCK)

        mass = tl.full([], 0.0, tl.float64)
        for first in range(0, vocab, BLOCK):
            weights, keys = _weights(here, first + at, vocab, best, temperature)
            mass += tl.sum(tl.where(keys >= kth, weights, 0.0).to(tl.float64), axis=0)
        target = _uniform(tl.load(seeds + row), tl.load(positions + row)) * mass
        before = tl.full([], 0.0, tl.float64)
        found = vocab
        for first in range(0, vocab, BLOCK):
            token = first + at
            weights, keys = _weights(here, token, vocab, best, temperature)
            weights = tl.where(keys >= kth, weights, 0.0).to(tl.float64)
            # A token of weight 0 is never drawn, however the running sum is rounded.
            passed = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0)
            found = tl.minimum(found, tl.min(tl.where(passed, token, vocab), axis=0))
            before += tl.sum(weights, axis=0)
        token_id = tl.where(found < vocab, found, best_token)
    tl.store(chosen + row, token_id)


@triton.jit
def _threshold(
    here,
    vocab,
    best,
    temperature,
    low,
    high,
    limit,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest key from ``low`` to ``high`` above which lie fewer than ``limit`` tokens, or
    less than ``limit`` of the mass; it is true of ``high``."""
    at = tl.arange(0, BLOCK)
    pivot = tl.arange(0, _PIVOTS)
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        step = (high - low + _PIVOTS - 1) // _PIVOTS
        pivots = tl.minimum(low + step * pivot, high).to(tl.int32)
        # Lanes first and their sum last: one exchange between warps a pass.
        above = tl.zeros([_PIVOTS, BLOCK], tl.float32)
        for first in range(0, vocab, BLOCK):
            weights, keys = _weights(here, first + at, vocab, best, temperature)
            if not BY_MASS:
                weights = tl.full([BLOCK], 1.0, tl.float32)
            above += tl.where(keys[None, :] > pivots[:, None], weights[None, :], 0.0)
        enough = tl.sum(above.to(tl.float64), axis=1) < limit
        missed = _PIVOTS - tl.sum(enough.to(tl.int32), axis=0)
        high = tl.minimum(high, low + step * missed)
        low = tl.where(missed == 0, low, low + step * (missed - 1) + 1)
    return high.to(tl.int32)


@triton.jit
def _mass_of(here, vocab, best, temperature, kth, most, BLOCK: tl.constexpr):
    """The mass of the tokens whose key is at least ``kth``, of the last ones only as many as make
    ``most``: top_k counts ties in the order of a sort."""
    at = tl.arange(0, BLOCK)
    mass = tl.full([], 0.0, tl.float64)
    of_last = tl.full([], 0.0, tl.float32)
    over = tl.full([], 0, tl.int64)
    last = tl.full([], 0, tl.int64)
    for first in range(0, vocab, BLOCK):
        weights, keys = _weights(here, first + at, vocab, best, temperature)
        mass += tl.sum(tl.where(keys > kth, weights, 0.0).to(tl.float64), axis=0)
        over += tl.sum((keys > kth).to(tl.int64), axis=0)
        last += tl.sum((keys == kth).to(tl.int64), axis=0)
        of_last = tl.maximum(of_last, tl.max(tl.where(keys == kth, weights, 0.0), axis=0))
    return mass + tl.minimum(last, most - over).to(tl.float64) * of_last.to(tl.float64)


@triton.jit
def _weights(here, token, vocab, best, temperature):
    """[BLOCK] float32: exp of the scaled logits less the best; and their keys."""
    values = tl.load(here + token, mask=token < vocab, other=float("-inf"))
    scaled = tl.div_rn(values, temperature)
    return tl.exp(scaled - best), _key(scaled)


@triton.jit
def _key(scaled):
    """int32 in the order of floats; 0 and -0 are one."""
    scaled += 0.0
    bits = scaled.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _uniform(seed, position):
    """See ``kernels.uniforms.uniforms``, its twin."""
    stream = _mix(seed + _GAMMA)
    bits = _mix(stream + (position + 1) * _GAMMA)
    return _shift_right(bits, _DROPPED_BITS).to(tl.float64) * _UNIT


@triton.jit
def _mix(value):
    value = (value ^ _shift_right(value, 30)) * _FACTOR_1
    value = (value ^ _shift_right(value, 27)) * _FACTOR_2
    return value ^ _shift_right(value, 31)


@triton.jit
def _shift_right(value, COUNT: tl.constexpr):
    return (value.to(tl.uint64, bitcast=True) >> COUNT).to(tl.int64, bitcast=True)

"""Rates from the times at which the tokens of each sequence came."""

from __future__ import annotations

from collections.abc import Sequence

from benches.peers.contestants.contestant import Rate, Work


def rate(work: Work, began_s: float, times_s: Sequence[Sequence[float]]) -> Rate:
    """The rate of ``work``, which began at ``began_s``; ``times_s`` has the times of each
    sequence's tokens, in seconds of the same clock."""
    if [len(each) for each in times_s] != [work.new_tokens] * work.sequences:
        raise RuntimeError("it did not generate as many tokens as it was asked for")
    firsts_s = [each[0] for each in times_s]
    if work.kind == "prefill":
        return Rate(work.sequences * work.prompt_tokens / (max(firsts_s) - began_s))
    # The span in which all decode: from the latest first token to the earliest last token.
    from_s, to_s = max(firsts_s), min(each[-1] for each in times_s)
    tokens = sum(from_s < at <= to_s for each in times_s for at in each)
    if not tokens:
        raise RuntimeError("at no time all sequences decode; raise --new-tokens")
    return Rate(tokens / (to_s - from_s))

"""Seeds of jobs and of their choices."""

from __future__ import annotations

from hashlib import blake2b

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of ``n`` choices; the first keeps ``seed``, so n=1 equals choice 0 of n=4."""
    if choice == 0:
        return seed
    return mix64((mix64((seed + GAMMA) & MASK) + choice * FACTOR_1) & MASK) >> 1


def job_seed(job_id: str) -> int:
    """The seed of a job without one: 53 bits, the same in every attempt of the job.

    Readers that hold JSON numbers as doubles, such as JavaScript and jq, round larger ones.
    """
    digest = blake2b(job_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> 11


def mix64(value: int) -> int:
    """The finaliser of SplitMix64 on one plain 64-bit integer."""
    value = ((value ^ (value >> 30)) * FACTOR_1) & MASK
    value = ((value ^ (value >> 27)) * FACTOR_2) & MASK
    return value ^ (value >> 31)

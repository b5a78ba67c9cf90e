from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.contract.seeds import choice_seed, job_seed, mix64
from llorch_worker.kernels.uniforms import uniforms

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**20)


def plain_uniform(seed: int, position: int) -> float:
    stream = mix64((seed + GAMMA) & MASK)
    return (mix64((stream + (position + 1) * GAMMA) & MASK) >> 12) / 2**52


def drawn(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return uniforms(torch.tensor(seeds), torch.tensor(positions))


def chi_square(numbers: torch.Tensor, bins: int) -> float:
    counts = torch.histc(numbers, bins, 0, 1)
    expected = len(numbers) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_mix64_is_the_finaliser_of_splitmix64() -> None:
    # The published first outputs of SplitMix64 from state 0 are finalised multiples of gamma.
    state, outputs = 0, []
    for _ in range(3):
        state = (state + GAMMA) & MASK
        outputs.append(mix64(state))
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(SEEDS, POSITIONS)
def test_the_vectorised_hash_equals_plain_integers(seed: int, position: int) -> None:
    number = drawn([seed], [position]).item()
    assert number == plain_uniform(seed, position)
    assert 0 <= number < 1


def test_positions_of_one_seed_and_seeds_at_one_position_are_uniform() -> None:
    # 99 degrees of freedom: 1 in 1,000 lies above 148.
    every, one = list(range(50_000)), [42] * 50_000
    assert chi_square(drawn(one, every), 100) < 148
    assert chi_square(drawn(every, one), 100) < 148


def test_neighbouring_positions_are_not_correlated() -> None:
    numbers = drawn([7] * 20_001, list(range(20_001)))
    correlation = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(float(correlation)) < 0.03


@given(st.text(st.characters(), max_size=50))
def test_a_job_without_a_seed_gets_the_same_one_in_every_attempt(job_id: str) -> None:
    assert job_seed(job_id) == job_seed(job_id)
    assert 0 <= job_seed(job_id) < 2**53, "what a double holds"
    assert job_seed(job_id) != job_seed(job_id + "x")


def test_a_jobs_seed_is_the_same_in_every_release() -> None:
    """A job may begin on a worker of one release and resume on another's."""
    assert job_seed("c0ffee") == 7467239487405965


@given(SEEDS)
def test_the_first_choice_keeps_the_seed_and_the_others_differ(seed: int) -> None:
    seeds = [choice_seed(seed, choice) for choice in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(0 <= derived < 2**63 for derived in seeds)

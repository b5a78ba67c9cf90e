"""The vectorised sampler against a slow, plain reference for one row."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.kernels import select_truncate_rows
from llorch_worker.kernels.uniforms import uniforms

VOCAB = 50
EOS = 2
CPU = torch.device("cpu")

MakeSequence = Callable[..., Sequence]


def reference_distribution(logits: list[float], sequence: Sequence) -> dict[int, float]:
    """Token -> probability by the rules' own words; a greedy row has one token."""
    request = sequence.request
    values = list(logits)
    for token, bias in (request.logit_bias or {}).items():
        values[token] += bias
    if sequence.generated_count < request.min_tokens:
        for token in sequence.stop_ids:
            values[token] = -math.inf
    prompt = sequence.token_ids[: sequence.prompt_length]
    generated = sequence.generated_ids
    for token in {*prompt, *generated}:
        penalty = request.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(generated):
        values[token] -= request.frequency_penalty * generated.count(token)
        values[token] -= request.presence_penalty
    if request.temperature == 0:
        return {values.index(max(values)): 1.0}
    values = [value / request.temperature for value in values]
    if request.min_p > 0:
        floor = max(values) + math.log(request.min_p)
        values = [value if value >= floor else -math.inf for value in values]
    falling = sorted(values, reverse=True)
    if 0 < request.top_k < len(values):
        falling = falling[: request.top_k]
    weights = [math.exp(value - falling[0]) for value in falling]
    if request.top_p < 1:
        total, kept, mass = sum(weights), 0, 0.0
        while kept == 0 or mass < request.top_p * total:
            mass += weights[kept]
            kept += 1
        falling = falling[:kept]
    chances = {
        token: math.exp(value - falling[0])
        for token, value in enumerate(values)
        if value >= falling[-1]
    }
    total = sum(chances.values())
    return {token: chance / total for token, chance in chances.items() if chance > 0}


def reference_token(logits: list[float], sequence: Sequence) -> int:
    distribution = reference_distribution(logits, sequence)
    target = uniforms(torch.tensor([sequence.seed]), torch.tensor([sequence.generated_count]))
    cumulative = list(accumulate(distribution.values()))
    return list(distribution)[bisect_right(cumulative, target.item(), hi=len(cumulative) - 1)]


def sample(logits: torch.Tensor, *sequences: Sequence, sampler: Sampler | None = None) -> list[int]:
    sampler = sampler or Sampler(logits.shape[-1], CPU)
    return sampler.sample(logits.clone(), sequences).token_ids


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 2) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


MIXES: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1_000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.6, "min_p": 0.05, "temperature": 0.7},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.8},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.3},
    {"logit_bias": {3: 5.0, 4: -100.0}},
    {"logit_bias": {9: 100.0}, "temperature": 0},
    {"min_tokens": 30, "logit_bias": {EOS: 90.0}},
    {"min_tokens": 30, "logit_bias": {7: 90.0}, "stop_token_ids": (7,), "temperature": 0},
    {"min_tokens": 2, "logit_bias": {EOS: 90.0}},
    {"min_tokens": 30, "logit_bias": {EOS: 90.0}, "ignore_eos": True},
]

PARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.1, 0.8, 1.0, 1.7]),
    "top_k": st.integers(0, VOCAB + 5),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.2, 5),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)),
    "min_tokens": st.integers(0, 20),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 5),
}


def sequence_of(make_sequence: MakeSequence, seed: int, **fields: Any) -> Sequence:
    return make_sequence(
        [1, 5, 5, 8, 13],
        [5, 13, 13, 21, seed % VOCAB],
        seed=seed,
        eos_ids=frozenset({EOS}),
        **fields,
    )


@pytest.mark.parametrize("fields", MIXES, ids=str)
def test_each_parameter_agrees_with_the_plain_reference(
    make_sequence: MakeSequence, fields: dict[str, Any]
) -> None:
    logits = random_logits(40)
    sequences = [sequence_of(make_sequence, seed, **fields) for seed in range(40)]
    expected = [reference_token(*pair) for pair in zip(logits.tolist(), sequences, strict=True)]
    assert sample(logits, *sequences) == expected


def test_random_mixes_in_one_batch_agree_with_the_plain_reference(
    make_sequence: MakeSequence,
) -> None:
    random = Random(0)
    sequences = []
    for seed in range(300):
        fields: dict[str, Any] = {
            "temperature": random.choice([0, 0.2, 0.8, 1.0, 1.7]),
            "top_k": random.choice([0, 0, 3, 20]),
            "top_p": random.choice([1.0, 0.9, 0.4]),
            "min_p": random.choice([0.0, 0.0, 0.1]),
            "presence_penalty": random.choice([0.0, random.uniform(-2, 2)]),
            "frequency_penalty": random.choice([0.0, random.uniform(-2, 2)]),
            "repetition_penalty": random.choice([1.0, random.uniform(0.5, 2)]),
            "logit_bias": {random.randrange(VOCAB): random.uniform(-9, 9) for _ in range(3)},
            "min_tokens": random.choice([0, 30]),
        }
        sequences.append(sequence_of(make_sequence, seed, **fields))
    logits = random_logits(300, seed=1)
    expected = [reference_token(*pair) for pair in zip(logits.tolist(), sequences, strict=True)]
    assert sample(logits, *sequences) == expected


@settings(max_examples=200)
@given(
    batch=st.lists(st.fixed_dictionaries({}, optional=PARAMETERS), min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
)
def test_a_row_gets_the_same_token_alone_and_in_any_batch(
    make_sequence: MakeSequence, batch: list[dict[str, Any]], seed: int
) -> None:
    logits = random_logits(len(batch), seed)
    sequences = [
        sequence_of(make_sequence, seed + row, **fields) for row, fields in enumerate(batch)
    ]
    alone = [sample(logits[row : row + 1], s)[0] for row, s in enumerate(sequences)]
    assert sample(logits, *sequences) == alone


def test_truncation_keeps_all_ties_at_its_threshold(make_sequence: MakeSequence) -> None:
    logits = torch.tensor([[5.0, 1.0, 1.0, 1.0, 0.0]]).repeat(400, 1)
    sequences = [make_sequence(1, seed=seed, top_k=2, temperature=2.0) for seed in range(400)]
    assert set(sample(logits, *sequences)) == {0, 1, 2, 3}


def test_penalties_count_the_sampled_tokens_of_each_step(make_sequence: MakeSequence) -> None:
    """One sampler over many steps, rows coming and going, equals a fresh sampler each step."""
    fields = {"frequency_penalty": 1.1, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    sequences = [make_sequence(seed=seed, **fields) for seed in range(4)]
    sampler = Sampler(VOCAB, CPU)
    for step in range(30):
        here = [s for index, s in enumerate(sequences) if (step // 5 + index) % 3]
        logits = random_logits(len(here), seed=step)
        tokens = sample(logits, *here, sampler=sampler)
        assert tokens == sample(logits, *here)
        for sequence, token in zip(here, tokens, strict=True):
            sequence.append(token)


def test_logprobs_are_those_of_the_models_own_logits(make_sequence: MakeSequence) -> None:
    logits = random_logits(4)
    fields = {"temperature": 0.2, "top_k": 2, "logit_bias": {3: 9.0}, "frequency_penalty": 2.0}
    sequences = [
        make_sequence(logprobs=3, **fields),
        make_sequence(),
        make_sequence(logprobs=0, temperature=0),
        make_sequence(logprobs=20),
    ]
    sampled = Sampler(VOCAB, CPU).sample(logits.clone(), sequences)
    expected = logits.log_softmax(dim=-1)
    assert sampled.logprobs.keys() == {0, 2, 3}
    for row, count in ((0, 3), (2, 0), (3, 20)):
        of_row = sampled.logprobs[row]
        assert of_row.chosen == pytest.approx(float(expected[row, sampled.token_ids[row]]))
        assert of_row.top_ids == expected[row].topk(count).indices.tolist()
        assert of_row.top == pytest.approx(expected[row].topk(count).values.tolist())


def test_alternatives_of_equal_logits_depend_on_no_neighbour(make_sequence: MakeSequence) -> None:
    logits = torch.zeros(2, 32_000)
    logits[:, 7] = 5.0
    one = make_sequence(logprobs=5, temperature=0)
    alone = Sampler(32_000, CPU).sample(logits[:1].clone(), [one])
    beside = Sampler(32_000, CPU).sample(logits.clone(), [one, make_sequence(logprobs=20)])
    assert alone.logprobs[0].top_ids == beside.logprobs[0].top_ids


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {}, {"top_p": 0.5, "logprobs": 2}, {"top_k": 3}, {"min_p": 0.1}],
    ids=str,
)
def test_a_damaged_row_is_reported_and_affects_no_other(
    make_sequence: MakeSequence, poison: float, fields: dict[str, Any], native: bool
) -> None:
    truncate_rows = select_truncate_rows(CPU) if native else None
    if native and truncate_rows is None:
        pytest.skip("this machine has no native kernels")
    logits = random_logits(3)
    sequences = [make_sequence(seed=seed, **fields) for seed in range(3)]
    expected = sample(logits, *sequences)
    logits[1, 17] = poison
    sampled = Sampler(VOCAB, CPU, truncate_rows=truncate_rows).sample(logits.clone(), sequences)
    assert sampled.damaged == {1}
    assert [sampled.token_ids[row] for row in (0, 2)] == [expected[0], expected[2]]


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({"temperature": 1e-40}, 7),
        ({"temperature": 5e-324}, 7),
        ({"repetition_penalty": 1e-40}, 3),
        ({"repetition_penalty": 5e-324}, 3),
    ],
    ids=str,
)
def test_parameters_too_small_for_float32_are_raised_to_the_lowest(
    fields: dict[str, Any], token: int, make_sequence: MakeSequence
) -> None:
    logits = torch.linspace(0, 1, VOCAB).unsqueeze(0)
    logits[0, 7] = 9
    sequence = make_sequence([1, 3], seed=5, **fields)
    assert Sampler(VOCAB, CPU).sample(logits, [sequence]).token_ids == [token]


def test_an_end_that_has_no_logit_forbids_no_token_of_another_row(
    make_sequence: MakeSequence,
) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = 9
    bounded = make_sequence(eos_ids=frozenset({VOCAB + 3}), min_tokens=5, temperature=0)
    other = make_sequence(temperature=0)
    assert Sampler(VOCAB, CPU).sample(logits, [bounded, other]).token_ids == [0, 3]

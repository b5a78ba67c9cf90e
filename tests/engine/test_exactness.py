"""Batching, chunking and preemption do not change any job's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from tests.engine.together import all_at_once
from tests.sizes import sized

PROMPTS = [
    "Once upon a time",
    "The dog",
    "Lily and Tom went to the park",
    "One day, a little girl named Sue",
    "There was a big red ball.",
    "A cat saw a bird in the tree and",
    "Mom said",
    "It was a sunny day. Ben",
    "In the forest, there was a bear who liked to",
    "x",
    "The sun was very hot and the",
    "He was sad because",
    "Once upon a time, there was a little boy who had a boat. " * 4,
    "Sam",
    "They all lived happily",
    "Look!",
]
EVERY_STYLE = sized(usual=slice(None, None, 2), full=slice(None))
"""Of ``mixed_requests``: every second has every style too, and the long prompt."""


def mixed_requests() -> list[GenerationRequest]:
    """16 jobs of several lengths: greedy and sampled, with and without truncation and penalties."""
    styles: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.2},
        {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 1.0, "logit_bias": {10: -5.0, 20: 3.0}, "min_tokens": 20},
    ]
    return [
        GenerationRequest(
            prompt=prompt,
            max_tokens=8 + 3 * index,
            seed=1_000 + index,
            ignore_eos=index % 3 == 0,
            **styles[index % len(styles)],
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def run_together(engine: Engine, requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
    with all_at_once(engine):
        generations = [engine.submit(request) for request in requests]
    return [generation.result(timeout=60).choices[0].token_ids for generation in generations]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[tuple[int, ...]]:
    """The tokens of each of ``mixed_requests``, run alone."""
    return [run_together(engine, [request])[0] for request in mixed_requests()]


@pytest.fixture(scope="module", params=["f32.gguf", "hf"])
def file_engine(trained_model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(trained_model / request.param, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def transformers_model(trained_model: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(trained_model / "hf", dtype=torch.float32).eval()


def test_greedy_tokens_are_those_of_transformers(
    file_engine: Engine, transformers_model: Any
) -> None:
    requests = [
        GenerationRequest(prompt=prompt, max_tokens=40, temperature=0, ignore_eos=True)
        for prompt in PROMPTS[:12]
    ]
    for request, tokens in zip(requests, run_together(file_engine, requests), strict=True):
        ids = file_engine.tokenizer.encode(request.prompt or "")
        # Each token must be its choice after the ones before. One pass over all shows that.
        with torch.no_grad():
            logits = transformers_model(torch.tensor([[*ids, *tokens[:-1]]])).logits[0]
        assert tuple(logits[len(ids) - 1 :].argmax(-1).tolist()) == tokens, request.prompt


def test_cached_decoding_gives_the_tokens_and_logprobs_of_uncached_forwards(engine: Engine) -> None:
    request = GenerationRequest(
        prompt=PROMPTS[2], max_tokens=64, temperature=0, logprobs=0, ignore_eos=True
    )
    choice = engine.submit(request).result(timeout=60).choices[0]
    prompt_ids = engine.tokenizer.encode(PROMPTS[2])
    uncached = engine.logits([*prompt_ids, *choice.token_ids])[len(prompt_ids) - 1 : -1]
    assert uncached.argmax(dim=-1).tolist() == list(choice.token_ids)
    logprobs = uncached.log_softmax(dim=-1).max(dim=-1).values.tolist()
    assert choice.logprobs is not None
    assert [entry.logprob for entry in choice.logprobs] == pytest.approx(logprobs, abs=1e-4)


def test_sixteen_concurrent_jobs_get_the_tokens_they_get_alone(
    engine: Engine, alone: list[tuple[int, ...]]
) -> None:
    assert run_together(engine, mixed_requests()) == alone


def test_jobs_back_to_back_leave_no_trace_in_each_other(
    engine: Engine, alone: list[tuple[int, ...]]
) -> None:
    request = mixed_requests()[3]
    for other in mixed_requests()[EVERY_STYLE]:
        run_together(engine, [other])
        assert run_together(engine, [request]) == [alone[3]]


@pytest.mark.parametrize("step_tokens", [1, 7, 16])
def test_prefill_in_chunks_of_any_size_gives_the_same_tokens(
    make_engine: Callable[..., Engine], alone: list[tuple[int, ...]], step_tokens: int
) -> None:
    engine = make_engine(max_step_tokens=step_tokens)
    assert run_together(engine, mixed_requests()[EVERY_STYLE]) == alone[EVERY_STYLE]


def test_a_tiny_pool_with_preemption_gives_the_same_tokens(
    make_engine: Callable[..., Engine], alone: list[tuple[int, ...]]
) -> None:
    requests = mixed_requests()
    sizes = [
        len(make_engine().tokenizer.encode(r.prompt or "")) + (r.most_tokens or 0) for r in requests
    ]
    engine = make_engine(num_blocks=-(-max(sizes) // 16))
    assert run_together(engine, requests) == alone
    assert engine.stats().preempted_total > 0


def test_the_first_of_many_choices_equals_a_single_choice(engine: Engine) -> None:
    request = {"prompt": PROMPTS[0], "max_tokens": 24, "seed": 77}
    four = engine.submit(GenerationRequest(n=4, **request)).result(timeout=60)
    one = engine.submit(GenerationRequest(**request)).result(timeout=60)
    assert four.choices[0] == one.choices[0]
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in four.choices}) == 4
    assert four.usage.completion == sum(len(choice.token_ids) for choice in four.choices)


def test_a_drawn_seed_is_returned_and_repeats_the_answer(engine: Engine) -> None:
    first = engine.submit(GenerationRequest(prompt=PROMPTS[0], max_tokens=30)).result(timeout=60)
    again = engine.submit(
        GenerationRequest(prompt=PROMPTS[0], max_tokens=30, seed=first.seed)
    ).result(timeout=60)
    assert again.choices == first.choices


def test_logits_hold_no_blocks_and_disturb_no_running_job(
    engine: Engine, alone: list[tuple[int, ...]]
) -> None:
    with all_at_once(engine):
        generations = [engine.submit(request) for request in mixed_requests()]
    for _ in range(5):
        engine.logits(list(range(3, 200)))
    assert [g.result(timeout=60).choices[0].token_ids for g in generations] == alone
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total

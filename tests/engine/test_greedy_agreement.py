"""Greedy tokens of every device, dtype and kernel are those of the CPU in float32, up to ties.

A tie: where an engine first chooses another token than the reference, the reference's own logits of
the two, after the tokens before, lie no further apart than ``TIE`` times its largest logit. What
follows has another history and is not compared; it is checked anew from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from tests.engine.together import all_at_once
from tests.sizes import sized

TIE = {"float32": 2.0**-17, "bfloat16": 2.0**-7}
"""Of the reference's largest logit. In bfloat16 an activation keeps 8 bits, and errors of some tens
of products add up; in float32 only the order of sums differs."""
MOST_TIES = 8
TOKENS = sized(usual=100, full=200)
PROMPTS = ("Once upon a time", "The dog", "Lily and Ben went to", "One day a big")


@dataclass(frozen=True)
class Way:
    device: str
    dtype: str
    kernels: str = "auto"
    cuda_graphs: bool = True

    def __str__(self) -> str:
        graphs = "" if self.cuda_graphs else "-no-graphs"
        return f"{self.device}-{self.dtype}-{self.kernels}{graphs}"


WAYS = [
    Way("cpu", "bfloat16"),
    Way("cpu", "bfloat16", "torch"),
    *(
        Way("cuda", dtype, kernels, graphs)
        for dtype in ("float32", "bfloat16")
        for kernels, graphs in (("auto", True), ("auto", False), ("torch", False))
    ),
]


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Iterator[Engine]:
    with Engine.load(demo_model, device="cpu", dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected_tokens(reference: Engine) -> Callable[..., list[int]]:
    """``expected_tokens(*ids, count=...)``: the reference's, which all ways share."""

    @cache
    def tokens(*ids: int, count: int) -> list[int]:
        return list(reference.submit(greedy([*ids], count)).result(120).choices[0].token_ids)

    return tokens


def way_param(way: Way) -> Any:
    lacks = way.device == "cuda" and not torch.cuda.is_available()
    return pytest.param(
        way, id=str(way), marks=pytest.mark.lacks("needs a card with CUDA", when=lacks)
    )


@pytest.fixture(params=map(way_param, WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def engine(demo_model: Path, way: Way) -> Iterator[Engine]:
    with Engine.load(
        demo_model,
        device=way.device,
        dtype=way.dtype,
        kernels=way.kernels,
        cuda_graphs=way.cuda_graphs,
    ) as engine:
        yield engine


def greedy(ids: list[int], tokens: int) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=ids, max_tokens=tokens, temperature=0, ignore_eos=True
    )


def gap_at(reference: Engine, ids: list[int], first: int, second: int) -> float:
    """Between the logits of two tokens after ``ids``, as a share of the largest one."""
    logits = reference.logits(ids)[-1]
    return float((logits[first] - logits[second]).abs() / logits.abs().max())


@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
def test_greedy_tokens_are_those_of_float32_on_the_cpu_up_to_ties(
    reference: Engine,
    expected_tokens: Callable[..., list[int]],
    engine: Engine,
    way: Way,
    company: bool,
) -> None:
    left = [(reference.tokenizer.encode(prompt), TOKENS) for prompt in PROMPTS]
    ties = 0
    while left:
        requests = [greedy(ids, tokens) for ids, tokens in left]
        if company:
            with all_at_once(engine):
                running = [engine.submit(each) for each in requests]
            results = [each.result(120) for each in running]
        else:
            results = [engine.submit(each).result(120) for each in requests]
        again = []
        for (ids, tokens), result in zip(left, results, strict=True):
            chosen = list(result.choices[0].token_ids)
            expected = expected_tokens(*ids, count=tokens)
            assert len(chosen) == len(expected) == tokens
            same = next((i for i in range(tokens) if chosen[i] != expected[i]), tokens)
            if same == tokens:
                continue
            before = ids + expected[:same]
            gap = gap_at(reference, before, expected[same], chosen[same])
            assert gap <= TIE[way.dtype], f"token {same} after {len(ids)}: a gap of {gap:.5f}"
            ties += 1
            if same + 1 < tokens:
                # Both go on from the reference's choice.
                again.append((ids + expected[: same + 1], tokens - same - 1))
        left = again
    assert ties <= MOST_TIES

"""The fused sampler never makes the host wait, and gives the tokens of the plain one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.kernels import SampledRows, torch_ops
from tests.engine.no_host_reads import AtOnce, FreeForward, launch_without_host_reads
from tests.engine.together import all_at_once


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(
        **{
            "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 20,
            **fields,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 1, "seed": 7},
        {"temperature": 1e-9},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.9, "min_p": 0.05},
    ],
)
def test_the_fused_sampler_needs_no_host_and_gives_the_same_tokens(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    requests = [request(**{"seed": 5, **fields}), request(prompt="The dog", seed=6)]
    with loaded.engine() as plain:
        expected = [plain.submit(r).result(60).choices[0].token_ids for r in requests]
    monkeypatch.setattr("llorch_worker.engine.engine.select_sample", lambda *_: torch_ops.sample)
    launch_without_host_reads(monkeypatch)
    with loaded.engine(queue=AtOnce(), model=FreeForward(loaded.model)) as engine:
        with all_at_once(engine):
            generations = [engine.submit(r) for r in requests]
        assert [g.result(60).choices[0].token_ids for g in generations] == expected


def test_the_fused_sampler_serves_every_batch(
    make_sequence: Callable[..., Sequence],
) -> None:
    calls: list[int] = []

    def fused(logits: torch.Tensor, rows: SampledRows, positions: torch.Tensor) -> torch.Tensor:
        calls.append(len(logits))
        return torch_ops.sample(logits, rows, positions)

    sampler = Sampler(50, torch.device("cpu"), fused)
    plain = [make_sequence(4, temperature=t, seed=9) for t in (0, 0.7, 1.0)]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    unfused = Sampler(50, torch.device("cpu"))
    assert (
        sampler.sample(logits.clone(), plain).token_ids
        == unfused.sample(logits.clone(), plain).token_ids
    )
    mixed = [
        *plain[:2],
        make_sequence(4, [2, 3, 3], presence_penalty=1.0, repetition_penalty=1.3, seed=9),
        make_sequence(4, logit_bias={5: 9.0}, min_tokens=3, eos_ids=frozenset({7}), logprobs=2),
    ]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    assert sampler.sample(logits.clone(), mixed) == unfused.sample(logits.clone(), mixed)
    assert calls == [3, 4]
    logits[1, 3] = math.nan
    assert sampler.sample(logits, mixed).damaged == {1}

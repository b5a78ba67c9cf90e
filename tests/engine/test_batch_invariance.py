"""A seeded request gets the same tokens, to the last bit of their log probabilities, alone and in
any company, and after a resume.

``LLORCH_FULL_SIZE=1`` runs ten thousand jobs for each kind of kernels; that takes an hour.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_worker.engine import Engine
from tests.engine.random_company import (
    WAYS,
    model_and_options,
    other_bits,
    other_tokens,
    random_requests,
    run_alone,
    run_in_company,
)
from tests.sizes import sized

JOBS = sized(usual=15, full=10_000)
# test_speculation tries all kinds with a few jobs.
KINDS = sized(usual=["float32", "bfloat16 on torch", "native"], full=[*WAYS])


@pytest.mark.timeout(600 if JOBS < 1_000 else 7_200)
@pytest.mark.parametrize("way", KINDS)
def test_a_jobs_bits_are_the_same_alone_in_company_and_resumed(
    trained_model: Path, demo_model: Path, way: str
) -> None:
    path, options = model_and_options(way, trained_model, demo_model)
    with Engine.load(path, device="cpu", prefix_caching=False, **options) as engine:
        jobs = run_alone(engine, random_requests(JOBS, engine.config.vocab_size, seed=1))
    # Small steps cut prompts into chunks.
    small = Engine.load(path, device="cpu", max_sequences=8, max_step_tokens=40, **options)
    with small as engine:
        answers = run_in_company(engine, jobs, seed=2)
        assert engine.stats().prefix_hits_total > 0
        engine.check_integrity()
    assert other_tokens(jobs, answers) == []
    assert other_bits(jobs, answers) == []

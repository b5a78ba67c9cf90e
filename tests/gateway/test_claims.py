"""What the tests of vLLM and llama.cpp claim holds here, or its table says why not."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tests.gateway.claims import Claim, Door
from tests.gateway.claims_of_llama_cpp import LLAMA_CPP
from tests.gateway.claims_of_vllm import VLLM

SUITES = {"vLLM": VLLM, "llama.cpp": LLAMA_CPP}


@pytest.fixture(scope="module")
def results(door: Door) -> dict[Claim, Future[None]]:
    return {
        claim: result for suite in SUITES.values() for claim, result in suite.results(door).items()
    }


@pytest.mark.parametrize("claim", [each for suite in SUITES.values() for each in suite.params()])
def test_a_claim_of_another_server(claim: Claim, results: dict[Claim, Future[None]]) -> None:
    results[claim].result()


@pytest.mark.parametrize("name", SUITES)
def test_the_page_about_http_counts_them(name: str) -> None:
    assert SUITES[name].is_counted(name)

"""Submit refuses requests that the model cannot serve, and names all their faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from llorch_worker.contract import (
    ContextLengthExceeded,
    GenerationRequest,
    InvalidRequest,
    Journal,
    JournalledChoice,
    LlorchError,
    ModelLoadFailed,
    ModelNotServed,
)
from llorch_worker.engine import Engine
from llorch_worker.engine.memory import load_plan
from llorch_worker.model import Transformer


def refusal(engine: Engine, **fields: Any) -> LlorchError:
    with pytest.raises(LlorchError) as caught:
        engine.submit(GenerationRequest(**fields))
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    return caught.value


def test_another_model_is_not_served(engine: Engine) -> None:
    error = refusal(engine, prompt="x", model="other")
    assert isinstance(error, ModelNotServed)
    assert error.message == f"this engine serves {engine.model_name}, not other"
    assert not error.retriable
    misspelt = refusal(engine, prompt="x", model=f"{engine.model_name}s")
    assert misspelt.message.endswith(f"; did you mean {engine.model_name}?")
    request = GenerationRequest(prompt="x", model=engine.model_name, max_tokens=1)
    engine.submit(request).result(timeout=60)


def test_all_faults_are_reported_at_once(engine: Engine) -> None:
    error = refusal(
        engine, prompt_token_ids=[10**9] * 600, logit_bias={10**9: 1.0}, stop_token_ids=[10**9]
    )
    assert type(error) is InvalidRequest
    assert [fault.field for fault in error.faults] == [
        "prompt_token_ids",
        "logit_bias",
        "stop_token_ids",
        "prompt_token_ids + max_tokens",
    ]


def test_a_prompt_and_an_answer_beyond_the_context_are_refused_with_their_sizes(
    engine: Engine,
) -> None:
    context = engine.max_context
    error = refusal(engine, prompt_token_ids=[1] * 100, max_tokens=context - 99)
    assert isinstance(error, ContextLengthExceeded)
    (fault,) = error.faults
    assert fault.field == "prompt_token_ids + max_tokens"
    assert str(context) in fault.rule
    assert fault.got == f"100 + {context - 99} tokens"
    request = GenerationRequest(prompt_token_ids=[1] * 100, max_tokens=context - 100)
    assert engine.submit(request).result(timeout=60).usage.completion <= context - 100


def test_more_tokens_than_the_context_holds_are_cut_where_that_is_asked_for(
    engine: Engine,
) -> None:
    context = engine.max_context
    fields = {"cut_max_tokens": True, "ignore_eos": True, "max_tokens": 10**6}
    request = GenerationRequest(prompt_token_ids=[1] * (context - 9), **fields)
    choice = engine.submit(request).result(timeout=60).choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (9, "length")
    del fields["max_tokens"]
    boundless = GenerationRequest(prompt_token_ids=[1] * (context - 300), **fields)
    assert engine.submit(boundless).result(timeout=60).usage.completion == 300
    error = refusal(engine, prompt_token_ids=[1] * context, **fields)
    assert isinstance(error, ContextLengthExceeded)
    known = f"This model's maximum context length is {context} tokens. However, "
    assert error.message == f"{known}the prompt is too long: {context} tokens > {context} maximum."
    assert [fault.field for fault in error.faults] == ["prompt_token_ids"]


def test_a_resumed_job_is_not_cut_to_less_than_it_has(engine: Engine) -> None:
    # Begun by a worker with a larger context.
    request = GenerationRequest(
        prompt_token_ids=[1] * (engine.max_context - 2), max_tokens=100, cut_max_tokens=True
    )
    with pytest.raises(ContextLengthExceeded):
        engine.submit(request, journal=Journal({0: JournalledChoice(token_ids=(5, 6, 7))}))


def test_more_log_probabilities_of_a_prompt_than_a_result_may_hold_are_refused(
    engine: Engine,
) -> None:
    ids = [1] * 12_484
    error = refusal(engine, prompt_token_ids=ids, prompt_logprobs=20, max_tokens=0)
    assert [fault.field for fault in error.faults] == [
        "prompt_token_ids + max_tokens",
        "prompt_logprobs",
    ]
    assert "262144" in error.faults[1].rule
    assert error.faults[1].got == "12484 x 21"
    error = refusal(engine, prompt_token_ids=ids[1:], prompt_logprobs=20, max_tokens=0)
    assert isinstance(error, ContextLengthExceeded)


def test_a_request_larger_than_the_pool_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(num_blocks=4)
    error = refusal(engine, prompt_token_ids=[1] * 50, max_tokens=15)
    assert isinstance(error, ContextLengthExceeded)
    assert "maximum context length is 64 tokens" in error.message
    assert "the KV cache" in error.faults[0].rule
    request = GenerationRequest(prompt_token_ids=[1] * 50, max_tokens=14, ignore_eos=True)
    assert engine.submit(request).result(timeout=60).usage.completion == 14


def test_a_text_with_a_token_that_the_model_lacks_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A vocabulary that was added to has ids beyond the embedding.
    beyond = engine.config.vocab_size
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: [1, beyond])
    error = refusal(engine, prompt="Once [PAD] upon")
    assert type(error) is InvalidRequest
    (fault,) = error.faults
    assert (fault.field, fault.got) == ("prompt", str(beyond))


def test_an_end_token_that_the_model_lacks_is_ignored(
    make_engine: Callable[..., Engine], loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = GenerationRequest(prompt="Once", min_tokens=3, max_tokens=6, temperature=0)
    expected = make_engine().submit(request).result(timeout=60).choices[0].token_ids
    known = loaded.tokenizer.eos_token_ids
    monkeypatch.setattr(loaded.tokenizer, "eos_token_ids", known | {-1, 10**9})
    assert make_engine().submit(request).result(timeout=60).choices[0].token_ids == expected


def test_a_hopelessly_long_text_is_refused_beside_every_other_fault(engine: Engine) -> None:
    error = refusal(engine, prompt="x" * 900_000, logit_bias={10**9: 1.0})
    assert [fault.field for fault in error.faults] == ["logit_bias", "prompt + max_tokens"]
    assert isinstance(refusal(engine, prompt="x" * 900_000), ContextLengthExceeded)


def test_a_prompt_without_a_token_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A vocabulary without BOS makes no token of some texts.
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: [])
    error = refusal(engine, prompt="\x00")
    assert error.faults[0].field == "prompt"
    assert "at least one token" in error.faults[0].rule


@pytest.mark.parametrize("ids", [[], [10**9], [-1], [1] * 100_000], ids=len)
def test_logits_of_impossible_ids_are_refused(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="token_ids"):
        engine.logits(ids)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"device": "cuda:99"}, "cuda:99|no NVIDIA driver"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"max_context": 10**6}, "max_context must be at most"),
        ({"max_context": 0}, "at least 1 .got 0."),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes"),
        ({"max_sequences": 0}, "max_sequences must be at least 1"),
        ({"max_step_tokens": 0}, "max_step_tokens must be at least 1"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_with_a_remedy(
    loaded: Any, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        Engine.load(loaded.path, **{"device": "cpu", **settings})
    assert re.search(sentence, caught.value.message)


def test_loading_reports_progress_and_takes_the_files_name(loaded: Any) -> None:
    told: list[tuple[int, int]] = []
    with Engine.load(
        loaded.path,
        device="cpu",
        max_sequences=3,
        max_context=128,
        progress=lambda done, total: told.append((done, total)),
    ) as engine:
        assert engine.model_name == loaded.path.stem
        assert engine.max_context == 128
        assert engine.stats().kv_blocks_total == 3 * 128 // 16
        assert told == sorted(told)
        assert told[-1] == (engine.stats().bytes["weights"],) * 2


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plan, "free_bytes", lambda *_: 100_000)
    monkeypatch.setattr(Transformer, "load", lambda *args, **kwargs: pytest.fail("they were read"))
    with pytest.raises(ModelLoadFailed) as caught:
        Engine.load(loaded.path, device="cpu")
    for part in ("weights need", "only 97.7 KiB is free", "smaller"):
        assert part in caught.value.message

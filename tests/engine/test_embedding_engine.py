"""An engine of vectors: texts of many callers in one pass, each with its own result."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from llorch_worker.contract import InternalError, InvalidRequest, ModelLoadFailed
from llorch_worker.engine.embedding_engine import EmbeddingEngine
from llorch_worker.model.encoder import Pooling, Texts
from tests.model.test_encoder import VOCABULARY, random_model, write_modules
from tests.waiting import wait_until

WORDS = [f"w{number}" for number in range(VOCABULARY - 3)]
LONGEST = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    random_model().save_pretrained(made)
    write_modules(made, {"pooling_mode_mean_tokens": True}, "Normalize")
    vocabulary = {token: at for at, token in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    words = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    words.decoder = tokenizers.decoders.WordPiece()
    words.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    words.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture
def engine(folder: Path) -> Iterator[EmbeddingEngine]:
    with EmbeddingEngine.load(folder, device="cpu", dtype="float32", step_tokens=100) as engine:
        yield engine


def text_of(number: int) -> str:
    return " ".join(WORDS[(number * 31 + at) % len(WORDS)] for at in range(number % 37))


def alone(engine: EmbeddingEngine, ids: list[int]) -> torch.Tensor:
    return engine._encoder.vectors(Texts(torch.tensor(ids), [len(ids)]), engine.pooling)[0]


def test_a_text_has_the_vector_that_it_has_alone(engine: EmbeddingEngine) -> None:
    texts = [engine.encode(text_of(number)) for number in range(60)]
    got = engine.submit(texts).result()
    expected = torch.stack([alone(engine, ids) for ids in texts])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_many_callers_get_their_own_vectors(engine: EmbeddingEngine) -> None:
    def ask(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        texts = [engine.encode(text_of(number)) for number in range(first, first + 20)]
        return engine.submit(texts).result(), torch.stack([alone(engine, ids) for ids in texts])

    with ThreadPoolExecutor(8) as pool:
        for got, expected in pool.map(ask, range(0, 160, 20)):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_short_request_does_not_wait_for_a_long_one(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, began = threading.Event(), threading.Event()
    compute = engine._encoder.vectors

    def slow(texts: Texts, pooling: Pooling) -> torch.Tensor:
        began.set()
        held.wait()
        return compute(texts, pooling)

    monkeypatch.setattr(engine._encoder, "vectors", slow)
    long = engine.submit([[1] * 50] * 40)
    began.wait()
    short = engine.submit([[1, 2]])
    ends: list[str] = []
    long.add_done_callback(lambda _: ends.append("long"))
    short.add_done_callback(lambda _: ends.append("short"))
    held.set()
    long.result()
    assert ends == ["short", "long"]


def test_no_step_takes_more_tokens_than_it_may(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    compute = engine._encoder.vectors

    def noted(texts: Texts, pooling: Pooling) -> torch.Tensor:
        steps.append(len(texts.token_ids))
        return compute(texts, pooling)

    monkeypatch.setattr(engine._encoder, "vectors", noted)
    engine.submit([[1] * (1 + number % LONGEST) for number in range(200)]).result()
    assert max(steps) <= 100
    assert sum(steps) == sum(1 + number % LONGEST for number in range(200))


def test_a_failed_step_fails_those_in_it_and_no_other(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = engine._encoder.vectors

    def failing(texts: Texts, pooling: Pooling) -> torch.Tensor:
        if 7 in texts.token_ids:
            raise RuntimeError("no memory")
        return compute(texts, pooling)

    monkeypatch.setattr(engine._encoder, "vectors", failing)
    with pytest.raises(InternalError, match="RuntimeError"):
        engine.submit([[7] * 30] * 30).result()
    assert engine.submit([[1, 2]]).result().shape == (1, 64)


def test_a_caller_that_gives_up_costs_no_other_one_its_vectors(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, all_came = engine._encoder.vectors, threading.Event()

    def waiting(texts: Texts, pooling: Pooling) -> torch.Tensor:
        all_came.wait()
        return vectors(texts, pooling)

    monkeypatch.setattr(engine._encoder, "vectors", waiting)
    first, *others = (engine.submit([engine.encode("w1")]) for _ in range(3))
    others[0].cancel()
    all_came.set()
    for kept in (first, others[1]):
        assert kept.result(60).shape == (1, engine.config.hidden_size)


@pytest.mark.parametrize("texts", [[[]], [[1] * (LONGEST + 1)], [[VOCABULARY]], [[-1]]])
def test_ids_that_are_none_are_refused_with_their_place(
    engine: EmbeddingEngine, texts: Any
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.submit([[1], *texts])
    assert refused.value.faults[0].field == "input.1"


def test_options_change_a_vector_as_they_say(engine: EmbeddingEngine) -> None:
    texts = ["w1 w2", "w3"]
    whole = engine.embed(texts, normalize=False)
    cut = engine.embed(texts, dimensions=10)
    assert torch.equal(engine.embed(texts, dimensions=10, normalize=False), whole[:, :10])
    torch.testing.assert_close(cut, torch.nn.functional.normalize(whole[:, :10]))
    torch.testing.assert_close(engine.embed(texts).norm(dim=1), torch.ones(2))
    with pytest.raises(InvalidRequest, match="dimensions"):
        engine.embed(texts, dimensions=65)


def test_one_text_is_no_list_of_its_characters(engine: EmbeddingEngine) -> None:
    with pytest.raises(InvalidRequest, match="list of texts"):
        engine.embed("apple")


def test_a_long_text_is_cut_only_if_it_may_be(engine: EmbeddingEngine) -> None:
    text = " ".join(WORDS[:200])
    with pytest.raises(InvalidRequest, match="202 tokens"):
        engine.embed([text])
    ids = engine.encode(text, truncate=True)
    assert len(ids) == LONGEST
    assert (ids[0], ids[-1]) == (1, 2)
    assert engine.embed([text], truncate=True).shape == (1, 64)


def test_a_long_text_is_cut_where_no_ids_are_put_around_it(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text: [*range(3, 3 + len(text))])
    assert engine.encode("a" * 70, truncate=True) == [*range(3, 3 + LONGEST)]


def test_no_texts_have_no_vectors(engine: EmbeddingEngine) -> None:
    assert engine.embed([]).shape == (0, 64)


def test_who_waits_for_an_engine_that_closes_is_told(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = engine._encoder.vectors

    def until_it_closes(texts: Texts, pooling: Pooling) -> torch.Tensor:
        wait_until(lambda: engine._closing)
        return compute(texts, pooling)

    monkeypatch.setattr(engine._encoder, "vectors", until_it_closes)
    waiting = engine.submit([[1] * 60] * 3)
    engine.close()
    with pytest.raises(InternalError, match="closed"):
        waiting.result()
    with pytest.raises(InternalError, match="closed"):
        engine.submit([[1]])


def test_a_model_without_a_rule_is_refused_until_one_is_given(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.is_file() and file.name != "modules.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ModelLoadFailed, match="name a pooling"):
        EmbeddingEngine.load(tmp_path, device="cpu")
    with EmbeddingEngine.load(tmp_path, device="cpu", pooling=Pooling("cls")) as engine:
        assert engine.pooling.kind == "cls"


def test_a_model_that_generates_is_no_encoder(trained_model: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="no encoder"):
        EmbeddingEngine.load(trained_model / "hf", device="cpu")

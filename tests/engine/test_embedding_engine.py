"""An engine of vectors: texts of many jobs in one pass, each with its own result."""

from __future__ import annotations

import json
import shutil
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from llorch_worker.contract import (
    Cancelled,
    DeadlineExceeded,
    EmbedRequest,
    GenerationRequest,
    InternalError,
    InvalidRequest,
    ModelLoadFailed,
    RerankRequest,
    ScoreRequest,
    Vectors,
)
from llorch_worker.contract.errors import InvalidLoadOption
from llorch_worker.contract.journal import read_journal
from llorch_worker.engine.any_engine import AnyEngine
from llorch_worker.engine.embedding_engine import EmbeddingEngine
from llorch_worker.engine.memory.survey import survey
from llorch_worker.engine_options import EngineOptions
from llorch_worker.intake.prepared import Limits
from llorch_worker.model.encoder import Pooling, Texts
from tests.decoders import write_embedder, write_judge
from tests.encoders import LONGEST, WIDTH, WORDS, text_of, write_cross_encoder, write_encoder
from tests.model.test_encoder import random_model, write_gguf
from tests.unigrams import SENTENCES, add_vocabulary, unigram
from tests.waiting import wait_until, wait_until_freed

STEP_TOKENS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def engine(folder: Path) -> Iterator[EmbeddingEngine]:
    load = EmbeddingEngine.load
    with load(folder, device="cpu", dtype="float32", max_step_tokens=STEP_TOKENS) as engine:
        yield engine


def alone(engine: EmbeddingEngine, text: str) -> torch.Tensor:
    assert engine.pooling is not None
    ids = engine.tokenizer.encode(text)
    vector = engine._encoder.vectors(Texts(torch.tensor(ids), [len(ids)]), engine.pooling)[0]
    return torch.nn.functional.normalize(vector, dim=0)


class Gate:
    """Lets no step through before it is open, and notes the ids of those that it has let."""

    def __init__(self, engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.opened = threading.Event(), threading.Event()
        self.steps: list[list[int]] = []
        self._compute = engine._encoder.vectors
        monkeypatch.setattr(engine._encoder, "vectors", self._gated)

    def _gated(self, texts: Texts, pooling: Pooling) -> torch.Tensor:
        self.began.set()
        self.opened.wait()
        self.steps.append(texts.token_ids.tolist())
        return self._compute(texts, pooling)


@pytest.fixture
def gate(engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(engine, monkeypatch)
    yield made
    made.opened.set()


def test_a_text_has_the_vector_that_it_has_alone(engine: EmbeddingEngine) -> None:
    texts = [text_of(number) for number in range(60)]
    expected = torch.stack([alone(engine, text) for text in texts])
    torch.testing.assert_close(engine.embed(texts), expected, atol=1e-5, rtol=1e-5)


def test_many_callers_get_their_own_vectors(engine: EmbeddingEngine) -> None:
    def ask(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        texts = [text_of(number) for number in range(first, first + 20)]
        return engine.embed(texts), torch.stack([alone(engine, text) for text in texts])

    with ThreadPoolExecutor(8) as pool:
        for got, expected in pool.map(ask, range(0, 160, 20)):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_short_job_does_not_wait_for_a_long_one(engine: EmbeddingEngine, gate: Gate) -> None:
    ends: list[str] = []

    def note(name: str) -> Callable[[Any], None]:
        return lambda event: ends.append(name) if event.type == "finished" else None

    long = engine.submit(EmbedRequest(input=[[5] * 50] * 40), on_event=note("long"))
    gate.began.wait()
    engine.submit(EmbedRequest(input=[[5, 6]]), on_event=note("short"))
    gate.opened.set()
    long.result()
    assert ends == ["short", "long"]


def test_the_most_urgent_jobs_alone_are_in_a_step(engine: EmbeddingEngine, gate: Gate) -> None:
    first = engine.submit(EmbedRequest(input=[[5]]))
    gate.began.wait()
    jobs = [
        engine.submit(EmbedRequest(input=[[number]], priority=priority))
        for number, priority in ((6, "low"), (7, "normal"), (8, "high"), (9, "normal"))
    ]
    gate.opened.set()
    for job in (first, *jobs):
        job.result()
    assert gate.steps == [[5], [8], [7, 9], [6]]


def test_a_suspect_is_alone_in_its_step(engine: EmbeddingEngine, gate: Gate) -> None:
    engine.submit(EmbedRequest(input=[[5]]))
    gate.began.wait()
    jobs = [engine.submit(EmbedRequest(input=[[6]]), suspect=each) for each in (False, True)]
    gate.opened.set()
    for job in jobs:
        job.result()
    assert gate.steps == [[5], [6], [6]]


def test_no_step_takes_more_tokens_than_it_may(engine: EmbeddingEngine, gate: Gate) -> None:
    gate.opened.set()
    engine.submit(EmbedRequest(input=[[1] * (1 + at % LONGEST) for at in range(200)])).result()
    assert max(map(len, gate.steps)) <= STEP_TOKENS
    assert sum(map(len, gate.steps)) == sum(1 + at % LONGEST for at in range(200))


def test_a_failed_step_fails_those_in_it_and_no_other(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = engine._encoder.vectors

    def failing(texts: Texts, pooling: Pooling) -> torch.Tensor:
        if 7 in texts.token_ids:
            raise RuntimeError("a defect")
        return compute(texts, pooling)

    monkeypatch.setattr(engine._encoder, "vectors", failing)
    with pytest.raises(InternalError, match="RuntimeError"):
        engine.submit(EmbedRequest(input=[[7] * 30] * 30)).result()
    assert engine.embed(["w1"]).shape == (1, WIDTH)


def test_a_step_without_memory_is_computed_again_in_smaller_ones(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = engine._encoder.vectors

    def small(texts: Texts, pooling: Pooling) -> torch.Tensor:
        if len(texts.token_ids) > 30:
            raise MemoryError
        return compute(texts, pooling)

    expected = engine.embed(["w1 w2 w3 w4 w5 w6 w7 w8"] * 30)
    monkeypatch.setattr(engine._encoder, "vectors", small)
    torch.testing.assert_close(engine.embed(["w1 w2 w3 w4 w5 w6 w7 w8"] * 30), expected)


def test_a_cancelled_job_computes_no_more_and_costs_no_other_its_vectors(
    engine: EmbeddingEngine, gate: Gate
) -> None:
    first = engine.submit(EmbedRequest(input=[[5]]))
    gate.began.wait()
    cancelled, other = (engine.submit(EmbedRequest(input=[[at]])) for at in (6, 7))
    cancelled.cancel()
    gate.opened.set()
    for job in (first, other):
        assert job.result()
    with pytest.raises(Cancelled):
        cancelled.result()
    assert gate.steps == [[5], [7]]


def test_a_job_fails_at_its_deadline(engine: EmbeddingEngine, gate: Gate) -> None:
    engine.submit(EmbedRequest(input=[[5]]))
    gate.began.wait()
    late = engine.submit(EmbedRequest(input=[[6]], deadline_s=0.001), queued_at=1.0)
    gate.opened.set()
    with pytest.raises(DeadlineExceeded):
        late.result()


def test_a_list_tells_its_parts_and_goes_on_after_them(engine: EmbeddingEngine, gate: Gate) -> None:
    gate.opened.set()
    request = EmbedRequest(input=[text_of(number) for number in range(50)], dimensions=10)
    whole = engine.submit(request)
    result, events = whole.result(), list(whole.events())
    parts = [event for event in events if isinstance(event, Vectors)]
    assert [part.index for part in parts[1:]] == [part.index + part.count for part in parts[:-1]]
    assert parts[-1].index + parts[-1].count < 50, "the result has the last ones"
    told = np.frombuffer(b"".join(part.data for part in parts), "<f4").reshape(-1, 10)
    assert np.array_equal(told, np.float32(result.vectors()[: len(told)]))
    gate.steps.clear()
    rest = engine.submit(request, journal=read_journal(events[:4]))
    assert rest.result().embeddings == result.embeddings
    done = sum(part.count for part in parts[:3])
    left = [len(engine.tokenizer.encode(text_of(number))) for number in range(done, 50)]
    assert sum(map(len, gate.steps)) == sum(left)


def test_a_whole_journal_is_a_result_without_a_step(engine: EmbeddingEngine, gate: Gate) -> None:
    gate.opened.set()
    result = engine.submit(EmbedRequest(input=["w1", "w2"])).result()
    gate.steps.clear()
    values = np.float32(result.vectors()).tobytes()
    whole = Vectors(index=0, total=2, width=WIDTH, values=b64encode(values).decode())
    again = engine.submit(EmbedRequest(input=["w1", "w2"]), journal=read_journal([whole]))
    assert again.result().embeddings == result.embeddings
    assert not gate.steps


def test_a_journal_of_another_request_is_refused(engine: EmbeddingEngine) -> None:
    other = engine.submit(EmbedRequest(input=[text_of(number) for number in range(50)]))
    other.result()
    with pytest.raises(InternalError, match="another request"):
        engine.submit(EmbedRequest(input=["w1"]), journal=read_journal(list(other.events())[:3]))


def test_options_change_a_vector_as_they_say(engine: EmbeddingEngine) -> None:
    texts = ["w1 w2", "w3"]
    whole = engine.embed(texts, normalize=False)
    cut = engine.embed(texts, dimensions=10)
    assert torch.equal(engine.embed(texts, dimensions=10, normalize=False), whole[:, :10])
    torch.testing.assert_close(cut, torch.nn.functional.normalize(whole[:, :10]))
    torch.testing.assert_close(engine.embed(texts).norm(dim=1), torch.ones(2))
    told = engine.embed(texts, instruction="w9 ")
    torch.testing.assert_close(told, engine.embed(["w9 w1 w2", "w9 w3"]))


def test_numbers_are_the_same_in_both_forms(engine: EmbeddingEngine) -> None:
    texts = ["w1 w2", "w3"]
    encoded, listed = (
        engine.submit(EmbedRequest(input=texts, encoding_format=each)).result()
        for each in ("base64", "float")
    )
    assert isinstance(encoded.embeddings[0], str)
    assert np.array_equal(np.float32(encoded.vectors()), np.float32(listed.vectors()))


def test_a_job_and_its_vectors_go_with_the_last_name_of_it(engine: EmbeddingEngine) -> None:
    def ended() -> object:
        generation = engine.submit(EmbedRequest(input=["w1 w2"]), on_event=lambda _: None)
        generation.result()
        return generation

    wait_until_freed(ended)


def test_texts_are_compared_by_the_cosine_of_their_vectors(engine: EmbeddingEngine) -> None:
    query, *documents = (text_of(number) for number in range(3, 9))
    vectors = engine.embed([query, *documents])
    expected = vectors[1:] @ vectors[0]
    scored = engine.submit(ScoreRequest(text_1=query, text_2=documents)).result()
    torch.testing.assert_close(torch.tensor(scored.scores), expected)
    ranked = engine.submit(RerankRequest(query=query, documents=documents, top_n=3)).result()
    # By its own scores: these vectors of random weights are nearly the same.
    best = sorted(range(len(documents)), key=lambda index: -scored.scores[index])[:3]
    assert [each.index for each in ranked.results] == best
    pairs = engine.submit(ScoreRequest(text_1=documents, text_2=documents[::-1])).result()
    torch.testing.assert_close(
        torch.tensor(pairs.scores), (vectors[1:] * vectors[1:].flip(0)).sum(1)
    )


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        ({"input": ["w1", " ".join(WORDS[:200])]}, "input.1", "at most 64 tokens"),
        ({"input": [[1], [1] * (LONGEST + 1)]}, "input.1", "at most 64 tokens"),
        ({"input": [[1], [4000]]}, "input.1", "vocabulary"),
        ({"input": [[1] * (LONGEST + 1)], "truncate": True}, "input.0", "texts alone are cut"),
        ({"input": ["w1", [1]], "instruction": "w9 "}, "input.1", "not put before token ids"),
        ({"input": "w1", "dimensions": WIDTH + 1}, "dimensions", "at most 64"),
    ],
)
def test_what_the_model_cannot_do_is_refused_with_its_place(
    engine: EmbeddingEngine, fields: Any, field: str, rule: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.submit(EmbedRequest(**fields))
    (fault,) = refused.value.faults
    assert fault.field == field
    assert rule in fault.rule


def test_a_request_for_text_is_told_what_the_model_does(engine: EmbeddingEngine) -> None:
    request: Any = GenerationRequest(prompt="x")
    with pytest.raises(InvalidRequest, match=r"makes vectors: send llorch\.embed, "):
        engine.submit(request)


def test_a_long_text_is_cut_only_if_it_may_be(engine: EmbeddingEngine) -> None:
    text = " ".join(WORDS[:200])
    cut = engine.submit(EmbedRequest(input=text, truncate=True))
    assert cut.prepared.token_ids[0] == [1, *range(3, 3 + LONGEST - 2), 2]
    assert cut.result().usage.prompt == LONGEST


def test_vectors_are_cut_to_the_sizes_that_the_files_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "sized")
    file = tmp_path / "sized" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"matryoshka_dimensions": [16, 32]}))
    with EmbeddingEngine.load(tmp_path / "sized", device="cpu") as engine:
        assert engine.facts.limits == Limits(*json.loads(json.dumps(astuple(engine.facts.limits))))
        for numbers in (16, 32, WIDTH, None):
            assert engine.embed(["w1"], dimensions=numbers).shape[1] == (numbers or WIDTH)
        with pytest.raises(InvalidRequest, match="one of 16, 32, 64, to which") as refused:
            engine.embed(["w1"], dimensions=20)
        assert [fault.field for fault in refused.value.faults] == ["dimensions"]
    file.write_text(json.dumps(config | {"matryoshka_dimensions": [WIDTH + 1]}))
    with pytest.raises(ModelLoadFailed, match="its matryoshka_dimensions are"):
        EmbeddingEngine.load(tmp_path / "sized", device="cpu")


def test_who_waits_for_an_engine_that_closes_is_told(engine: EmbeddingEngine, gate: Gate) -> None:
    waiting = engine.submit(EmbedRequest(input=[[1] * 60] * 3))
    gate.began.wait()
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: not engine.healthy)
    gate.opened.set()
    closing.join()
    with pytest.raises(Cancelled, match="closed"):
        waiting.result()
    with pytest.raises(InternalError, match="closed"):
        engine.embed(["w1"])


def test_a_model_without_a_rule_is_refused_until_one_is_given(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.is_file() and file.name != "modules.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ModelLoadFailed, match="set LLORCH_POOLING"):
        EmbeddingEngine.load(tmp_path, device="cpu")
    found = set()
    for kind in ("cls", "mean"):
        options = EngineOptions(device="cpu", pooling=kind)
        with EmbeddingEngine.load(tmp_path, options) as engine:
            assert engine.pooling == Pooling(kind)
            found.add(engine.facts.fingerprint)
        asked = survey(tmp_path, options, 1, fingerprints=True)
        assert asked.fingerprint == engine.facts.fingerprint
    assert len(found) == 2, "vectors by one rule do not go on by another"


def test_a_model_that_generates_makes_no_vectors_unless_it_is_told_how(trained_model: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="set LLORCH_POOLING to"):
        EmbeddingEngine.load(trained_model / "hf", device="cpu")


def test_a_file_says_which_engine_it_needs(folder: Path, trained_model: Path) -> None:
    with AnyEngine.load(folder, device="cpu") as engine:
        engine.warm_up()
        assert isinstance(engine, EmbeddingEngine)
        assert not engine.misplaced_tensors()
    with AnyEngine.load(trained_model / "hf", device="cpu") as engine:
        assert engine.facts.tasks == ("llorch.generate",)
    prints = set()
    for kind in ("mean", "last"):
        told = EngineOptions(device="cpu", pooling=kind)
        with AnyEngine.load(trained_model / "hf", told) as engine:
            assert engine.facts.tasks[:2] == ("llorch.generate", "llorch.embed")
            prints.add(engine.facts.fingerprint)
    assert len(prints) == 2


@pytest.mark.parametrize("said", ["encoder", "embedder", "pairs", "judge"])
def test_an_option_that_contradicts_the_files_is_refused(tmp_path: Path, said: str) -> None:
    writers = {
        "encoder": (write_encoder, "mean"),
        "embedder": (write_embedder, "last"),
        "pairs": (write_cross_encoder, "rank"),
        "judge": (write_judge, "rank"),
    }
    write, own = writers[said]
    write(tmp_path)
    prints = set()
    for pooling in (own, None):
        with AnyEngine.load(tmp_path, EngineOptions(device="cpu", pooling=pooling)) as engine:
            prints.add(engine.facts.fingerprint)
    assert len(prints) == 1, "the option changes nothing"
    with pytest.raises(InvalidLoadOption, match=f"pooling is cls, but .* says {own}; unset"):
        AnyEngine.load(tmp_path, EngineOptions(device="cpu", pooling="cls"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingEngine]:
    """A cross-encoder."""
    folder = write_cross_encoder(tmp_path_factory.mktemp("pairs"))
    with EmbeddingEngine.load(folder, device="cpu", dtype="float32") as engine:
        yield engine


def test_a_pair_of_roberta_is_encoded_as_hugging_face_does(tmp_path: Path) -> None:
    write_cross_encoder(tmp_path, XLMRobertaForSequenceClassification)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    with EmbeddingEngine.load(tmp_path, device="cpu", dtype="float32") as engine:
        longest = engine.facts.max_context
        assert longest == LONGEST - 2
        for second in ("w3 w4", " ".join(WORDS[:90])):
            scored = engine.submit(ScoreRequest(text_1="w1 w2", text_2=second, truncate=True))
            given = tokenizer("w1 w2", second, truncation=True, max_length=longest)
            assert [*scored.prepared.token_ids[0]] == given["input_ids"]
            assert 0 < scored.result().scores[0] < 1


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_gguf_file_of_xlm_roberta_gives_transformers_vectors(
    tmp_path: Path, pooling: str
) -> None:
    library, _ = unigram()
    model = random_model(XLMRobertaModel, vocab_size=len(library))
    types = {"mean": 1, "cls": 2}
    path = write_gguf(model, tmp_path / "a.gguf", types[pooling], add_more=add_vocabulary)
    texts = [*SENTENCES, " ", "  a  b ", "ＡＢＣ\x07", " ".join(SENTENCES)]
    expected = []
    for text in texts:
        given = library(text, truncation=True, max_length=LONGEST - 2, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(given["input_ids"]).last_hidden_state[0]
        expected.append(hidden.mean(0) if pooling == "mean" else hidden[0])
    with EmbeddingEngine.load(path, device="cpu", dtype="float32") as engine:
        assert engine.facts.max_context == LONGEST - 2
        job = engine.submit(EmbedRequest(input=texts, truncate=True, encoding_format="float"))
        cosine = torch.cosine_similarity(
            torch.tensor(job.result().embeddings), torch.stack(expected)
        )
        assert cosine.min() >= 0.99999
        with pytest.raises(InvalidRequest, match=f"must be at most {LONGEST - 2} tokens"):
            engine.submit(EmbedRequest(input=texts))


@pytest.mark.parametrize("second", ["こんにちは  世界", " ".join(SENTENCES)])
def test_a_gguf_file_of_xlm_robertas_cross_encoder_scores_as_transformers_does(
    tmp_path: Path, second: str
) -> None:
    library, _ = unigram()
    model = random_model(XLMRobertaForSequenceClassification, num_labels=1, vocab_size=len(library))
    path = write_gguf(model, tmp_path / "a.gguf", 4, squeezed=True, add_more=add_vocabulary)
    given = library(
        "a quick fox", second, truncation=True, max_length=LONGEST - 2, return_tensors="pt"
    )
    with torch.inference_mode():
        expected = model(given["input_ids"]).logits.sigmoid()
    with EmbeddingEngine.load(path, device="cpu", dtype="float32") as engine:
        job = engine.submit(ScoreRequest(text_1="a quick fox", text_2=second, truncate=True))
        assert [*job.prepared.token_ids[0]] == given["input_ids"][0].tolist()
        assert job.result().scores == pytest.approx(expected[0].tolist(), abs=1e-6)


@pytest.mark.parametrize("words", [(3, 5), (50, 40), (10, 200), (200, 10), (100, 100)])
def test_a_pair_is_encoded_and_scored_as_hugging_face_does(
    pairs: EmbeddingEngine, tmp_path: Path, words: tuple[int, int]
) -> None:
    write_cross_encoder(tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    first, second = (" ".join(WORDS[at : at + count]) for at, count in enumerate(words))
    given = tokenizer(
        first,
        second,
        truncation=True,
        max_length=LONGEST,
        return_tensors="pt",
        return_token_type_ids=True,
    )
    with torch.inference_mode():
        expected = model(
            given["input_ids"], token_type_ids=given["token_type_ids"]
        ).logits.sigmoid()
    scored = pairs.submit(ScoreRequest(text_1=first, text_2=second, truncate=True))
    assert [*scored.prepared.token_ids[0]] == given["input_ids"][0].tolist()
    assert scored.result().scores == pytest.approx(expected[0].tolist(), abs=1e-6)


def test_a_cross_encoder_reads_the_instruction_before_the_query_alone(
    pairs: EmbeddingEngine,
) -> None:
    documents = ["w3 w4", "w5"]
    told = pairs.submit(RerankRequest(query="w1", documents=documents, instruction="w9 "))
    whole = pairs.submit(RerankRequest(query="w9 w1", documents=documents))
    assert told.prepared.token_ids == whole.prepared.token_ids


def test_a_cross_encoder_ranks_and_makes_no_vectors(pairs: EmbeddingEngine) -> None:
    documents = [text_of(number) for number in range(4, 10)]
    scores = pairs.submit(ScoreRequest(text_1="w1 w2", text_2=documents)).result().scores
    ranked = pairs.submit(RerankRequest(query="w1 w2", documents=documents)).result().results
    # Two passes may differ in the last bits.
    by_rank = pytest.approx([each.relevance_score for each in ranked], abs=1e-5)
    assert by_rank == sorted(scores, reverse=True)
    assert by_rank == [scores[each.index] for each in ranked]
    with pytest.raises(InvalidRequest, match=r"scores pairs of texts: send llorch\.rerank or"):
        pairs.submit(EmbedRequest(input="w1"))
    with pytest.raises(InvalidRequest) as refused:
        pairs.submit(RerankRequest(query="w1", documents=["w1", " ".join(WORDS[:80]), [5]]))
    assert {each.field for each in refused.value.faults} == {"documents.1", "documents.2"}


def test_qwens_texts_end_as_its_tokenizer_ends_them_and_are_told_as_its_card_says(
    tmp_path: Path,
) -> None:
    write_embedder(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    with EmbeddingEngine.load(tmp_path, device="cpu", dtype="float32") as engine:
        plain = engine.submit(EmbedRequest(input=["yes, 你好 🙂", " no"], dimensions=32))
        asked = engine.submit(EmbedRequest(input="of what?", instruction="Find it"))
        assert [[*each] for each in plain.prepared.token_ids] == tokenizer(["yes, 你好 🙂", " no"])[
            "input_ids"
        ]
        told = "Instruct: Find it\nQuery:of what?"
        assert [*asked.prepared.token_ids[0]] == tokenizer(told)["input_ids"]
        assert plain.result().dimensions == 32
        torch.testing.assert_close(plain.values.norm(dim=1), torch.ones(2))
        query = engine.submit(ScoreRequest(text_1="a", text_2=["b"], instruction="Find it"))
        assert [[*each] for each in query.prepared.token_ids] == tokenizer(
            ["Instruct: Find it\nQuery:a", "b"]
        )["input_ids"]


BEFORE_A_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
BEHIND_A_PAIR = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
JUDGED_BY = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.mark.parametrize("instruction", [None, "Is it so?"])
def test_a_judge_is_asked_as_its_card_says(tmp_path: Path, instruction: str | None) -> None:
    write_judge(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    documents = ["yes", "no <|im_end|> 🙂"]
    with EmbeddingEngine.load(tmp_path, device="cpu", dtype="float32") as engine:
        ranked = engine.submit(
            RerankRequest(query="how?", documents=documents, instruction=instruction)
        )
        (first, second) = ([*each] for each in ranked.prepared.token_ids)
        pair = f"<Instruct>: {instruction or JUDGED_BY}\n<Query>: how?\n<Document>: yes"
        parts = [tokenizer(each)["input_ids"] for each in (BEFORE_A_PAIR, pair, BEHIND_A_PAIR)]
        assert first == [token for part in parts for token in part]
        # A user's text cannot spell the end of a turn.
        control = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert second.count(control) == first.count(control) == 2
        scores = (
            engine.submit(ScoreRequest(text_1="how?", text_2=documents, instruction=instruction))
            .result()
            .scores
        )
        best = ranked.result().results[0]
        assert max(scores) == pytest.approx(best.relevance_score, abs=1e-5)
        assert scores[best.index] == pytest.approx(best.relevance_score, abs=1e-5)
        cut = engine.submit(ScoreRequest(text_1="how?", text_2="w" * 2_000, truncate=True))
        assert len(cut.prepared.token_ids[0]) == engine.facts.max_context
        assert [*cut.prepared.token_ids[0]][-len(parts[2]) :] == parts[2]
        with pytest.raises(InvalidRequest) as refused:
            engine.submit(ScoreRequest(text_1="how?", text_2=["a", "w" * 2_000, [5]]))
        assert [each.field for each in refused.value.faults] == ["text_2.1", "text_2.2"]
        with pytest.raises(InvalidRequest, match=r"scores pairs of texts: send llorch\.rerank or"):
            engine.submit(EmbedRequest(input="a"))

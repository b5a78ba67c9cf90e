"""Models and vocabularies that tests make once, and find in pytest's cache afterwards.

The cache is `.pytest_cache` in the checkout. A folder's name holds a digest of all that makes it: a
changed maker makes it again. Any number of processes may ask at once: one makes it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import sys
import sysconfig
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import gguf

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "llorch_worker" / "assets" / "demo.gguf"
MAKERS = (Path(__file__), DEMO, *sorted((ROOT / "tools").glob("*.py")))
LIBRARIES = ("gguf", "numpy", "sentencepiece", "tokenizers", "transformers")

TRAINED_TYPES = ("f32", "q8_0", "q4_0")

LLAMA_2_SHAPE = {
    "vocab": 32_000, "hidden": 4096, "intermediate": 11008, "layers": 32, "heads": 32,
    "kv_heads": 32, "context_tokens": 4096,
}  # fmt: skip
SCRIPTS = (
    *((0xA1, 0x250), (0x370, 0x530), (0x5D0, 0x5EB), (0x620, 0x64B), (0x905, 0x93A)),
    *((0xE01, 0xE30), (0x3041, 0x3097), (0x30A1, 0x30FB), (0x4E00, 0x5400), (0xAC00, 0xAD00)),
    (0x1F600, 0x1F640),
)
"""Code points of which a vocabulary for many languages has some, beside English and code."""
CORPUS_CHARACTERS = 4_000_000


def made(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The folder that ``make`` fills, from the cache if it is there."""
    folder = cache / f"{name}-{_digest()}"
    if folder.is_dir():
        return folder
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            # Under another name until it is complete.
            with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}.") as partial:
                make(Path(partial) / "made")
                (Path(partial) / "made").rename(folder)
    return folder


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in MAKERS:
        digest.update(path.read_bytes())
    for library in LIBRARIES:
        digest.update(version(library).encode())
    return digest.hexdigest()[:16]


def trained_model(folder: Path) -> None:
    """The demo model as f32.gguf, q8_0.gguf, q4_0.gguf and, in float32, as hf/."""
    from hugging_face import write_folder
    from make_model import block_type, shape_of, tensors, write_model

    folder.mkdir()
    for kind in TRAINED_TYPES:
        shape = shape_of(DEMO)
        table = tensors(shape, block_type(kind))
        path = folder / f"{kind}.gguf"
        list(write_model(path, shape, table, weights=DEMO, vocabulary=DEMO))
    write_folder(folder / "f32.gguf", folder / "hf")


def random_models(folder: Path) -> None:
    """Random weights in every block type that can be written: <type>.gguf."""
    from make_model import SHAPES, block_type, tensors, writable_types, write_model

    folder.mkdir()
    shape = SHAPES["tiny"]
    for kind in writable_types():
        list(write_model(folder / f"{kind}.gguf", shape, tensors(shape, block_type(kind))))


def sentencepiece_vocabulary(folder: Path) -> None:
    """A BPE with byte fallback, trained as Llama-2's was: tokenizer.model and vocab-only.gguf."""
    import sentencepiece

    folder.mkdir()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus(),
        model_writer=model,
        model_type="bpe",
        vocab_size=LLAMA_2_SHAPE["vocab"],
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        max_sentence_length=100_000,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(len(trained))
    kinds = (
        (trained.is_unknown, gguf.TokenType.UNKNOWN),
        (trained.is_control, gguf.TokenType.CONTROL),
        (trained.is_byte, gguf.TokenType.BYTE),
        (lambda token_id: True, gguf.TokenType.NORMAL),
    )
    writer = _vocabulary_writer(folder / "vocab-only.gguf", "llama", "default")
    writer.add_token_list([trained.id_to_piece(i) for i in ids])
    writer.add_token_scores([trained.get_score(i) for i in ids])
    writer.add_token_types([next(kind for is_, kind in kinds if is_(i)) for i in ids])
    writer.add_bos_token_id(trained.bos_id())
    writer.add_eos_token_id(trained.eos_id())
    writer.add_unk_token_id(trained.unk_id())
    _close(writer)


def _vocabulary_writer(path: Path, model: str, pre: str) -> gguf.GGUFWriter:
    from make_model import Shape, add_shape

    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, path.stem, Shape(**LLAMA_2_SHAPE))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    return writer


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def corpus() -> Iterator[str]:
    """Lines of stories, of Python's own source text, and single characters of many scripts."""
    from story_grammar import stories

    for story in stories(seed=0, count=500):
        yield from filter(None, story.text.split("\n"))
    yield from ["Hello, world. Hello!"] * 20
    yield from (line for line in _source_lines() if line.strip())
    for first, end in SCRIPTS:
        for character in map(chr, range(first, end)):
            if unicodedata.category(character)[0] in "LNPS":
                yield character


def _source_lines() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    left = CORPUS_CHARACTERS
    for path in sorted(library.rglob("*.py")):
        if left < 0:
            return
        if {"site-packages", "dist-packages", "test"} & set(path.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        yield from text.splitlines()

"""Models and vocabularies that tests make once, and find in pytest's cache afterwards.

The cache is `.pytest_cache` in the checkout. A folder's name holds a digest of all that makes it: a
changed maker makes it again. Any number of processes may ask at once: one makes it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import json
import sys
import sysconfig
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
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
BYTE_LEVEL_SIZE = 2_000
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits texts before it merges."""


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


def make_trained_model(folder: Path) -> None:
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


def make_random_models(folder: Path) -> None:
    """Random weights in every block type that can be written: <type>.gguf."""
    from make_model import SHAPES, block_type, tensors, writable_types, write_model

    folder.mkdir()
    shape = SHAPES["tiny"]
    for kind in writable_types():
        list(write_model(folder / f"{kind}.gguf", shape, tensors(shape, block_type(kind))))


def make_sentencepiece_vocabulary(folder: Path) -> None:
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


def make_byte_level_vocabulary(folder: Path) -> None:
    """A BPE of bytes, trained as Llama 3's was: tokenizer.json and vocab-only.gguf."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir()
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    trained = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_LEVEL_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(islice(corpus(), 20_000), trainer)
    trained.add_special_tokens(control)
    first = trained.token_to_id(control[0])
    assert first is not None
    trained.post_processor = processors.TemplateProcessing(
        single=f"{control[0]} $A", special_tokens=[(control[0], first)]
    )
    trained.save(str(folder / "tokenizer.json"))
    written = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(written["vocab"], key=written["vocab"].__getitem__)
    writer = _vocabulary_writer(folder / "vocab-only.gguf", "gpt2", "llama-bpe")
    writer.add_token_list([*tokens, *control])
    normal = [gguf.TokenType.NORMAL] * len(tokens)
    writer.add_token_types([*normal, *[gguf.TokenType.CONTROL] * len(control)])
    writer.add_token_merges([" ".join(pair) for pair in written["merges"]])
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(first + 1)
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

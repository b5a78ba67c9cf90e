"""The tokenizer's speed: tokens per second encoding, microseconds per token detokenizing.

    python benches/bench_text.py MODEL [--text FILE]

MODEL is a .gguf file or a Hugging Face folder. Without --text, the text is English, CJK, and one
run without spaces.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from llorch_worker.text import IncrementalDetokenizer, StopStrings, Tokenizer, load_tokenizer
from llorch_worker.weights import open_checkpoint

TEXT_CHARS = 100_000
ENGLISH = "Once upon a time, in a village by the sea, an old clockmaker counted to a hundred. "
STOPS = ("\n\nUser:", "</answer>", "###", "END")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the tokenizer's speed.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    tokenizer = load_tokenizer(open_checkpoint(options.model))
    print(f"load: {1e3 * (time.perf_counter() - started):.0f} ms, {tokenizer.vocab_size} tokens")
    texts = {"English": ENGLISH, "CJK": "日本語の文章、漢字とかな。", "no spaces": "abcdefghij"}
    if options.text:
        texts = {options.text.name: options.text.read_text(errors="replace")}
    for name, unit in texts.items():
        _measure(tokenizer, name, (unit * (TEXT_CHARS // len(unit) + 1))[:TEXT_CHARS])


def _measure(tokenizer: Tokenizer, name: str, text: str) -> None:
    started = time.perf_counter()
    ids = tokenizer.encode(text)
    encoded_s = time.perf_counter() - started
    detokenizer, stops = IncrementalDetokenizer(tokenizer), StopStrings(STOPS)
    started = time.perf_counter()
    pieces = [detokenizer.push((token_id,)) for token_id in ids]
    detokenized_s = time.perf_counter() - started
    started = time.perf_counter()
    for piece in pieces:
        stops.push(piece)
    stopped_s = time.perf_counter() - started
    print(
        f"{name}: {len(text)} characters, {len(ids)} tokens; "
        f"encode {1e3 * encoded_s:.0f} ms; "
        f"detokenize {1e6 * detokenized_s / len(ids):.2f} µs/token; "
        f"{len(STOPS)} stop strings {1e6 * stopped_s / len(ids):.2f} µs/token"
    )


if __name__ == "__main__":
    main()

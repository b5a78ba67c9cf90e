"""Compares what lm-eval computes through a gateway with transformers, in float32 on a processor.

    llorch up --model demo --dtype float32
    pip install "lm-eval[api]" accelerate
    python -m benches.evaluation http://localhost:8080 --model demo --file FILE.gguf

lm-eval's client ``local-completions`` asks for log probabilities and for texts, with its tokenizer
or the gateway's, and sends ids or texts. A text with control tokens cannot be scored: lm-eval has
no way to say ``parse_special``, so the gateway must refuse it. ``FILE`` is SmolLM2's GGUF file,
which the demo runs too.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-3
NEW_TOKENS = 16
PAIRS = (
    ("The capital of France is", " Paris."),
    ("The capital of France is", " a large city on the Seine, and very old."),
    ("2 + 2 =", " 4"),
    ("Question: Is water wet?\nAnswer:", " yes"),
    ("Question: Is water wet?\nAnswer:", " no"),
    ("Once upon a time there was a", " little girl who lived in a forest."),
    ("def add(a, b):\n    return", " a + b\n"),
    ("Der Hund läuft über die", " Straße – schnell."),
    ("東京は", "日本の首都です。"),
    ("It was a fine day \U0001f600 and", " we went out."),
)
CHATS = tuple(
    # lm-eval counts white space at the end of a context as the continuation's.
    (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant", f"\n{answer}")
    for question, answer in (("What is 2 + 2?", "4"), ("Name a colour.", "Blue is a colour."))
)


class Reference:
    """transformers' tokenizer and model of the file."""

    def __init__(self, file: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # transformers does not read tokenizer.ggml.pre. SmolLM2's tokenizer.json has this.
        self.tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )

    def score(self, context: str, continuation: str) -> tuple[float, bool]:
        """The log probability of ``continuation``, and whether it is the likeliest."""
        ids = self._ids(context)
        ids, begin = self._ids(context + continuation), len(ids)
        with torch.no_grad():
            scores = self.model(torch.tensor([ids])).logits[0, begin - 1 : -1].log_softmax(-1)
        chosen = torch.tensor(ids[begin:])
        total = scores.gather(1, chosen.unsqueeze(1)).sum().item()
        return total, bool((scores.argmax(-1) == chosen).all())

    def text(self, context: str) -> str:
        ids = torch.tensor([self._ids(context)])
        out = self.model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
        text: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text.partition("\n\n")[0]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def instances(kind: Any, arguments: list[Any]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=index)
        for index, each in enumerate(arguments)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--file", type=Path, required=True)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    reference = Reference(given.file)
    scores = {pair: reference.score(*pair) for pair in (*PAIRS, *CHATS)}
    contexts = sorted({context for context, _ in PAIRS})
    texts = [reference.text(context) for context in contexts]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        reference.tokenizer.save_pretrained(folder)
        for backend, as_ids in itertools.product(("huggingface", "remote"), (True, False)):
            client = LocalCompletionsAPI(
                base_url=f"{given.url}/v1/completions",
                model=given.model,
                tokenizer=folder if backend == "huggingface" else None,
                tokenizer_backend=backend,
                tokenized_requests=as_ids,
                max_length=2048,
                max_retries=1,
            )
            pairs = [*PAIRS, *CHATS] if as_ids else list(PAIRS)
            found = client.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
            worst = max(
                abs(total - scores[pair][0]) if greedy == scores[pair][1] else math.inf
                for pair, (total, greedy) in zip(pairs, found, strict=True)
            )
            until = {"until": ["\n\n"], "max_gen_toks": NEW_TOKENS, "temperature": 0}
            asked = [(context, dict(until)) for context in contexts]
            made = client.generate_until(instances("generate_until", asked), disable_tqdm=True)
            same = sum(one == other for one, other in zip(made, texts, strict=True))
            control = "scored" if as_ids else "refused" if _refuses(client) else "SCORED"
            failed |= worst > TOLERANCE or same < len(texts) or control == "SCORED"
            print(
                f"{backend:12} {'ids' if as_ids else 'text':5} {len(pairs)} scores, at most "
                f"{worst:.1e} off; {same} of {len(texts)} texts the same; "
                f"control tokens: {control}",
                flush=True,
            )
    return int(failed)


def _refuses(client: LocalCompletionsAPI) -> bool:
    try:
        client.loglikelihood(instances("loglikelihood", [CHATS[0]]), disable_tqdm=True)
    except Exception as error:  # noqa: BLE001 - lm-eval raises what its HTTP client raises
        return "400" in str(error) or "Bad Request" in repr(error)
    return False


if __name__ == "__main__":
    sys.exit(main())

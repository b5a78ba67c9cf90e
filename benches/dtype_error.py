"""The error of bfloat16 on this machine, with each variant of its kernels and with torch's.

``python -m benches.dtype_error MODEL [--device cpu] [--json]``

Each choice of kernels reads a greedy text of the float32 reference, and the logits are compared.
Native CPU kernels multiply a quantised model's weights with 8-bit activations, as llama.cpp does;
torch's kernels dequantise it to bfloat16.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benches.arguments import existing_path, known_errors
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.kernels.native.variants import missing_flags, variants_of
from llorch_worker.settings import KernelChoice

PROMPT = "Once upon a time"


def choices(device: str) -> list[KernelChoice]:
    """torch's kernels, and on the CPU every variant that this processor runs."""
    if device != "cpu":
        return ["auto", "torch"]
    variants = variants_of(platform.machine())
    return [*(variant for variant in variants if not missing_flags(variant)), "torch"]


@dataclass(frozen=True)
class DtypeError:
    """The error of bfloat16 with one choice of kernels, over all places of the text."""

    kernels: str
    places: int
    mean_logit_error: float
    logit_spread: float
    """Standard deviation of the reference's logits, for comparison with the error."""
    mean_divergence: float
    """Kullback-Leibler divergence, in nats, from the reference's distribution of the next token."""
    same_top_token: float
    """Share of places with the same most likely token."""


def measure(model: Path, device: str, tokens: int) -> list[DtypeError]:
    with Engine.load(model, device=device, dtype="float32") as engine:
        request = GenerationRequest(
            prompt=PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True
        )
        text = engine.submit(request).result(600).choices[0].token_ids
        ids = [*engine.tokenizer.encode(PROMPT), *text]
        exact = engine.logits(ids).cpu()
    errors = []
    for kernels in choices(device):
        with Engine.load(model, device=device, dtype="bfloat16", kernels=kernels) as engine:
            logits = engine.logits(ids).cpu()
        divergence = torch.nn.functional.kl_div(
            logits.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        errors.append(
            DtypeError(
                kernels=kernels,
                places=len(ids),
                mean_logit_error=float((logits - exact).abs().mean()),
                logit_spread=float(exact.std()),
                mean_divergence=float(divergence.mean()),
                same_top_token=float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
            )
        )
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=existing_path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    errors = measure(given.model, given.device, given.tokens)
    if given.json:
        print(json.dumps([asdict(error) for error in errors], indent=2))
        return
    print(f"{'kernels':12} divergence  same top token  logit error, of a spread of")
    for error in errors:
        print(
            f"{error.kernels:12} {error.mean_divergence:10.6f}  {error.same_top_token:14.1%}"
            f"  {error.mean_logit_error:11.4f}  {error.logit_spread:14.2f}"
        )


if __name__ == "__main__":
    with known_errors():
        main()

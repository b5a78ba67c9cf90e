"""Writes text with the native kernels, then with kernels that the processor lacks.

python write_text.py MODEL KERNELS
"""

import sys
from pathlib import Path

import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.kernels.native import library
from llorch_worker.kernels.native.variants import variants_of
from llorch_worker.settings import KernelChoice, KvDtype

PROMPT = "Once upon a time there was a little girl who lived in a house by the sea. "
REQUESTS = (
    GenerationRequest(prompt=PROMPT, max_tokens=16, temperature=0),
    GenerationRequest(prompt="One day", max_tokens=16, temperature=0),
)


def write(model: str, kernels: KernelChoice, kv_dtype: KvDtype) -> None:
    """Print the tokens of all requests, which run in one batch."""
    with Engine.load(
        Path(model), "cpu", max_sequences=2, max_context=64, kernels=kernels, kv_dtype=kv_dtype
    ) as engine:
        generations = [engine.submit(request) for request in REQUESTS]
        for generation in generations:
            print(generation.result(timeout=500).choices[0].token_ids)


def main(model: str, kernels: KernelChoice) -> None:
    torch.set_num_threads(1)
    variant = library.native_kernels(kernels).variant
    print(variant)
    write(model, variant, "auto")
    write(model, variant, "int8")
    if kernels == "auto":
        print("beyond", flush=True)
        library._refusal = lambda _: None  # as if the processor had what the next faster ones need
        variants = variants_of("x86_64")
        write(model, variants[variants.index(variant) - 1], "auto")


main(*sys.argv[1:])

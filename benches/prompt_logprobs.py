"""What the log probabilities of a prompt take: memory, time and the size of the result.

    python -m benches.prompt_logprobs [--vocabulary 128256] [--prompt 2048] [--alternatives 20]

Prefills one prompt of random ids in one step, without and with its log probabilities, on the CPU
with a small model of random weights. The peak is the process's high-water mark above what it held
before the job; Linux only.
"""

from __future__ import annotations

import argparse
import gc
import random
from pathlib import Path

import torch

from benches.gpu.random_model import random_llama
from llorch_worker.bench.instruments.no_op_engine import made_up_tokenizer
from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.engine.memory.workspace import scored_rows, workspace_bytes
from llorch_worker.kernels import TorchOps
from llorch_worker.model import LlamaConfig

MAX_SEQUENCES = 16
ROUNDS = 3


def config(vocabulary: int, prompt: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=688,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_context=prompt + 1,
        tie_word_embeddings=False,
    )


def resident_bytes(figure: str) -> int:
    """``VmRSS``, or ``VmHWM``, the most since the last reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(figure)).split()[1]) * 1024


def run(engine: Engine, request: GenerationRequest) -> tuple[int, float, int]:
    """The peak in bytes, seconds, and bytes of the result as JSON."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident_bytes("VmRSS")
    generation = engine.submit(request)
    list(generation.events())
    peak = resident_bytes("VmHWM") - before
    result = generation.result()
    return peak, result.timings.prefill_ms / 1e3, len(result.model_dump_json(exclude_none=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of prompt_logprobs.")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--alternatives", type=int, default=20)
    options = parser.parse_args()
    cpu = torch.device("cpu")
    shape_of = config(options.vocabulary, options.prompt)
    shape = cache_shape(shape_of, shape_of.max_context, dtype=torch.float32, device=cpu)
    sizes = {"max_sequences": MAX_SEQUENCES, "max_step_tokens": options.prompt}
    ids = random.Random(0).choices(range(options.vocabulary), k=options.prompt)
    rows = scored_rows(shape_of, shape, **sizes)
    row_bytes = options.vocabulary * torch.float32.itemsize
    print(f"{options.prompt} tokens in one step, vocabulary {options.vocabulary}, float32")
    print(f"logits of the whole prompt: {human_bytes(options.prompt * row_bytes)}")
    print(f"logits at once:             {human_bytes(rows * row_bytes)}, {rows} rows")
    print(f"planned for a step:         {human_bytes(workspace_bytes(shape_of, shape, **sizes))}")
    with Engine(
        model=random_llama(shape_of, TorchOps(), dtype=torch.float32, device=cpu),
        config=shape_of,
        cache=UnifiedCache.allocate(shape, 2 * shape.context_blocks),
        tokenizer=made_up_tokenizer(options.vocabulary),
        model_name="random",
        weight_bytes=0,
        prefix_caching=False,
        **sizes,
    ) as engine:
        for wanted in (None, 0, options.alternatives):
            request = GenerationRequest(prompt_token_ids=ids, max_tokens=1, prompt_logprobs=wanted)
            runs = [run(engine, request) for _ in range(ROUNDS)]
            peak, seconds, size = max(r[0] for r in runs), min(r[1] for r in runs), runs[-1][2]
            print(
                f"prompt_logprobs {wanted!s:>4}: peak {human_bytes(peak)}, {seconds:.2f} s, "
                f"result {human_bytes(size)}"
            )


if __name__ == "__main__":
    main()

"""``python -m benches.gpu [--json]``: the acceptance of the GPU path on one card.

Random Llama-2-7B-shape weights are made on the device. Decode at several batch sizes and contexts
with CUDA graphs and without, prefill, and transformers' continuous batching, all against the
card's own copy bandwidth and matrix rate, measured in the same run. For memory errors run it under
NVIDIA's tool: ``compute-sanitizer python -m benches.gpu --layers 2 --batches 1,3 --contexts 128``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

import torch

from benches.gpu.random_model import LLAMA_2_7B, random_llama

NO_CUDA = "benches.gpu needs a CUDA device, and torch finds none here; nothing was measured"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.gpu")
    parser.add_argument("--batches", type=numbers, default=(1, 64, 256))
    parser.add_argument("--contexts", type=numbers, default=(128, 512, 1024, 2048))
    parser.add_argument("--prefills", type=numbers, default=(512, 2048))
    parser.add_argument("--layers", type=int, default=LLAMA_2_7B.num_layers)
    parser.add_argument("--kv-dtype", choices=("auto", "fp8", "int8"), default="auto")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written by copies of 4 GiB within the card; the best of ten."""
    source = torch.ones(2**30, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    best_ms = float("inf")
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return 2 * source.nbytes / (best_ms / 1e3)


def main() -> int:
    given = arguments()
    if not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return 2
    # These need a card, or compile for one.
    from benches.gpu.measures import Bench, Case, Rates
    from benches.gpu.peer import continuous_batching_tokens_per_s
    from llorch_worker.cache import PagedKV
    from llorch_worker.cli.bench.instruments.ceilings import measure_ceilings
    from llorch_worker.cli.bench.instruments.provenance import provenance
    from llorch_worker.engine.block_plan import BLOCK_SIZE_TOKENS, available_bytes
    from llorch_worker.kernels import kv_form_of, select_ops

    device, dtype = torch.device("cuda:0"), torch.bfloat16
    config = replace(LLAMA_2_7B, num_layers=given.layers)
    copy = copy_bytes_per_s(device)
    torch.cuda.empty_cache()
    ceilings = measure_ceilings(device, dtype)
    kv_form = kv_form_of(given.kv_dtype)
    ops = select_ops(device, dtype, head_dim=config.head_dim, kv_form=kv_form)
    with torch.inference_mode():
        model = random_llama(config, ops, dtype=dtype, device=device)
        cases = [Case(batch, context) for batch in given.batches for context in given.contexts]
        block_bytes = BLOCK_SIZE_TOKENS * sum(
            PagedKV.slot_bytes(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                form=kv_form,
            ).values()
        )
        room = available_bytes(device) // block_bytes
        fitting = [case for case in cases if case.blocks(BLOCK_SIZE_TOKENS) <= room]
        left_out = [
            f"decode {case.batch} x {case.context}: its KV cache takes "
            f"{case.blocks(BLOCK_SIZE_TOKENS) * block_bytes / 2**30:.0f} GiB, and there are "
            f"{room * block_bytes / 2**30:.0f}"
            for case in cases
            if case not in fitting
        ]
        bench = Bench(
            model,
            Rates(copy, ceilings.flops_per_s),
            cases=[*fitting, *(Case(1, tokens) for tokens in given.prefills)],
            longest=max(*given.contexts, *given.prefills),
            kv_form=kv_form,
            device=device,
        )
        decode = [bench.decode(case, graphs=graphs) for case in fitting for graphs in (True, False)]
        prefill = [bench.prefill(tokens) for tokens in given.prefills]
    peer, reason = None, "left out"
    if not given.no_peer:
        del bench, model
        torch.cuda.empty_cache()
        batch, context = 64, min(given.contexts)
        try:
            rate = continuous_batching_tokens_per_s(
                config, batch=batch, context=context, new_tokens=64, dtype=dtype
            )
            peer, reason = {"batch": batch, "context_tokens": context, "tokens_per_s": rate}, ""
        except (ImportError, RuntimeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
    report = {
        "provenance": provenance(device=torch.cuda.get_device_name(device), seed=0).model_dump(),
        "kernels": ops.name,
        "kv_dtype": given.kv_dtype,
        "layers": config.num_layers,
        "copy_bytes_per_s": copy,
        "read_bytes_per_s": ceilings.read_bytes_per_s,
        "matrix_flops_per_s": ceilings.flops_per_s,
        "left_out": left_out,
        "decode": [asdict(figures) for figures in decode],
        "prefill": [asdict(figures) for figures in prefill],
        "transformers_continuous_batching": peer,
        "transformers_left_out": reason or None,
    }
    if given.json:
        print(json.dumps(report, indent=2))
        return 0
    print(f"copy {copy / 1e12:.2f} TB/s, matrices {ceilings.flops_per_s / 1e12:.0f} TFLOP/s")
    for each in decode:
        print(
            f"decode {each.batch:4} x {each.context_tokens:5} "
            f"{'graphs' if each.graphs else 'eager ':6} {each.step_ms:8.2f} ms "
            f"{each.tokens_per_s:9.0f} tokens/s  copy {each.copy_bandwidth_share:6.1%}  "
            f"roofline {each.roofline_share:6.1%}  idle {each.idle_share:6.1%}"
        )
    for line in left_out:
        print(f"left out: {line}")
    for one in prefill:
        print(
            f"prefill {one.tokens:5} {one.step_ms:8.2f} ms {one.tokens_per_s:9.0f} tokens/s  "
            f"matrix rate {one.matrix_rate_share:6.1%}"
        )
    print(f"transformers continuous batching: {peer or 'not measured, ' + reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

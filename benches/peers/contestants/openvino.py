"""OpenVINO GenAI: continuous batching over a paged KV cache, from the GGUF file itself."""

from __future__ import annotations

import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openvino
import openvino_genai

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work
from benches.peers.contestants.token_times import rate

KV_BLOCK_TOKENS = 16
"""The smallest block that OpenVINO uses on a CPU; with larger ones the cache is larger."""


class OpenVinoContestant:
    """Greedy decoding, with the precisions that OpenVINO chooses for the processor."""

    def __init__(self, terms: Terms) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = terms.most_sequences
        # A prompt is prefilled in one step.
        scheduler.max_num_batched_tokens = max(
            terms.prefill_tokens, terms.context_tokens, terms.most_sequences
        )
        scheduler.num_kv_blocks = terms.most_sequences * (
            -(-terms.context_tokens // KV_BLOCK_TOKENS) + 1
        )
        scheduler.dynamic_split_fuse = False
        scheduler.enable_prefix_caching = False
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            str(terms.model),
            _unused_tokenizer(),
            scheduler,
            "CPU",
            INFERENCE_NUM_THREADS=terms.threads,
        )
        self._requests = 0
        self.ready = Ready(
            versions={"openvino-genai": version("openvino-genai")},
            note="continuous batching, sampling included",
        )

    def warm_up(self, work: Work) -> None:
        self.run(work.shortened())

    def run(self, work: Work) -> Rate:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = work.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        began_s = time.perf_counter()
        handles = [self._add(prompt, config) for prompt in work.prompts]
        times_s: list[list[float]] = [[] for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.perf_counter()
            for handle, times in zip(handles, times_s, strict=True):
                while handle.can_read():
                    (output,) = handle.read().values()
                    times += [now_s] * len(output.generated_ids)
        return rate(work, began_s, times_s)

    def _add(self, prompt: tuple[int, ...], config: Any) -> Any:
        self._requests += 1
        ids = openvino.Tensor(np.array([prompt], np.int64))
        return self._pipeline.add_request(self._requests, ids, config)


def _unused_tokenizer() -> Any:
    """A tokenizer that the pipeline asks for, though it is given token ids. OpenVINO reads only
    GPT-2's kind from GGUF, so that of a Llama's file will not do."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.gguf")
        writer: Any = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab"])
        writer.add_token_types([2, 3, 3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return openvino_genai.Tokenizer(str(path))

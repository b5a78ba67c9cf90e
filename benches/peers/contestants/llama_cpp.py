"""llama.cpp through its C interface, as llama-bench runs it: no sampling, no text."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import llama_cpp

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work

TRIAL_TOKENS = 8
CONTEXT_MULTIPLE = 256
"""llama.cpp pads contexts to a multiple of this."""
KV_TYPES = {"auto": "f16", "int8": "q8_0"}
GGML_TYPES = {"f16": 1, "q8_0": 8}
"""Values of ``enum ggml_type``."""


@dataclass(frozen=True)
class Setting:
    """Settings of a context whose fastest choice depends on machine, file and batch."""

    flash_attention: bool
    unified: bool
    """One KV buffer for all sequences, or one each."""

    def __str__(self) -> str:
        attention = "flash attention" if self.flash_attention else "plain attention"
        return f"{attention}, {'one KV buffer' if self.unified else 'a KV buffer a sequence'}"


SETTINGS = tuple(Setting(flash, unified) for flash in (True, False) for unified in (False, True))


class LlamaCppContestant:
    """Tries the settings in the warm-up and keeps the fastest for each shape of work."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._kv_type = KV_TYPES[terms.kv_dtype]
        self._best: dict[tuple[str, int], Setting] = {}
        llama_cpp.llama_backend_init()
        self._model: Any = llama_cpp.llama_model_load_from_file(
            str(terms.model).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the file")
        self._batch_tokens = max(terms.prefill_tokens, terms.most_sequences)
        self._batch: Any = llama_cpp.llama_batch_init(self._batch_tokens, 0, 1)
        self.ready = Ready(
            versions={"llama-cpp-python": version("llama-cpp-python")},
            note=f"the file's own block types, KV in {self._kv_type}, no sampling",
        )

    def warm_up(self, work: Work) -> None:
        settings = [
            setting
            for setting in SETTINGS
            if (work.sequences > 1 or not setting.unified)
            # llama.cpp has no other attention over quantised values.
            and (setting.flash_attention or self._kv_type == "f16")
        ]
        # A single setting needs no trial; after a long prompt a trial takes minutes.
        self._best[work.kind, work.sequences] = (
            max(settings, key=partial(self._rate, work, min(TRIAL_TOKENS, work.new_tokens)))
            if len(settings) > 1
            else settings[0]
        )

    def run(self, work: Work) -> Rate:
        setting = self._best[work.kind, work.sequences]
        return Rate(self._rate(work, work.new_tokens, setting), str(setting))

    def _rate(self, work: Work, new_tokens: int, setting: Setting) -> float:
        with self._context(work, setting) as context:
            if work.kind == "prefill":
                # A context allocates its first graph, which must not count in a pass.
                self._prefill(context, work.prompts)
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
                return work.sequences * work.prompt_tokens / self._prefill(context, work.prompts)
            self._prefill(context, work.prompts[:1])
            self._copy_first_sequence(context, work.sequences)
            self._step(context, work, 0)
            began_s = time.perf_counter()
            for position in range(1, new_tokens + 1):
                self._step(context, work, position)
            return work.sequences * new_tokens / (time.perf_counter() - began_s)

    @contextmanager
    def _context(self, work: Work, setting: Setting) -> Iterator[Any]:
        tokens = work.prompt_tokens + work.new_tokens + 2
        padded = -(-tokens // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = work.sequences * padded
        options.n_seq_max = work.sequences
        options.n_batch = options.n_ubatch = self._batch_tokens
        options.n_threads = options.n_threads_batch = self._terms.threads
        options.kv_unified = setting.unified
        options.type_k = options.type_v = GGML_TYPES[self._kv_type]
        options.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if setting.flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        context: Any = llama_cpp.llama_init_from_model(self._model, options)
        if not context:
            raise RuntimeError(f"llama.cpp has no memory for {work.sequences} sequences")
        try:
            yield context
        finally:
            llama_cpp.llama_free(context)

    def _prefill(self, context: Any, prompts: tuple[tuple[int, ...], ...]) -> float:
        """Seconds until the logits of every prompt's last token are available."""
        began_s = time.perf_counter()
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            entries = [
                (token, place, sequence, place == last) for place, token in enumerate(prompt)
            ]
            for first in range(0, len(entries), self._batch_tokens):
                self._decode(context, entries[first : first + self._batch_tokens])
        return time.perf_counter() - began_s

    def _copy_first_sequence(self, context: Any, sequences: int) -> None:
        """Gives every other sequence cells of its own with the first one's keys and values.

        A decode takes as long over these as over its own prompt's, whose prefill would take most
        of the bench's time."""
        size = llama_cpp.llama_state_seq_get_size(context, 0)
        state = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(context, state, size, 0)
        for sequence in range(1, sequences):
            if llama_cpp.llama_state_seq_set_data(context, state, size, sequence) != size:
                raise RuntimeError("llama.cpp cannot copy a sequence")

    def _step(self, context: Any, work: Work, position: int) -> None:
        """Decodes one more token of every sequence: the prompt's tokens again."""
        self._decode(
            context,
            [
                (prompt[position % len(prompt)], len(prompt) + position, sequence, True)
                for sequence, prompt in enumerate(work.prompts)
            ],
        )

    def _decode(self, context: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wants_logits
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answered {status}")
        llama_cpp.llama_synchronize(context)

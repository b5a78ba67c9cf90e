"""What full steps really take beside weights and cache, against what is planned for them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.loading import resident_tensors
from llorch_worker.engine.memory.workspace import workspace_bytes
from llorch_worker.kernels import AttentionForm, AttentionRoom
from llorch_worker.kernels.invariant_ops import InvariantOps
from llorch_worker.model import RaggedBatch
from tests.engine.conftest import LoadedModel
from tests.engine.together import all_at_once
from tests.kernels.paged import scene
from tests.kernels.test_attention import NoMask

PLAIN = {"temperature": 1.0, "seed": 1}
EVERYTHING = PLAIN | {
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "logprobs": 1,
}


class PeakBytes(TorchDispatchMode):
    """Counts the most that tensors made in the meantime hold at once."""

    def __init__(self, *kept: object) -> None:
        """``kept`` was there before; views of its tensors do not count."""
        super().__init__()
        self.peak = 0
        self._kept = {
            tensor.untyped_storage().data_ptr()
            for root in kept
            for _, tensor in resident_tensors(root)
        }
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in self._alive and key not in self._kept:
                    self._alive[key] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, key, None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


class Counted:
    """A model that has its thread count from the first step on: passes and sampling."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.counted: PeakBytes | None = None

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        if self.counted is None:
            self.counted = PeakBytes(self.model, cache)
            self.counted.__enter__()
        result: torch.Tensor = self.model.forward(batch, cache)
        return result


def measured_and_planned(
    loaded: LoadedModel, requests: list[GenerationRequest], max_step_tokens: int
) -> tuple[int, int]:
    model = Counted(loaded.model)
    sizes = {"max_sequences": len(requests), "max_step_tokens": max_step_tokens}
    # The native truncation of rows takes less than the plain one.
    with loaded.engine(model=model, kernels="torch", **sizes) as engine:
        with all_at_once(engine):
            generations = [engine.submit(request) for request in requests]
        for generation in generations:
            generation.result(60)
        planned = workspace_bytes(loaded.config, engine.cache.shape, loaded.model.ops, **sizes)
    assert model.counted is not None
    return model.counted.peak, planned


def test_a_step_of_many_that_sample_keeps_to_what_is_planned(loaded: LoadedModel) -> None:
    greedy = EVERYTHING | {"temperature": 0}
    measured = {}
    # Beside rows of another kind, the sampler copies the rest.
    for name, others in {
        "alike": [],
        "one untruncated": [PLAIN],
        "one greedy": [greedy],
        "one untruncated, one greedy": [PLAIN, greedy],
    }.items():
        requests = [
            GenerationRequest(prompt_token_ids=[1], max_tokens=2, **fields)
            for fields in [EVERYTHING] * (64 - len(others)) + others
        ]
        measured[name], planned = measured_and_planned(loaded, requests, 64)
    assert 0.85 * planned < max(measured.values()) <= planned, measured


@pytest.mark.parametrize("max_step_tokens", [4, 64, 400])
@pytest.mark.parametrize("many", [1, 8])
def test_scoring_a_prompt_keeps_to_what_is_planned(
    loaded: LoadedModel, max_step_tokens: int, many: int
) -> None:
    # A few steps of each size.
    prompt = [1] * min(500, 12 * max_step_tokens)
    request = GenerationRequest(prompt_token_ids=prompt, max_tokens=0, prompt_logprobs=20)
    measured, planned = measured_and_planned(loaded, [request] * many, max_step_tokens)
    assert measured <= planned


@pytest.mark.parametrize("max_step_tokens", [64, 400])
def test_a_step_of_a_long_prompt_keeps_to_what_is_planned(
    loaded: LoadedModel, max_step_tokens: int
) -> None:
    request = GenerationRequest(prompt_token_ids=[1] * 500, max_tokens=2)
    measured, planned = measured_and_planned(loaded, [request], max_step_tokens)
    assert 0.85 * planned < measured <= planned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("longest", [100, 2000, 7000, 17_000])
@pytest.mark.parametrize("decodes", [True, False])
def test_attention_over_long_contexts_keeps_to_what_is_planned(
    decodes: bool, longest: int, head_dim: int, dtype: torch.dtype
) -> None:
    sequences, tokens = 9, 100
    contexts = [longest] * sequences if decodes else [longest]
    queries = [1] * sequences if decodes else [tokens]
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype}
    made, ops = scene(contexts, queries, **shape), InvariantOps()
    room = AttentionRoom(
        **shape, max_context=longest, max_sequences=sequences, max_step_tokens=tokens
    )
    with PeakBytes(made.qkv, made.kv, made.sequences.block_tables) as counted:
        out = made.zeros()
        if decodes:
            ops.paged_decode(made.sequences)(made.qkv, made.kv, out, AttentionForm())
        else:
            ops.paged_prefill(made.sequences, NoMask())(made.qkv, made.kv, out, AttentionForm())
    planned = ops.attention_bytes(room)
    assert planned / 2 < counted.peak <= planned

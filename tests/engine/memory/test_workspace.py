"""What full steps really take beside weights and cache, against what is planned for them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llorch_worker.cache import UnifiedCache
from llorch_worker.cache.causal_masks import CausalMasks
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.loading import resident_tensors
from llorch_worker.engine.memory.workspace import workspace_bytes
from llorch_worker.kernels import AttentionForm, AttentionRoom, TorchOps, torch_attention
from llorch_worker.kernels.invariant_ops import InvariantOps
from llorch_worker.model import RaggedBatch
from tests.engine.conftest import LoadedModel
from tests.engine.together import all_at_once
from tests.kernels.paged import scene

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


def taken_and_planned(
    ops: TorchOps, contexts: list[int], queries: list[int], form: AttentionForm, **shape: Any
) -> tuple[int, int]:
    made = scene(contexts, queries, heads=4, kv_heads=2, **shape)
    decodes, device = max(queries) == 1, torch.device("cpu")
    mask = CausalMasks(max_query=64, max_context=max(contexts), device=device)
    with PeakBytes(made.qkv, made.kv, made.sequences.block_tables, mask) as counted:
        out = made.zeros()
        attend = (
            ops.paged_decode(made.sequences) if decodes else ops.paged_prefill(made.sequences, mask)
        )
        attend(made.qkv, made.kv, out, form)
    room = AttentionRoom(
        heads=4,
        kv_heads=2,
        max_context=max(contexts),
        max_sequences=9,
        max_step_tokens=100,
        windows=(form.window,),
        softcap=form.softcap is not None,
        mask_rows=64,
        **shape,
    )
    return counted.peak - out.nbytes, ops.attention_bytes(room)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("longest", [100, 2000, 7000, 17_000])
@pytest.mark.parametrize("queries", [[1] * 9, [100]], ids=["decode", "prefill"])
def test_invariant_attention_over_long_contexts_keeps_to_what_is_planned(
    queries: list[int], longest: int, head_dim: int, dtype: torch.dtype
) -> None:
    contexts, shape = [longest] * len(queries), {"head_dim": head_dim, "dtype": dtype}
    taken, planned = taken_and_planned(InvariantOps(), contexts, queries, AttentionForm(), **shape)
    assert planned / 3 < taken <= planned


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize(
    "form", [AttentionForm(), AttentionForm(window=1500), AttentionForm(softcap=30.0)]
)
@pytest.mark.parametrize("queries", [[1] * 9, [100]], ids=["decode", "prefill"])
def test_attention_over_long_contexts_keeps_to_what_is_planned(
    queries: list[int],
    form: AttentionForm,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(torch_attention.DECODED_AT_ONCE, "cpu", 9000)
    shape = {"head_dim": head_dim, "dtype": dtype, "kv_dtype": kv_dtype}
    contexts = [4000, *(3000 for _ in queries[1:])]
    taken, planned = taken_and_planned(TorchOps(), contexts, queries, form, **shape)
    assert taken <= planned

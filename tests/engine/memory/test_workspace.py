"""What sampling takes beside the logits, against what is planned for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llorch_worker.engine.memory.workspace import SAMPLER_LOGIT_BYTES
from llorch_worker.engine.sampling import truncation
from llorch_worker.engine.sampling.sampler import Sampler
from llorch_worker.engine.sequence import Sequence

ROWS, VOCAB = 6, 4096
PLAIN = {"temperature": 1.0, "seed": 1}
EVERYTHING = PLAIN | {
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "logprobs": 1,
}


class PeakBytes(TorchDispatchMode):
    """The most that tensors held at once of what was made in the meantime."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in self._alive:
                    self._alive[key] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, key, None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncates all rows at once, by sorting."""

    def truncate(weights: torch.Tensor, scaled: torch.Tensor, asked: Any) -> None:
        if asked.rows is None:
            truncation.truncate_by_sorting(weights, scaled, asked)
            return
        kept = weights[asked.rows]
        truncation.truncate_by_sorting(kept, scaled[asked.rows], asked)
        weights[asked.rows] = kept

    monkeypatch.setattr(truncation, "_truncate_one_by_one", truncate)


@pytest.mark.parametrize(
    "fields",
    [
        [EVERYTHING] * ROWS,
        [EVERYTHING] * (ROWS - 1) + [PLAIN],
        [EVERYTHING] * (ROWS - 1) + [EVERYTHING | {"temperature": 0}],
    ],
    ids=["all", "all but a plain one", "all but a greedy one"],
)
@pytest.mark.usefixtures("as_on_a_card")
def test_sampling_keeps_to_what_is_planned_for_it(
    make_sequence: Callable[..., Sequence], fields: list[dict[str, Any]]
) -> None:
    sequences = [make_sequence(4, **each) for each in fields]
    with PeakBytes() as measured:
        logits = torch.randn(ROWS, VOCAB)
        Sampler(VOCAB, torch.device("cpu")).sample(logits, sequences)
    per_logit = measured.peak / (ROWS * VOCAB)
    assert 0.9 * SAMPLER_LOGIT_BYTES < per_logit <= SAMPLER_LOGIT_BYTES

"""A smaller model that guesses the next tokens of the running sequences, all in one batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine.device.step_errors import is_device_lost, is_out_of_memory
from llorch_worker.engine.drafting.model_drafter import ModelDrafter, Trust
from llorch_worker.engine.drafting.step_costs import StepCosts
from llorch_worker.engine.runner import Runner
from llorch_worker.engine.sampling.batch import SamplingBatch
from llorch_worker.engine.sampling.sampler import Chosen, Draw, Sampler
from llorch_worker.engine.sampling.two_stage_search import likeliest
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import Chunk
from llorch_worker.model import ForwardModel

logger = logging.getLogger(__name__)


class DraftModel:
    """Computes guesses greedily, between two steps. Only the engine thread may call it.

    It keeps keys and values in the sequences' own KV blocks: its cache has as many blocks as the
    model's, and a sequence uses the same numbers in both. So its cache needs no accounts. It first
    computes the tokens that it lacks: a prompt, or those that the last step has added. What it has
    computed of a wrong guess is overwritten.
    """

    def __init__(
        self, model: ForwardModel, cache: UnifiedCache, *, vocab_size: int, max_step_tokens: int
    ) -> None:
        """``vocab_size``: that of the model for which it guesses. A pass computes at most
        ``max_step_tokens`` tokens."""
        shape = cache.shape
        self.model = model
        self.cache = cache
        self.costs = StepCosts()
        self.spent_s = 0.0
        """Seconds of all guesses so far."""
        self._max_step_tokens = max_step_tokens
        self._vocab_size = min(vocab_size, shape.vocab_size)
        self._trust = Trust()
        sampler = _Greedy(self._vocab_size, shape.device)
        self._runner = Runner(model, cache, sampler, shape.device)

    def drafter(self) -> ModelDrafter:
        """A drafter for a new sequence."""
        return ModelDrafter(self._trust, self.cache.max_context, self._vocab_size)

    def guess(self, wanted: Items[tuple[Sequence, int]]) -> dict[Sequence, list[int]] | None:
        """The next tokens of each sequence, as many as wanted; None if the model fails.

        Each sequence has a drafter of this model, and blocks for the guesses. One whose prompt
        takes more than one pass is left out until all of it is computed. After a failure, do not
        ask again.
        """
        begun_s = time.perf_counter()
        try:
            guessed, predicted_s = self._guess(wanted)
        except Exception as error:
            if is_device_lost(error):
                raise
            logger.exception("the draft model failed; there will be no drafts from now on")
            if is_out_of_memory(error) and torch.cuda.is_available():
                torch.cuda.empty_cache()
            return None
        took_s = time.perf_counter() - begun_s
        self.spent_s += took_s
        self.costs.note(1, self.costs.of(1) * took_s / predicted_s)
        return guessed

    def _guess(
        self, wanted: Items[tuple[Sequence, int]]
    ) -> tuple[dict[Sequence, list[int]], float]:
        """The guesses, and how long they should take."""
        lengths = dict(wanted)
        chunks, left = [], self._max_step_tokens
        for sequence in lengths:
            drafter, known = _drafter(sequence), len(sequence.token_ids)
            start = min(drafter.computed, known - 1)
            if count := min(left, known - start):
                chunks.append(Chunk(sequence, start, count))
                drafter.computed = start + count
                left -= count
        launches = [self._runner.launch(chunks)]
        predicted_s = self.costs.of(self._max_step_tokens - left)
        while chunks := [
            Chunk(sequence, len(sequence.token_ids) + len(launches) - 1, 1)
            for sequence in launches[-1].sequences
            if lengths[sequence] > len(launches)
        ]:
            launches.append(self._runner.launch(chunks, launches[-1]))
            predicted_s += self.costs.of(len(chunks))
        guesses: dict[Sequence, list[int]] = {}
        for launch in launches:
            for sequence, token_id in zip(
                launch.sequences, launch.read().sampled.token_ids, strict=True
            ):
                guesses.setdefault(sequence, []).append(token_id)
        for sequence, token_ids in guesses.items():
            _drafter(sequence).guessed(token_ids)
        return guesses, predicted_s


class _Greedy(Sampler):
    """Takes the likeliest token, whatever the request says."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._none = SamplingBatch((), vocab_size, device)
        self._size = vocab_size

    def prepare(self, sequences: Items[Sequence], positions: list[int]) -> Draw:  # noqa: ARG002
        """See ``Sampler``."""
        return Draw(self._none, positions, None)

    def choose(self, logits: torch.Tensor, draw: Draw) -> Chosen:
        """See ``Sampler``."""
        chosen = likeliest(logits[:, : self._size])
        return Chosen(chosen, torch.zeros_like(chosen, dtype=torch.float32), None, draw.batch)


def _drafter(sequence: Sequence) -> ModelDrafter:
    assert isinstance(sequence.drafter, ModelDrafter)
    return sequence.drafter

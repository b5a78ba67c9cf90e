"""A decoder that reads texts whole: vectors and scores in one pass, without a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from llorch_worker.cache import BlockPool, PagedKV, Places, UnifiedCache
from llorch_worker.model import RaggedBatch, Transformer
from llorch_worker.model.encoder.config import GGUF_HEAD
from llorch_worker.model.encoder.decoder_rule import FOLDER_HEAD, HeadKind
from llorch_worker.model.encoder.encoder import Texts, positions_within
from llorch_worker.model.encoder.pooling import Pooling
from llorch_worker.weights import Checkpoint

_LAST: Final = Pooling("last")


class DecoderOfTexts:
    """A decoder's weights, and the pass that uses them. Its interface is :class:`.Encoder`'s."""

    def __init__(
        self, model: Transformer, cache: UnifiedCache, head: torch.Tensor | None = None
    ) -> None:
        """``cache``: one of :func:`cache_of_texts`. ``head``: float32 ``[hidden]``, whose product
        with the last token's state is a score's logit."""
        self.model = model
        self._cache = cache
        self._head = head

    def vectors(self, texts: Texts, pooling: Pooling) -> torch.Tensor:
        """float32 ``[texts, width]``, not normalised."""
        parts = [
            pooling.vectors(self._states(ids, lengths), lengths)
            for ids, lengths in self._fitting(texts)
        ]
        return torch.cat(parts)

    def scores(self, texts: Texts) -> torch.Tensor:
        """How sure the model is that the answer is yes: float32 ``[texts, 1]``. Raises ValueError
        without a head."""
        if self._head is None:
            raise ValueError("the model has no head that scores")
        return (self.vectors(texts, _LAST) @ self._head).sigmoid()[:, None]

    def _fitting(self, texts: Texts) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
        """The texts in runs that the cells hold: each begins a block of its own."""
        begin = 0
        for first, end in self._runs(texts.lengths):
            lengths = texts.lengths[first:end]
            yield texts.token_ids[begin : (begin := begin + sum(lengths))], lengths

    def _runs(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        room = self._cache.blocks.total
        first, left = 0, room
        for at, length in enumerate(lengths):
            blocks = -(-length // self._cache.block_size)
            if blocks > left and at > first:
                yield first, at
                first, left = at, room
            left -= blocks
        yield first, len(lengths)

    def _states(self, token_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """What the last layer gives of each token: ``[tokens, hidden]`` in the compute dtype."""
        device, size = self._cache.shape.device, self._cache.block_size
        counts = torch.tensor(lengths)
        blocks = -(-counts // size)
        firsts = blocks.cumsum(0) - blocks
        positions = positions_within(counts)
        # Entries after a text's own blocks are never read; any block id will do.
        tables = (firsts[:, None] + torch.arange(int(blocks.max()))) % self._cache.blocks.total
        slots = firsts.repeat_interleave(counts) * size + positions
        batch = RaggedBatch(
            token_ids=token_ids.to(device),
            positions=positions.to(device),
            query_lengths=tuple(lengths),
            context_lengths=tuple(lengths),
            places=(Places(tables.int().to(device), slots.to(device)),),
            logits_rows=torch.empty(0, dtype=torch.int64, device=device),
        )
        return self.model.states(batch, self._cache)


def cache_of_texts(like: UnifiedCache, tokens: int) -> UnifiedCache:
    """The cells of texts with so many ``tokens``, beside the tables of another cache."""
    shape, count = replace(like.shape, windows=(), decode_rows=0), -(-tokens // like.block_size)
    return replace(
        like,
        shape=shape,
        kv=PagedKV.of_one_layer(shape, count),
        blocks=BlockPool(count),
        windows=(),
        decode=None,
    )


def load_head(
    kind: HeadKind, checkpoint: Checkpoint, model: Transformer, answers: tuple[int, int]
) -> torch.Tensor:
    """What a state is multiplied by for a score's logit: float32 ``[hidden]``. ``answers``: the
    tokens yes and no.

    The softmax over the logits of yes and no is the sigmoid of their difference. Raises
    ModelLoadFailed if the head is no such.
    """
    width, device = model.config.hidden_size, model.final_norm.weight.device
    if kind == "folder":
        checkpoint.require(FOLDER_HEAD, (1, width))
        return checkpoint.load(FOLDER_HEAD, torch.float32)[0].to(device)
    if kind == "gguf":
        checkpoint.require(GGUF_HEAD, (2, width))
        rows = checkpoint.load(GGUF_HEAD, torch.float32)
    elif model.config.tie_word_embeddings:
        rows = model.embedding(torch.tensor(answers, device=device)).float()
    else:
        matrix = checkpoint.load("lm_head.weight", model.embedding.dtype)
        rows = matrix[list(answers)].float()
    return (rows[0] - rows[1]).to(device)

"""Vectors of texts from one encoder: many requests share each forward pass."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Self

import torch

from llorch_worker.contract import Fault, InternalError, InvalidRequest, ModelLoadFailed
from llorch_worker.contract.errors import as_told
from llorch_worker.engine.loading import part_of_load
from llorch_worker.engine.memory.placement import check_kernels, resolve_device, resolve_dtype
from llorch_worker.engine_options import KernelChoice
from llorch_worker.model.encoder import Encoder, EncoderConfig, Pooling, Texts, resolve_encoder
from llorch_worker.model.encoder.config import is_encoder
from llorch_worker.model.encoder.pooling import normalized
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.weights import open_checkpoint, select_linears

STEP_TOKENS = 8192
"""The most tokens of a forward pass. More gain nothing on a CPU, and take memory."""


@dataclass(eq=False)
class _Request:
    """Texts whose vectors one caller waits for."""

    texts: Sequence[Sequence[int]]
    vectors: torch.Tensor
    """float32 ``[texts, width]``, filled as steps end."""
    future: Future[torch.Tensor] = field(default_factory=Future)
    begun: int = 0
    """Texts that a step has taken."""
    ended: int = 0
    """Texts that have their vectors."""


class EmbeddingEngine:
    """One encoder on one device. Any thread may call any method; its own thread alone computes."""

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        pooling: Pooling,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self.config: EncoderConfig = encoder.config
        self.tokenizer = tokenizer
        self.pooling = pooling
        self._encoder = encoder
        self._step_tokens = step_tokens
        self._wake = threading.Condition()
        self._requests: deque[_Request] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="embedding", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kernels: KernelChoice = "auto",
        pooling: Pooling | None = None,
        step_tokens: int = STEP_TOKENS,
    ) -> Self:
        """An engine of a GGUF file, a folder or ``hf:...``.

        ``pooling`` is for files that name no rule, and goes before one that they name.

        Raises:
            ModelLoadFailed: the file is damaged or no encoder, or nobody says how it is pooled.
        """
        checkpoint = open_checkpoint(Path(path))
        if not is_encoder(checkpoint):
            raise ModelLoadFailed(
                f"{checkpoint.path} is no encoder; vectors need a model of the family bert."
            )
        config = resolve_encoder(checkpoint)
        pooling = pooling or config.pooling
        if pooling is None:
            raise ModelLoadFailed(
                f"{checkpoint.path} does not say how vectors are made of its tokens; name a "
                "pooling: mean, cls or last."
            )
        on = resolve_device(device)
        check_kernels(kernels, on)
        parameters = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
        kept = resolve_dtype(dtype, on, parameters=parameters, kernels=kernels)
        with part_of_load("the weights", on, parameters * kept.itemsize):
            linears = select_linears(on, kept, kernels)
            encoder = Encoder.load(checkpoint, config, linears, dtype=kept, device=on)
        return cls(encoder, load_tokenizer(checkpoint), pooling, step_tokens)

    def encode(self, text: str, *, truncate: bool = False) -> list[int]:
        """The ids of ``text``, with those that the model wants around it.

        Raises InvalidRequest if they are too many and it may not ``truncate`` them.
        """
        ids = self.tokenizer.encode(text)
        most = self.config.longest_text
        if len(ids) <= most:
            return ids
        if not truncate:
            raise _refused("input", f"a text must be at most {most} tokens", f"{len(ids)} tokens")
        # As Hugging Face cuts: what stands behind the text stays.
        behind = max(0, len(self.tokenizer.encode("")) - 1)
        return [*ids[: most - behind], *ids[len(ids) - behind :]]

    def submit(self, texts: Sequence[Sequence[int]]) -> Future[torch.Tensor]:
        """The vectors of token ids, float32 ``[texts, width]``, neither cut nor normalised.

        Raises:
            InvalidRequest: a text has no or too many tokens, or ids that are none.
            InternalError: the engine is closed.
        """
        self._check(texts)
        vectors = torch.empty(len(texts), self.config.hidden_size)
        request = _Request(texts, vectors)
        # Nobody can cancel it now, which would fail all requests of its step.
        request.future.set_running_or_notify_cancel()
        with self._wake:
            if self._closing:
                raise InternalError("the engine is closed")
            if texts:
                self._requests.append(request)
                self._wake.notify()
            else:
                request.future.set_result(vectors)
        return request.future

    def embed(
        self,
        texts: Iterable[str],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> torch.Tensor:
        """The vectors of ``texts``: float32 ``[texts, dimensions]``.

        ``dimensions``: the first of the model's, all if None; ``normalize``: whether each vector
        has the length 1, as the model's files say if None; ``truncate``: cuts texts that are too
        long.

        Raises:
            InvalidRequest: a text is too long, ``texts`` is one text and no list, or the model has
                no such ``dimensions``.
            InternalError: the engine is closed or has failed.
        """
        if isinstance(texts, str):  # else each of its characters would be a text
            raise _refused("input", "must be a list of texts", "one text")
        ids = [self.encode(text, truncate=truncate) for text in texts]
        width = self.config.hidden_size
        if dimensions is not None and not 1 <= dimensions <= width:
            raise _refused("dimensions", f"must be 1 to {width}", str(dimensions))
        vectors = self.submit(ids).result()[:, :dimensions]
        return normalized(vectors) if self._normalizes(normalize) else vectors

    def close(self) -> None:
        """Ends the engine; whoever still waits gets an InternalError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _normalizes(self, asked: bool | None) -> bool:
        return self.pooling.normalize if asked is None else asked

    def _check(self, texts: Sequence[Sequence[int]]) -> None:
        most, ids = self.config.longest_text, self.config.vocab_size
        for at, text in enumerate(texts):
            if not 1 <= len(text) <= most:
                raise _refused(f"input.{at}", f"must be 1 to {most} tokens", f"{len(text)} tokens")
            if not 0 <= min(text) <= max(text) < ids:
                raise _refused(f"input.{at}", f"token ids must be 0 to {ids - 1}", "others")

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            try:
                self._compute(taken)
            except Exception as error:  # noqa: BLE001 those who wait get it
                told = as_told(error, "engine")
                for request in {request for request, _ in taken}:
                    self._fail(request, told)
        for request in tuple(self._requests):
            self._fail(request, InternalError("the engine is closed"))

    def _take(self) -> list[tuple[_Request, int]] | None:
        """The texts of the next step: a request and a place in it, each. None at the end."""
        with self._wake:
            self._wake.wait_for(lambda: self._requests or self._closing)
            return None if self._closing else list(self._next_texts())

    def _next_texts(self) -> Iterator[tuple[_Request, int]]:
        """One text of each request in turn, so that a short one never waits for a long one."""
        tokens = 0
        while self._requests:
            request = self._requests[0]
            tokens += len(request.texts[request.begun])
            # The first always goes: a text may be longer than a step.
            if tokens > self._step_tokens and tokens > len(request.texts[request.begun]):
                return
            yield request, request.begun
            request.begun += 1
            self._requests.popleft()
            if request.begun < len(request.texts):
                self._requests.append(request)

    def _compute(self, taken: list[tuple[_Request, int]]) -> None:
        # Neighbours of one length are computed together.
        taken.sort(key=lambda each: len(each[0].texts[each[1]]))
        texts = [request.texts[at] for request, at in taken]
        ids = torch.tensor([token_id for text in texts for token_id in text])
        with torch.inference_mode():
            batch = Texts(ids, [len(text) for text in texts])
            vectors = self._encoder.vectors(batch, self.pooling).cpu()
        for vector, (request, at) in zip(vectors, taken, strict=True):
            request.vectors[at] = vector
            request.ended += 1
            if request.ended == len(request.texts):
                request.future.set_result(request.vectors)

    def _fail(self, request: _Request, error: Exception) -> None:
        with self._wake:
            if request in self._requests:
                self._requests.remove(request)
        if not request.future.done():
            request.future.set_exception(error)


def _refused(name: str, rule: str, got: str) -> InvalidRequest:
    return InvalidRequest.from_faults([Fault(field=name, rule=rule, got=got)])

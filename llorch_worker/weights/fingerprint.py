"""A model's fingerprint: equal for copies of one model, different for models that may answer
differently."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from llorch_worker.weights.checkpoint import Checkpoint, TensorInfo

SAMPLES = 8
SAMPLE_BYTES = 4096
"""Read of each tensor at eight places, the first and the last bytes among them: 23 MB of a model of
70 B parameters, whose 723 tensors are 40 GB or more."""
READERS = 8
"""Threads, because each sample of a cold file waits for the disk."""


def fingerprint(checkpoint: Checkpoint, asked: str = "") -> str:
    """32 hex digits of what decides a model's text and vectors.

    They cover every byte of its configuration, tokenizer, chat templates and rule for vectors,
    every tensor's name, shape and type, and samples of its data. Where the files lie does not
    matter. Missed are edits of some of a tensor's rows that touch no sample, such as of the
    embedding of one token. Training, merging, converting and quantising change whole tensors.

    ``asked``: how vectors are made, where an option says it in place of the files.
    """
    digest = blake2b(digest_size=16)

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    def samples(info: TensorInfo) -> bytes:
        last = max(0, info.stored_bytes - SAMPLE_BYTES)
        starts = sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})
        return b"".join(checkpoint.sample(info.name, at, SAMPLE_BYTES) for at in starts)

    for part in checkpoint.described_by():
        add(part)
    if asked:
        add(asked.encode())
    tensors = [checkpoint.tensors[name] for name in sorted(checkpoint.tensors)]
    with ThreadPoolExecutor(READERS) as pool:
        for info, data in zip(tensors, pool.map(samples, tensors), strict=True):
            add(f"{info.name} {info.shape} {info.dtype_name}".encode(errors="surrogateescape"))
            add(data)
    return digest.hexdigest()

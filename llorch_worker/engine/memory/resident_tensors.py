"""Finds every tensor that a model or a cache keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_OURS = __name__.partition(".")[0]


def resident_tensors(root: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors below ``root``, each once, with the attributes that lead to it.

    Walks objects of this package and plain containers. It needs no help from the layers, so it
    finds the tensors of a new kind of layer too.
    """
    seen: set[int] = set()

    def walk(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        if id(value) in seen:
            return
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield path, value
            return
        # The root may be of any class, such as a wrapper around the model.
        children = _children(value, any_class=value is root)
        if children:
            seen.add(id(value))
            for key, child in children:
                yield from walk(child, f"{path}.{key}" if path else key)

    yield from walk(root, name)


def storage_bytes(root: Any) -> int:
    """Bytes of the tensors below ``root``; views of the same memory count once."""
    storages = {}
    for _, tensor in resident_tensors(root):
        storage = tensor.untyped_storage()
        storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def misplaced_tensors(parts: Mapping[str, object], device: torch.device) -> tuple[str, ...]:
    """The tensors of ``parts`` that are not on ``device``: ``rope.cos on cpu``."""
    return tuple(
        f"{name} on {tensor.device}"
        for root, part in parts.items()
        for name, tensor in resident_tensors(part, root)
        if tensor.device != device
    )


def measured_bytes(parts: Mapping[str, object], device: torch.device) -> dict[str, int]:
    """Bytes that ``parts`` hold. On a card also ``workspace``, the peak of the steps, and
    ``reserved``, the memory that torch's allocator holds beyond that."""
    measured = {name: storage_bytes(part) for name, part in parts.items()}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        measured["workspace"] = max(0, peak - sum(measured.values()))
        measured["reserved"] = max(0, torch.cuda.max_memory_reserved(device) - peak)
    return measured


def _children(value: Any, *, any_class: bool) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if not any_class and type(value).__module__.partition(".")[0] != _OURS:
        return []
    found = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):
        found |= {field.name: getattr(value, field.name) for field in fields(value)}
    for cls in type(value).__mro__:
        for slot in getattr(cls, "__slots__", ()):
            if hasattr(value, slot):
                found[slot] = getattr(value, slot)
    return list(found.items())

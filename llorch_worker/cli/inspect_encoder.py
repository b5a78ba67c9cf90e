"""What ``llorch inspect`` says of an encoder."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import printable
from llorch_worker.contract.quantities import human_bytes, human_count
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.engine.memory.encoder_plan import EncoderPlan


def show_encoder(screen: Screen, settings: Settings, plan: EncoderPlan) -> None:
    """Prints the model and its memory, or one JSON document."""
    document = _document(settings, plan)
    if screen.as_json:
        screen.document(document)
        return
    memory = document.pop("memory")
    pooling = document["pooling"]
    made = "a head scores pairs of texts"
    if pooling is not None:
        length = "of length 1" if pooling["normalize"] else "of any length"
        made = f"{pooling['kind']} pooling, {document['hidden_size']} numbers, {length}"
    rows = {
        "architecture": document["architecture"],
        "parameters": human_count(document["parameters"]),
        "layers": f"{document['layers']}, hidden {document['hidden_size']:,}, "
        f"intermediate {document['intermediate_size']:,}",
        "context": f"{document['context_tokens']:,} tokens a text",
        "makes": made,
        "tasks": ", ".join(document["tasks"]),
        "weights": f"{human_bytes(memory['weights_bytes'])} as {memory['dtype']}",
        "memory": f"{human_bytes(memory['total_bytes'])} of "
        f"{human_bytes(memory['free_bytes'])} free on {memory['device']}: "
        + (memory["misfit"] or "fits"),
    }
    screen.line(printable(document["path"]))
    for label, value in rows.items():
        screen.line(f"  {label:14}{printable(value)}")


def _document(settings: Settings, plan: EncoderPlan) -> dict[str, Any]:
    from llorch_worker.weights.contents import file_bytes, stored_numbers, tensor_types

    checkpoint, config = plan.checkpoint, plan.config
    metadata = checkpoint.metadata
    names = metadata.get("architectures") or [metadata.get("general.architecture")]
    return {
        "path": str(settings.model),
        "name": settings.served_name,
        "layout": checkpoint.layout,
        "file_bytes": file_bytes(checkpoint),
        "architecture": str(names[0]),
        "parameters": stored_numbers(checkpoint),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "context_tokens": plan.longest_context,
        "vocab_size": config.vocab_size,
        "pooling": plan.pooling and asdict(plan.pooling),
        "tasks": plan.tasks,
        "tensor_types": [asdict(kind) for kind in tensor_types(checkpoint)],
        "memory": {
            "device": str(plan.device),
            "dtype": plan.kept_as,
            "max_sequences": plan.options.sequences,
            "weights_bytes": plan.weights_bytes,
            "workspace_bytes": plan.workspace_bytes,
            "process_bytes": plan.process_bytes,
            "vocabulary_bytes": plan.vocabulary_bytes,
            "total_bytes": plan.total_bytes,
            "free_bytes": plan.free_bytes,
            "fits": plan.misfit is None,
            "misfit": plan.misfit,
        },
    }

"""What models are is found out before one is loaded."""

from __future__ import annotations

from pathlib import Path

from llorch_worker.contract import TASK_NAME, EmbedRequest
from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.engine.process.surveying import survey
from llorch_worker.engine_options import EngineOptions
from tests.encoders import LONGEST, write_encoder


def test_a_survey_tells_of_each_model_what_it_is_or_why_it_cannot_be_loaded(
    tmp_path: Path,
) -> None:
    options = EngineOptions(device="cpu", max_sequences=2)
    files = [STORY_MODEL, write_encoder(tmp_path), Path("nowhere.gguf"), Path(__file__)]
    story, encoder, none, damaged = survey(files, options)
    assert (story.refusal, [*story.tasks]) == (None, [TASK_NAME])
    assert story.max_context > 0
    assert (encoder.refusal, encoder.max_context) == (None, LONGEST)
    assert EmbedRequest.task in encoder.tasks
    assert none.refusal is not None
    assert "nowhere.gguf" in none.refusal
    assert damaged.refusal is not None

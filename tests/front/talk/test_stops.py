"""Everything that a run leaves stops where its answers ended.

Run: pytest tests/front/talk/test_stops.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers

from unisono.trainer.plan.task_requests import ExportRequest, GgufRequest, RequestedModel
from unisono.trainer.task import export, gguf_export
from unisono.trainer.task.inference import open_for_inference

Train = Callable[..., Any]


def export_gguf(run: Path, out: Path, listening: Any) -> None:
    """Exports the merged model of a run."""
    gguf_export.run(GgufRequest(model=RequestedModel(str(run)), out=str(out), quantize="f32"), listening)


@pytest.fixture
def base_model(model_dir: Path, make_tokenizer: Callable[[], Any]) -> set[int]:
    """A base model: its end of sequence is not what its template ends answers with. Gives both."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    tokenizer.save_pretrained(model_dir)
    settings = {"eos_token_id": [0, 0], "temperature": 0.7, "_from_model_config": True}
    (model_dir / "generation_config.json").write_text(json.dumps(settings))  # transformers refuses to save it
    return set(tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>"]))


def stops_of_transformers(directory: Path) -> set[int]:
    found = transformers.GenerationConfig.from_pretrained(directory).eos_token_id
    assert found is not None
    return {found} if isinstance(found, int) else set(found)


def stops_of_answers(name: Path, listening: Any, step: int | None = None) -> set[int]:
    """Those of `serve`, `chat` and `generate`."""
    opened = open_for_inference(str(name), step=step, report=listening)
    return opened.stops(opened.template)


def stops_of_llama_cpp(directory: Path) -> set[int]:
    reader = gguf.GGUFReader(next(directory.glob("*.gguf")))
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return {int(reader.fields[key].contents()) for key in keys if key in reader.fields}


@pytest.mark.parametrize("adapter", [{"rank": 2}, None], ids=["adapter", "model"])
def test_result_exports_gguf_and_answers_stop_at_the_training_tokens(
    train_here: Train,
    base_model: set[int],
    tmp_path: Path,
    listening: Any,
    adapter: dict[str, Any] | None,
) -> None:
    run = train_here(adapter=adapter)
    result = run.directory / ("model" if adapter is None else "adapter")
    written = [result]
    for name, step, merge in (("as it is", None, False), ("step", 4, False), ("merged", None, True)):
        written.append(tmp_path / name)
        model = RequestedModel(str(run.directory), step)
        export.run(ExportRequest(model=model, out=str(written[-1]), merge=merge), listening)
    for directory in written:
        assert stops_of_transformers(directory) == base_model, directory
        assert stops_of_answers(directory, listening) == base_model, directory
        settings = json.loads((directory / "generation_config.json").read_text())
        assert settings["temperature"] == 0.7
        assert "_from_model_config" not in settings
    assert stops_of_answers(run.directory, listening) == base_model
    assert stops_of_answers(run.directory, listening, step=4) == base_model
    export_gguf(run.directory, tmp_path / "gguf", listening)
    assert stops_of_llama_cpp(tmp_path / "gguf") == base_model


def test_a_third_stop_of_the_model_itself_is_kept_everywhere(
    train_here: Train, base_model: set[int], model_dir: Path, tmp_path: Path, listening: Any
) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 4]}))
    run = train_here(duration="1 steps")
    wanted = base_model | {4}
    assert stops_of_transformers(run.directory / "adapter") == wanted
    assert stops_of_answers(run.directory, listening) == wanted
    export_gguf(run.directory, tmp_path / "gguf", listening)
    assert stops_of_llama_cpp(tmp_path / "gguf") == wanted

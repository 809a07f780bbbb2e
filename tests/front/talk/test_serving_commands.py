"""`unisono export --for PROGRAM` prints the command that serves what was written, or says why there
is none.

Run: pytest tests/front/talk/test_serving_commands.py
"""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from tests.front.talk.conftest import Listening, Trained
from unisono.base.errors import UsageError
from unisono.front.cli.serving_commands import format_for, serving_command
from unisono.trainer.plan.task_requests import ExportRequest, RequestedModel
from unisono.trainer.task import export


def written(target: object, out: Path, *, merge: bool = False) -> Any:
    request = ExportRequest(model=RequestedModel(str(target)), out=str(out), merge=merge)
    return export.run(request, Listening())


def test_an_adapter_is_served_beside_its_base_with_its_own_template(
    train_here: Callable[..., Trained], tmp_path: Path
) -> None:
    run = train_here(adapter={"rank": 12, "alpha": 8})
    result = written(run.directory, tmp_path / "support")
    command, why = serving_command("vllm", result)
    words = shlex.split(command)
    assert why == ""
    assert words[:3] == ["vllm", "serve", str(run.plan.config.model.path)]
    assert f"support={tmp_path / 'support'}" in words
    assert words[words.index("--max-lora-rank") + 1] == "16"  # vLLM knows 8 and 16, not 12
    assert Path(words[words.index("--chat-template") + 1]).is_file()
    assert serving_command("transformers", result) == (
        "",
        "`transformers serve` loads no adapter; add --merge",
    )


def test_a_merged_model_is_served_as_it_is(train_here: Callable[..., Trained], tmp_path: Path) -> None:
    result = written(train_here().directory, tmp_path / "my model", merge=True)
    out = str(tmp_path / "my model")
    assert shlex.split(serving_command("vllm", result)[0]) == ["vllm", "serve", out, "--served-model-name", "my model"]  # fmt: skip
    assert shlex.split(serving_command("transformers", result)[0]) == ["transformers", "serve", out]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "of kind dora"),
        ({"peft_type": "LOHA"}, "of kind loha"),
        ({"modules_to_save": ["embed_tokens"]}, "with trained embed_tokens"),
        ({"rank_pattern": {"q_proj": 1024}}, "of rank 1024"),
    ],
)
def test_adapters_that_vllm_does_not_load_beside_a_base_are_named(
    changes: dict[str, Any], said: str, train_here: Callable[..., Trained], tmp_path: Path
) -> None:
    result = written(train_here().directory, tmp_path / "out")
    file = tmp_path / "out" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    command, why = serving_command("vllm", result)
    assert command == ""
    assert said in why
    assert "--merge" in why


def test_a_program_has_its_format() -> None:
    assert format_for("ollama", None) == format_for("ollama", "gguf") == "gguf"
    assert format_for("vllm", None) is None
    for program, format_, where in (
        ("tgi", None, "--for"),
        ("vllm", "gguf", "--format"),
        ("ollama", "kohya", "--format"),
    ):
        with pytest.raises(UsageError) as caught:
            format_for(program, format_)
        assert caught.value.problems[0].where == where


@pytest.mark.slow
def test_ollama_gets_a_modelfile_and_its_command(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "Support"
    words = ["export", str(model_dir), str(out), "--for", "ollama", "--json"]
    done = front_server.run([sys.executable, "-m", "unisono", *words], timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["serve"] == f"ollama create support -f {out}/Modelfile && ollama run support"
    assert "FROM ./model-f16.gguf" in (out / "Modelfile").read_text()

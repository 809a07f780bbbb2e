"""What a LLaMA-Factory file means where a command takes RUN|MODEL. Run: pytest tests/llamafactory/test_inference_files.py"""

import json

import pytest

from tests.llamafactory.conftest import Workspace


def test_a_config_of_ours_is_not_a_run(workspace: Workspace) -> None:
    (workspace.root / "train.yaml").write_text(
        "model: builtin:tiny\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n"
    )
    done = workspace.run("chat", "train.yaml")
    assert done.code == 2
    assert "train.yaml is a config" in done.stderr
    assert "give its run, runs/x" in done.stderr


def test_overrides_need_a_file(workspace: Workspace) -> None:
    done = workspace.run("chat", "builtin:tiny", "temperature=0")
    assert done.code == 2
    assert "'temperature=0' is not expected" in done.stderr


def test_a_prompt_with_an_equals_sign_stays_a_prompt(workspace: Workspace) -> None:
    found = workspace.must("--json", "generate", "builtin:tiny", "a=b", "--max-tokens", "2").stdout
    assert json.loads(found)["prompt"] == "a=b"


def test_all_problems_of_the_file_are_named_with_their_lines(workspace: Workspace) -> None:
    (workspace.root / "x.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\ntemplate: qwen3_nothink\ntemperatur: 0.5\nnum_beams: 4\n"
    )
    done = workspace.run("chat", "x.yaml")
    assert done.code == 2
    assert "x.yaml:3" in done.stderr
    assert "did you mean `temperature`?" in done.stderr
    assert "x.yaml:4" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "examples/inference/qwen3.yaml"], "add --data FILE"),
        (["eval", "examples/extras/nlg_eval/llama3_lora_predict.yaml", "--limit", "3"], "set max_samples=N"),
        (["eval", "builtin:tiny"], "add --data FILE"),
        (["export", "examples/inference/qwen3_lora_sft.yaml"], "there is no directory to write to"),
        (["chat", "examples/inference/qwen3.yaml", "adapter_name_or_path=a,b"], "2 adapters are given"),
    ],
)
def test_refusals_name_what_to_do(workspace: Workspace, words: list[str], said: str) -> None:
    done = workspace.run(*words)
    assert done.code == 2
    assert said in done.stderr


def test_an_adapter_that_does_not_exist_is_named(workspace: Workspace) -> None:
    done = workspace.run("generate", "examples/inference/qwen3_lora_sft.yaml", "hi")
    assert done.code == 2
    assert "saves/qwen3-4b/lora/sft" in done.stderr


def test_options_win_over_the_keys_of_the_file(workspace: Workspace) -> None:
    file = "examples/inference/qwen3.yaml"
    short = json.loads(workspace.must("--json", "generate", file, "hi", "--max-tokens", "1").stdout)
    assert short["tokens"] <= 1
    greedy = [
        json.loads(workspace.must("--json", "generate", file, "hi", "max_new_tokens=5", *more).stdout)[
            "answer"
        ]
        for more in (["--temperature", "0"], ["do_sample=false"], ["--top-k", "1"])
    ]
    assert len(set(greedy)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "model: builtin:tiny\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n",
        "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\nstage: sft\ndo_train: true\ndataset: identity\n"
        "template: qwen3_nothink\noutput_dir: runs/x\noverwrite_output_dir: true\n",
    ],
    ids=["ours", "LLaMA-Factory"],
)
def test_a_config_is_read_from_a_pipe(workspace: Workspace, text: str) -> None:
    """As a Slurm job passes it to its nodes."""
    (workspace.root / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    done = workspace.run("train", "/dev/stdin", "--dry-run", given=text)
    assert done.code == 0, done.stderr

"""What a LLaMA-Factory file means where a command takes RUN|MODEL.

Run: pytest tests/trainer/readers/llamafactory_examples/test_inference_files.py
"""

import json

import peft
import pytest
import torch
import transformers

from tests.trainer.readers.llamafactory_examples.conftest import QWEN3, Workspace


def test_a_config_of_ours_is_not_a_run(workspace: Workspace) -> None:
    (workspace.root / "train.yaml").write_text(
        "model: builtin:tiny\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n"
    )
    done = workspace.run("chat", "train.yaml")
    assert done.code == 2
    assert "train.yaml is a config" in done.stderr
    assert "pass its run, runs/x" in done.stderr


def test_overrides_need_a_file(workspace: Workspace) -> None:
    done = workspace.run("chat", "builtin:tiny", "temperature=0")
    assert done.code == 2
    assert "'temperature=0' is not expected" in done.stderr


def test_a_prompt_with_an_equals_sign_stays_a_prompt(workspace: Workspace) -> None:
    found = workspace.must("--json", "generate", "builtin:tiny", "a=b", "--max-tokens", "2").stdout
    assert json.loads(found)["prompt"] == "a=b"


def test_all_problems_of_the_file_are_named_with_their_lines(workspace: Workspace) -> None:
    (workspace.root / "x.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\ntemplate: qwen3_nothink\ntemperatur: 0.5\ntop_k: x\n"
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
        (["chat", "examples/inference/qwen3.yaml", "num_beams=4"], "add `do_sample: false`"),
        (["chat", "examples/inference/qwen3.yaml", "optim.lr=1"], "'optim.lr=1' has no effect here"),
        (["export", "examples/inference/qwen3_lora_sft.yaml", "top_k=1", "out"], "'out' is not key=value"),
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


def test_several_adapters_are_merged_in_turn(workspace: Workspace) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(workspace.root / QWEN3)
    for seed, name in enumerate(("a", "b", "c")):
        torch.manual_seed(seed)
        settings = peft.LoraConfig(
            r=2,
            target_modules=["q_proj", "v_proj"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            use_dora=name == "b",
        )
        peft.get_peft_model(base, settings).save_pretrained(workspace.root / name)
        base = transformers.AutoModelForCausalLM.from_pretrained(workspace.root / QWEN3)
    for name in ("a", "b", "c"):
        base = peft.PeftModel.from_pretrained(base, str(workspace.root / name)).merge_and_unload()
    file = "examples/merge_lora/qwen3_lora_sft.yaml"
    workspace.must("export", file, "adapter_name_or_path=a, b, c", "export_dir=merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(workspace.root / "merged")
    ids = torch.tensor([[5, 9, 300, 41]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, base(ids).logits, atol=1e-4, rtol=1e-4)
    chat = "examples/inference/qwen3_lora_sft.yaml"
    greedy = ("do_sample=false", "max_new_tokens=5")
    answers = [
        json.loads(workspace.must("--json", "generate", chat, "hi", *words, *greedy).stdout)["answer"]
        for words in (
            ("adapter_name_or_path=a,b,c",),
            ("model_name_or_path=merged", "adapter_name_or_path=null"),
        )
    ]
    assert answers[0] == answers[1]
    done = workspace.run("export", chat, "out", "adapter_name_or_path=a,b")
    assert done.code == 2
    assert "add --merge" in done.stderr


def test_beams_repetition_penalty_and_default_system_change_the_answer(workspace: Workspace) -> None:
    file = "examples/inference/qwen3.yaml"
    answers = {
        json.loads(
            workspace.must(
                "--json", "generate", file, "who are you", "do_sample=false", "max_new_tokens=8", *more
            ).stdout
        )["answer"]
        for more in ((), ("num_beams=4",), ("repetition_penalty=3.0",), ("default_system=Be brief.",))
    }
    assert len(answers) == 4


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

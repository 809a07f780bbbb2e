"""Benchmarks of lm-eval: our engine gives the figures of lm-eval's own transformers model.

Run: pytest tests/trainer/task/test_benchmarks.py
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from unisono.base.events import Reporter
from unisono.trainer.plan.task_requests import EvaluateTasksRequest, RequestedModel
from unisono.trainer.task import benchmarks
from unisono.trainer.task.harness_model import HarnessModel
from unisono.trainer.task.inference import open_requested

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: "{file}"}}
test_split: train
fewshot_split: train
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
"""
CHOICE = """
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """
generation_kwargs: {until: ["\\n", "a"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32, whose answers are not all alike."""
    directory = tmp_path_factory.mktemp("benchmarks") / "model"
    torch.manual_seed(0)
    loaded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for parameter in loaded.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    loaded.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Task files, by the kind of their requests."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"what is {a} plus {b}?", "choices": [str(a + b), str(a - b), "none of them at all"]}
        for a in range(6)
        for b in range(4)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {
        "multiple_choice": ("{{question}}", "0", CHOICE),
        "generate_until": ("{{question}}", "{{choices[0]}}", WRITTEN),
        "loglikelihood_rolling": (
            "",
            "{{question}} {{choices[2]}}",
            "metric_list: [{metric: word_perplexity}]",
        ),
    }
    files = {}
    for kind, (text, target, more) in kinds.items():
        files[kind] = folder / f"{kind}.yaml"
        files[kind].write_text(
            TASK.format(name=f"own_{kind}", file=file, kind=kind, text=text, target=target, more=more)
        )
    return files


def theirs(model: Path, file: Path, **settings: Any) -> dict[str, Any]:
    """What lm-eval's own model gives."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=4)
    task = load_yaml(file, resolve_func=True)
    evaluated = simple_evaluate(model=loaded, tasks=[task], task_manager=TaskManager(), **settings)
    return dict(evaluated["results"][f"own_{file.stem}"])


@pytest.mark.processes  # lm_eval asks git for the version of its tasks
@pytest.mark.parametrize(
    ("kind", "shots", "chat"),
    [
        *(
            (kind, *case)
            for kind in ("multiple_choice", "generate_until")
            for case in ((0, False), (2, False), (1, True))
        ),
        ("loglikelihood_rolling", 0, False),  # a whole text has neither examples nor turns
    ],
)
def test_figures_are_those_of_lm_evals_own_model(
    model: Path, tasks: dict[str, Path], kind: str, shots: int, *, chat: bool
) -> None:
    request = EvaluateTasksRequest(
        model=RequestedModel(str(model)), tasks=(str(tasks[kind]),), shots=shots, chat=chat, trust_code=True
    )
    ours = benchmarks.run(request, Reporter(None))
    wanted = theirs(model, tasks[kind], num_fewshot=shots, apply_chat_template=chat)
    figures = ours["figures"][f"own_{kind}"]
    assert figures
    for name, value in figures.items():
        assert value == pytest.approx(wanted[f"{name},none"], rel=1e-5), name


def test_log_likelihoods_answers_and_truncation_are_those_of_lm_evals_own_model(model: Path) -> None:
    opened = open_requested(RequestedModel(str(model)), Reporter(None))
    ours = HarnessModel(opened, lambda *_: None)
    other = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=3)
    assert other.max_length == opened.context
    long = "the quick brown fox " * opened.context
    pairs = [("what is it?", " yes"), ("", "no"), ("a b ", "c d e f"), (long, " the end"), ("x", " y" * 50)]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for mine, wanted in zip(ours.loglikelihood(requests), other.loglikelihood(requests), strict=True):
        assert mine[0] == pytest.approx(wanted[0], rel=1e-5)
        assert mine[1] == wanted[1]
    settings = {"until": ["e"], "max_gen_toks": 20, "do_sample": False}
    asked = [Instance("generate_until", {}, (text, settings), i) for i, (text, _) in enumerate(pairs) if text]
    assert ours.generate_until(asked) == other.generate_until(asked)
    rolled = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ("a short text", long)]
    assert ours.loglikelihood_rolling(rolled) == pytest.approx(other.loglikelihood_rolling(rolled), rel=1e-5)


def evaluated(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "eval", "builtin:tiny", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.processes
def test_the_command_shows_figures_and_writes_what_lm_eval_writes(
    tasks: dict[str, Path], tmp_path: Path
) -> None:
    file = str(tasks["multiple_choice"])
    done = evaluated("--tasks", file, "--trust-code", "--limit", "5", "--out", "out.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "own_multiple_choice" in done.stdout
    assert " ± " in done.stdout
    body = json.loads((tmp_path / "out.json").read_text())
    assert body["n-samples"]["own_multiple_choice"]["effective"] == 5
    assert len(body["samples"]["own_multiple_choice"]) == 5
    shown = evaluated("--tasks", file, "--trust-code", "--limit", "5", "--json", folder=tmp_path)
    figures = json.loads(shown.stdout)["tasks"]["own_multiple_choice"]
    assert figures["acc"] == body["results"]["own_multiple_choice"]["acc,none"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tasks", "hellaswagg"], "did you mean hellaswag?"),
        (["--tasks", "missing.yaml"], "missing.yaml"),
        (["--tasks", "FILE"], "is code that has not been trusted"),
        (["--tasks", "hellaswag", "--data", "x.jsonl"], "--data has no effect here"),
        (["--data", "x.jsonl", "--shots", "2"], "--shots has no effect here"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    tasks: dict[str, Path], tmp_path: Path, words: list[str], text: str
) -> None:
    named = [word.replace("FILE", str(tasks["multiple_choice"])) for word in words]
    done = evaluated(*named, folder=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.processes
def test_a_task_file_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("task: odd\ndoc_to_text: !function nothing.here\n")
    done = evaluated("--tasks", "odd.yaml", "--trust-code", folder=tmp_path)
    assert done.returncode == 2
    assert "the task file cannot be read" in done.stderr
    assert "Traceback" not in done.stderr

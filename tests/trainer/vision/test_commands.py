"""The commands of docs/how-to/pictures-in-rows.md, as a reader types them.

Run: pytest tests/trainer/vision/test_commands.py
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import front_server
from tests.trainer.vision.conftest import write_rows
from tests.vision_models import llava
from unisono.trainer.plan import RunPlan

pytestmark = pytest.mark.processes  # pictures are decoded in them

CONFIG = """
model: {path: ./model, dtype: float32}
adapter: {rank: 4}
train_parts: [language, projector, vision]
data: {train: rows.jsonl, eval: 4, max_length: 256}
optim: {lr: 1.0e-3, part_lr: {vision: 1.0e-4}}
duration: 4 steps
batch: {global: 4}
eval: {every: 2 steps, exact_match: true, samples: 2}
device: cpu
output_dir: runs/pictures
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, rows and a config."""
    llava(tmp_path / "model")
    write_rows(tmp_path)
    (tmp_path / "pictures.yaml").write_text(CONFIG)
    return tmp_path


def _run(folder: Path, *words: str) -> str:
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = front_server.run([sys.executable, "-m", "unisono", *words], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout) + str(done.stderr)


def test_a_pair_is_shown_with_its_pictures_once(folder: Path) -> None:
    row = {
        "prompt": "<image>what is this?",
        "chosen": "a square",
        "rejected": "a dog",
        "images": ["pictures/0.png"],
    }
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)

    shown = _run(
        folder, "data", "preview", "pictures.yaml", "objective=dpo", "eval.exact_match=false", "--rows", "3"
    )

    assert shown.count("picture pictures/0.png: 96 × 64, 16 tokens") == 3
    assert shown.count("<image> × 16") == 6


def test_the_commands_of_the_page_work_one_after_the_other(folder: Path) -> None:
    shown = _run(folder, "data", "preview", "pictures.yaml")
    assert "picture pictures/0.png: 96 × 64, 16 tokens" in shown
    assert "<image> × 16" in shown

    screen = _run(folder, "train", "pictures.yaml")
    assert "20 pictures: rows have 16 tokens of them (median;" in screen
    assert "projector: " in screen
    assert "read back" in screen
    plan = RunPlan.model_validate(json.loads((folder / "runs/pictures/plan.json").read_text()))
    assert plan.model.reads_pictures

    _run(
        folder, "generate", "runs/pictures", "What is this?", "--image", "pictures/1.png", "--max-tokens", "4"
    )
    measured = _run(folder, "eval", "runs/pictures", "--data", "rows.jsonl")
    assert "answers compared  24" in measured
    _run(folder, "export", "runs/pictures", "OUT", "--merge")
    assert (folder / "OUT" / "processor_config.json").is_file()


def test_a_file_of_prompts_has_pictures_as_rows_have_them(folder: Path) -> None:
    parts = [{"type": "image", "image": "pictures/1.png"}, {"type": "text", "text": "What is this?"}]
    rows: list[dict[str, object]] = [
        {"prompt": "What is this?", "images": ["pictures/1.png"]},
        {"messages": [{"role": "user", "content": "<image>What is this?"}], "images": ["pictures/1.png"]},
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": "What is this?"},
        {"prompt": "What is this?", "image": "pictures/2.png"},
    ]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["generate", "model", "--file", "prompts.jsonl", "--max-tokens", "8", "--out", "answers.jsonl"]
    _run(folder, *words)
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert answers[0]["prompt"][0]["content"] == "<image: pictures/1.png>What is this?"
    assert answers[0]["answer"] == answers[1]["answer"] == answers[2]["answer"]
    assert answers[3]["prompt"] == "What is this?"
    alone = _run(
        folder, "generate", "model", "What is this?", "--image", "pictures/1.png", "--max-tokens", "8"
    )
    assert answers[0]["answer"] in alone

    rows[3] = {"prompt": "What is this?", "images": ["pictures/missing.png"]}
    rows[4] = {"prompt": "<image> or <image>?", "images": ["pictures/1.png"]}
    rows.append({"prompt": "<video>what?", "videos": ["pictures"]})
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    refused = front_server.run(
        [sys.executable, "-m", "unisono", *words[:-1], "new.jsonl"], cwd=folder, env=env
    )
    assert refused.returncode == 2, refused.stderr
    assert "prompts.jsonl:4" in refused.stderr
    assert "prompts.jsonl:5" in refused.stderr
    assert "it has a video, and only pictures are read here" in refused.stderr
    assert "Traceback" not in refused.stderr

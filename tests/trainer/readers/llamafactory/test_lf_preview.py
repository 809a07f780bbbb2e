"""`unisono data preview` with templates of LLaMA-Factory: ids and loss as JSON, preference rows,
and refusals.

Run: .venv/bin/python -m pytest tests/trainer/readers/llamafactory/test_lf_preview.py
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import front_server

HERE = Path(__file__).parent / "golden"
GOLDEN = json.loads(gzip.decompress((HERE / "golden.json.gz").read_bytes()))
SOURCES = {
    "identity": "format: alpaca",
    "alpaca_en_demo": "format: alpaca",
    "glaive_toolcall_en_demo": "format: sharegpt",
    "dpo_en_demo": "format: preference",
    "kto_en_demo": "format: preference",
    "c4_demo": "format: text",
}
Preview = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def preview(tmp_path: Path) -> Preview:
    """Runs the command on rows in a JSON file, with a model that has a tokenizer and a
    config.json.
    """
    model = tmp_path / "model"
    shutil.copytree(HERE / "tokenizer", model)
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 2000}', encoding="utf-8")

    def run(rows: list[Any], source: str, *more: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        config = tmp_path / "config.yaml"
        config.write_text(
            f"model: {{path: {model}}}\ndata: {{train: [{{path: rows.json, {source}}}]}}\noutput_dir: out\n",
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "unisono", "data", "preview", str(config), *more]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return front_server.run(command, env=environment, cwd=tmp_path)

    return run


def settings_of(case: dict[str, Any]) -> list[str]:
    options = case["options"]
    settings = [f"data.template=lf:{case['template']}", "data.date=2026-11-21", "data.too_long=balanced"]
    settings.append(f"data.max_length={options.get('cutoff_len', 2048)}")
    if options.get("train_on_prompt"):
        settings.append("data.loss_on=all")
    if options.get("mask_history"):
        settings.append("data.loss_on=last-answer")
    if case["stage"] == "pt":
        settings += ["objective=pretrain", "adapter=null"]
    return settings


def assert_same(row: dict[str, Any], ids: list[int | None], labels: list[int]) -> None:
    assert row["ids"] == ids
    assert row["loss"] == [False, *(label != -100 for label in labels[1:])]


ROWS_ALONE = [
    case for case in GOLDEN["cases"] if not case["options"].get("packing") and case["stage"] != "sft_packed"
]
SAMPLE = [
    *ROWS_ALONE[::60],
    *(next(case for case in ROWS_ALONE if case["stage"] == stage) for stage in ("pt", "rm", "kto")),
]


@pytest.mark.parametrize(
    "case", SAMPLE, ids=lambda case: f"{case['stage']}-{case['template']}-{case['dataset']}"
)
def test_ids_and_loss_are_those_of_the_golden_cases(case: dict[str, Any], preview: Preview) -> None:
    dataset = case["dataset"]
    done = preview(
        GOLDEN["rows"][dataset], SOURCES[dataset], *settings_of(case), "--json", "--ids", "--rows", "9"
    )
    assert done.returncode == 0, done.stderr
    rows, out = json.loads(done.stdout)["rows"], case["out"]
    assert len(rows) == len(GOLDEN["rows"][dataset])
    for i, row in enumerate(rows):
        if case["stage"] == "rm":
            for name in ("chosen", "rejected"):
                assert_same(row[name], out[f"{name}_input_ids"][i], out[f"{name}_labels"][i])
            continue
        assert_same(row, out["input_ids"][i], out.get("labels", out["input_ids"])[i])
        if case["stage"] == "kto":
            assert_same(row["kl"], out["kl_input_ids"][i], out["kl_labels"][i])
            assert row["desirable"] == out["kto_tags"][i]


def test_tokens_that_the_tokenizer_does_not_have_are_null_with_a_warning(preview: Preview) -> None:
    done = preview(
        GOLDEN["rows"]["identity"], "format: alpaca", "data.template=lf:chatglm3", "--json", "--ids"
    )
    found = json.loads(done.stdout)
    assert found["rows"][0]["ids"][:3] == [None, None, 2000]
    assert any("[gMASK]" in warning for warning in found["data"]["warnings"])


def test_an_unknown_template_gives_the_tokenizers_own_with_a_rendered_row(
    preview: Preview, tmp_path: Path
) -> None:
    own = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}{% if add_generation_prompt"
        " %}[assistant] {% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(own, encoding="utf-8")
    done = preview(GOLDEN["rows"]["identity"], "format: alpaca", "data.template=lf:wholly_other")
    assert done.returncode == 0, done.stderr
    assert "no template lf:wholly_other" in done.stderr
    assert "[user] hi</s>[assistant] Hello" in done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.template=lf:qwen3_nothnk", "lf:qwen3_nothink"),
        ("data.thinking=false", "only templates of LLaMA-Factory"),
        ("data.date=2026-11-21", "only templates of LLaMA-Factory"),
        ("data.system=Be brief.", "only templates of LLaMA-Factory"),
        ("data.date=tomorrow", "YYYY-MM-DD"),
    ],
)
def test_refusals_name_the_key(setting: str, words: str, preview: Preview) -> None:
    done = preview(GOLDEN["rows"]["identity"], "format: alpaca", setting)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_ids_need_json(preview: Preview) -> None:
    done = preview(GOLDEN["rows"]["identity"], "format: alpaca", "data.template=lf:qwen", "--ids")
    assert done.returncode == 2
    assert "add --json" in done.stderr


def test_cut_rows_are_in_the_ledger(preview: Preview) -> None:
    more = ("data.template=lf:qwen3_nothink", "data.too_long=balanced", "data.max_length=32", "--json")
    found = json.loads(preview(GOLDEN["rows"]["alpaca_en_demo"], "format: alpaca", *more).stdout)
    total = found["ledger"]["total"]
    assert (total["rows"], total["used"], total["cut"]) == (3, 3, 3)
    assert total["tokens"] == 96
    assert total["tokens_cut"] > 0
    assert len(found["notes"]) == 3


def test_rows_whose_roles_do_not_alternate_are_bad_with_their_place(preview: Preview) -> None:
    bad = [
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
            ]
        }
    ]
    rows = GOLDEN["rows"]["glaive_toolcall_en_demo"] + bad
    more = ("data.template=lf:qwen", "data.too_long=balanced")
    done = preview(rows, "format: sharegpt", *more)
    assert done.returncode == 2
    assert "rows.json#4" in done.stderr
    assert "turn 2 is of the user" in done.stderr
    found = json.loads(preview(rows, "format: sharegpt", *more, "data.on_bad_row=skip", "--json").stdout)
    assert found["ledger"]["total"]["bad"] == 1

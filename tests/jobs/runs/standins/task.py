"""A preparation that knows the answer: 40 sequences of 10 tokens each; it may be told to refuse,
die or wait.

And an export.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from unisono.base.child import leave, parse_child_arguments, run_child
from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.trainer.plan.task_requests import StorageRequest
from unisono.trainer.task import checkpoint_tasks

SPLIT = {
    "rows": 40,
    "sequences": 40,
    "tokens": 400,
    "loss_tokens": 200,
    "longest_sequence": 10,
    "longest_row": 10,
}
DATA = {
    "cache_dir": "/nowhere", "cache_hit": False, "cache_reason": "first time", "train": SPLIT, "eval": SPLIT,
    "ledger": {"rows": 80, "used": 80, "eval": 40}, "formats": ["text"], "template": "none", "total_steps": 5,
    "digest": "d",
}  # fmt: skip
MODEL = {
    "directory": "/nowhere", "model_type": "llama", "parameters": 1000, "hidden_size": 8, "layers": 1, "intermediate_size": 16,
    "vocab_size": 32, "linear_parameters": 800, "linear_in_out": 64, "weight_bytes": 4000, "digest": "m",
}  # fmt: skip


def body(report: Reporter, request: dict[str, Any]) -> dict[str, Any]:
    report.phase("tokenise", "tokenising", done=1, total=2)
    what = os.path.basename(request["config"]["data"]["train"])  # noqa: PTH119
    if what == "refuse":
        raise DataError.of("row 3 has no answer", where="train.jsonl:3", fix="mend it")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait":
        while True:
            signal.pause()
    return {"data": DATA, "model": MODEL}


def export(report: Reporter, request: dict[str, Any]) -> dict[str, Any]:
    assert (Path(request["model"]["target"]) / "result.json").exists()
    Path(request["out"]).mkdir()
    return {"out": request["out"]}


if __name__ == "__main__":
    arguments = parse_child_arguments(sys.argv[1:], named=True)
    request = json.loads(arguments.file.read_text())
    tasks = {
        "prepare": body,
        "export": export,
        "storage": lambda report, request: checkpoint_tasks.run_storage(
            TypeAdapter(StorageRequest).validate_python(request), report
        ),
    }
    task = tasks[arguments.name]
    leave(run_child(lambda report: task(report, request), arguments))

"""One device: no process group, no socket, whatever a launcher has left behind; with the real
worker.

Run: pytest tests/jobs/runs/test_one_device.py
"""

import contextlib
import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests import front_server
from tests.session_server import cache_with_kernels
from unisono.guard.facts.processes import living_ranks

pytestmark = pytest.mark.slow

HOSTILE = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500",
    "NCCL_SOCKET_IFNAME": "nowhere0", "GLOO_SOCKET_IFNAME": "nowhere0", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
    "ACCELERATE_DISTRIBUTED_TYPE": "FSDP", "DEEPSPEED_CONFIG": "x", "NCCL_DEBUG": "INFO", "PET_NNODES": "2",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 50,000 parameters, 60 rows, and a config of 6 steps."""
    place = tmp_path_factory.mktemp("one")
    draw = random.Random(0)
    words = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "bird", "sings", "runs", "sleeps"]
    rows = [
        {"prompt": " ".join(draw.choices(words, k=6)), "completion": draw.choice(words)} for _ in range(60)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<|im_end|>", "<|im_start|>"]
    core.train_from_iterator(
        [" ".join(words), "user assistant system"], trainers.WordLevelTrainer(special_tokens=special)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(str(place / "model"))
    shape = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(str(place / "model"))
    config = {
        "model": "model", "data": {"train": "rows.jsonl", "max_length": 64}, "duration": "6 steps", "batch": {"global": 4},
        "checkpoint": {"every": "3 steps"}, "device": "cpu", "output_dir": "out",
    }  # fmt: skip
    (place / "c.yaml").write_text(json.dumps(config))
    return place


@pytest.fixture
def environment(folder: Path, front: Any) -> dict[str, str]:
    """Settings of the test's own; what is prepared of the rows is shared."""
    found: dict[str, str] = {**front.environment, "XDG_CACHE_HOME": str(cache_with_kernels(folder / "cache"))}
    return found


def sockets(pids: Sequence[int]) -> list[Any]:
    """Network sockets of processes that listen or are connected."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended since has none
            found += [
                c
                for c in psutil.Process(pid).net_connections("inet")
                if c.status in ("LISTEN", "ESTABLISHED", "SYN_SENT")
            ]
    return found


def test_hostile_environment_is_ignored_in_one_line_and_opens_no_socket(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    process = front_server.start(
        [sys.executable, "-m", "unisono", "train", "c.yaml", f"output_dir={tmp_path / 'out'}"], cwd=folder,
        env={**environment, **HOSTILE}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    seen: list[str] = []
    looked_at: set[int] = set()
    for line in process.stderr:
        seen.append(line)
        if line.startswith(("start", "step")):  # the rank trains: model, data and optimizer are there
            ranks = living_ranks(process.pid)
            looked_at.update(ranks)
            assert sockets([process.pid, *ranks]) == []
    process.communicate(timeout=120)
    assert process.returncode == 0, "".join(seen)
    assert looked_at, "its rank was seen"
    (ignored,) = [line for line in seen if line.startswith("ignored")]
    assert all(name in ignored for name in HOSTILE)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert set(plan["ignored_variables"]) >= set(HOSTILE)
    assert plan["world_size"] == 1


def test_file_size_limit_is_named_with_its_value_and_no_row_is_blamed(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The first that meets it is the memory of steps, which is a file to the system."""
    limit = 100_000
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "train", "c.yaml", f"output_dir={tmp_path / 'out'}"], cwd=folder, env=environment,
        text=True, capture_output=True, timeout=240, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    assert f"the file size limit is {limit} bytes" in done.stderr
    assert "ulimit -f unlimited" in done.stderr
    assert "Traceback" not in done.stderr
    assert "user_code_error" not in done.stderr
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["cause"], verdict["hosts"]) == (
        "ulimit",
        [json.loads((tmp_path / "out" / "plan.json").read_text())["host"]],
    )


STEPS = 30


def run_under_torchrun(
    folder: Path, environment: dict[str, str], out: Path, *, ranks: int
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "unisono", "train",
        "c.yaml", f"output_dir={out}", f"duration={STEPS} steps",
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_real_torchrun_of_two_is_refused_with_the_right_command(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    done = run_under_torchrun(folder, environment, tmp_path / "out", ranks=2)
    assert done.returncode != 0
    assert "was started by torchrun as one of 2 ranks" in done.stderr
    assert "run it once: unisono train c.yaml" in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "out").exists()


def test_real_torchrun_of_one_trains_and_a_resumed_run_ends_bit_equal(
    folder: Path, environment: dict[str, str], tmp_path: Path, until: Callable[..., None]
) -> None:
    done = run_under_torchrun(folder, environment, tmp_path / "whole", ranks=1)
    assert done.returncode == 0, done.stderr
    assert "ignored" in done.stderr
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["outcome"] == "completed"
    out = f"output_dir={tmp_path / 'parts'}"
    command = [sys.executable, "-m", "unisono", "train", "c.yaml", out, f"duration={STEPS} steps"]
    process = front_server.start(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    metrics = tmp_path / "parts" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    process.terminate()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode in (75, 0), stderr  # 0: it was through before the signal came
    if process.returncode == 75:
        again = front_server.run(command, cwd=folder, env=environment, timeout=240)
        assert again.returncode == 0, again.stderr

    def losses(out: str) -> list[tuple[int, float]]:
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]

    assert losses("parts") == losses("whole")
    weights = [
        (tmp_path / out / "adapter" / "adapter_model.safetensors").read_bytes() for out in ("parts", "whole")
    ]
    assert weights[0] == weights[1]

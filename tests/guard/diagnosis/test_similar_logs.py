"""Logs that look alike and mean something else: what must not be mistaken for what.

Run: pytest tests/guard/diagnosis/test_similar_logs.py
"""

import io
import json
import time
from typing import Any

import pytest

from unisono.guard.diagnosis.reading import diagnose_logs
from unisono.guard.diagnosis.scan import scan

TRACE = """Traceback (most recent call last):
  File "/home/u/train.py", line 8, in main
    x = batch["labels"]
KeyError: 'labels'
"""
BAR = "".join(f" {i}%|#| {i}/100 [00:0{i}<01:00,  1.0s/it]\n" for i in range(1, 9))
FINISHED = (
    "{'train_runtime': '112.4', 'train_samples_per_second': '71.1', 'train_loss': '1.52', 'epoch': '3'}\n"
)
KILLED_9 = (
    "E0304 10:00:00.000000 100 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9)"
    " local_rank: 0 (pid: 4242) of binary: /usr/bin/python\n"
)
LOADING = "Loading checkpoint shards:  10%|#   | 1/10 [00:05<00:45,  5.0s/it]\n"
CANCELLED = (
    "slurmstepd: error: *** STEP 81231.0 ON gpu-04 CANCELLED AT 2025-03-04T19:00:12 DUE TO PREEMPTION ***\n"
)
OUT_OF_TIME = (
    "slurmstepd: error: *** JOB 81231 ON gpu-04 CANCELLED AT 2025-03-04T19:00:12 DUE TO TIME LIMIT ***\n"
)


def diagnosed(**logs: str) -> dict[str, Any]:
    read = [scan(name, io.BytesIO(text.encode())) for name, text in logs.items()]
    return diagnose_logs(read).verdict.to_json()


def of_rank(rank: int, text: str) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in text.splitlines()]


def killed_by_the_kernel(name: str) -> str:
    return f"[1.6] Out of memory: Killed process 4242 ({name}) total-vm:1kB, anon-rss:1kB\n"


def node(host: int) -> str:
    """What torchrun leaves on a node all of whose eight ranks have raised the same, its table with
    the host's name included.
    """
    first, *others = range(8 * host, 8 * host + 8)

    def row(number: int, rank: int) -> str:
        lines = (
            f"[{number}]:", "  time      : 2025-03-04_10:00:00", f"  host      : node{host}",
            f"  rank      : {rank} (local_rank: {rank % 8})", f"  exitcode  : 1 (pid: {1000 * host + rank})", "  error_file: <N/A>",
            "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        )  # fmt: skip
        return "".join(f"{line}\n" for line in lines)

    printed = "".join(f"{line}\n" for rank in (first, *others) for line in of_rank(rank, TRACE))
    table = "".join(row(number, rank) for number, rank in enumerate(others, start=1))
    thick, thin = "=" * 60 + "\n", "-" * 60 + "\n"
    end = f"{thin}Root Cause (first observed failure):\n{row(0, first)}{thick}"
    return f"{BAR}{printed}{thick}train.py FAILED\n{thin}Failures:\n{table}{end}"


def test_an_error_that_all_ranks_of_two_hosts_raise_is_not_a_hosts_fault() -> None:
    found = diagnosed(**{"node0.log": node(0), "node1.log": node(1)})
    assert found["cause"] == "user_code_error"
    shown = {line["where"].partition(":")[0] for line in found["evidence"]}
    assert shown == {"node0.log"}, "the evidence is of one host, as it is cut short"
    assert found["hosts"] == []


def test_a_long_chain_of_exceptions_is_read_in_no_time() -> None:
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    began = time.monotonic()
    found = diagnosed(a=BAR + link.join([TRACE] * 40))
    assert time.monotonic() - began < 30, "it took hours"
    assert found["cause"] == "user_code_error"


@pytest.mark.parametrize(
    "last",
    ["Done training batch 8", "Training complete: 12%", "Training done: 3/100 steps", "Epoch 1 training done, validating"],
)  # fmt: skip
def test_a_part_of_the_training_that_is_done_is_not_its_end(last: str) -> None:
    assert diagnosed(a=f"{BAR}{last}\n")["cause"] != "healthy"


@pytest.mark.parametrize(
    "last", ["Training completed.", "Training finished successfully", "INFO done training"]
)
def test_the_end_of_the_training_is(last: str) -> None:
    assert diagnosed(a=f"{BAR}{last}\n")["cause"] == "healthy"


def test_a_job_that_is_out_of_time_while_it_saves_has_not_finished() -> None:
    text = f"{BAR}{FINISHED}Saving model checkpoint to out\n{OUT_OF_TIME}"
    assert diagnosed(a=text)["cause"] == "preempted_sigterm"


def test_a_bar_that_is_written_late_does_not_undo_the_schedulers_word() -> None:
    later = LOADING.replace("10%", "20%").replace(" 1/10", " 2/10")
    assert diagnosed(a=LOADING + CANCELLED + later)["cause"] == "preempted_sigterm"


def test_an_error_inside_a_different_ranks_ignored_one_counts() -> None:
    ignored = of_rank(
        0,
        'Exception ignored in: <function f at 0x7f>\nTraceback (most recent call last):\n  File "/x/d.py",'
        " line 5, in __del__",
    )
    error = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity"
        " of 79.15 GiB of which 1.25 GiB is free."
    )
    real = of_rank(
        1, f'Traceback (most recent call last):\n  File "/home/u/train.py", line 8, in main\n{error}'
    )
    end = of_rank(0, "AttributeError: 'NoneType' object has no attribute 'x'")
    found = diagnosed(a=BAR + "\n".join([*ignored, *real, *end]) + "\n")
    assert (found["cause"], found["ranks"]) == ("cuda_oom", [1])


def test_an_error_that_ended_a_thread_is_that_error() -> None:
    text = (
        "Exception in thread Thread-5 (save):\nTraceback (most recent call last):\n  File"
        ' "/home/u/save.py", line 4, in save\nOSError: [Errno 28] No space left on device:'
        " '/data/out/model.safetensors'\n"
    )
    assert diagnosed(a=BAR + text)["cause"] == "disk_full"


def test_a_host_of_a_collectors_json_is_a_host_or_none() -> None:
    line = {
        "msg": "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB",
        "rank": 3,
        "host": "\u001b[31mevil\nhf_abcdefghijklmnopqrstuvwxyz012345 password=x",
    }
    found = diagnosed(a=BAR + json.dumps(line) + "\n")
    assert "hf_" not in json.dumps(found)
    assert found["hosts"] == []


def test_times_of_a_collectors_json_report_who_was_first() -> None:
    def log(rank: int, second: int, error: str) -> str:
        lines = [
            *BAR.splitlines(),
            "Traceback (most recent call last):",
            '  File "/home/u/train.py", line 8, in main',
            error,
        ]
        return "".join(
            json.dumps({"time": f"2025-03-04T10:00:{second:02}Z", "rank": rank, "msg": line}) + "\n"
            for line in lines
        )

    found = diagnosed(a=log(0, 9, "ValueError: consequence"), b=log(1, 3, "KeyError: 'first'"))
    assert found["ranks"] == [1]


def test_a_log_that_docker_has_wrapped_is_read_as_it_was() -> None:
    text = BAR + "".join(f"{line}\n" for line in of_rank(1, TRACE))
    wrapped = "".join(
        json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2025-03-04T10:00:00.1Z"}) + "\n"
        for line in text.splitlines()
    )
    found = diagnosed(a=wrapped)
    assert (found["cause"], found["ranks"]) == ("user_code_error", [1])
    assert "stream" not in found["summary"]


@pytest.mark.parametrize(
    "names",
    [
        ("attempt_0.log", "attempt_1.log"),
        ("sweep/0/train.log", "sweep/1/train.log"),
        ("seed_0.log", "seed_1.log"),
    ],
)
def test_numbers_of_attempts_and_sweeps_are_no_ranks(names: tuple[str, str]) -> None:
    found = diagnosed(**{names[0]: BAR + TRACE, names[1]: BAR})
    assert found["cause"] == "user_code_error"
    assert found["ranks"] == []


def test_two_logs_of_a_world_of_sixteen_are_not_its_ranks() -> None:
    found = diagnosed(
        **{"out_0.log": "world_size: 16\n" + BAR, "out_1.log": "world_size: 16\n" + BAR + TRACE}
    )
    assert found["ranks"] == []


@pytest.mark.parametrize("name", ["axolotl", "tune", "python", "unisono"])
def test_a_process_that_the_launcher_names_is_ours_whatever_it_is_called(name: str) -> None:
    assert diagnosed(a=BAR + killed_by_the_kernel(name) + KILLED_9)["cause"] == "host_oom_killed"


def test_a_rank_that_died_by_a_signal_did_not_end_with_its_number() -> None:
    found = diagnosed(a=f"{BAR}[launcher] rank 3 died with signal 9\n")
    assert "code 9" not in found["summary"]


@pytest.mark.parametrize("words", ["is in use", "is already in use", "is occupied", "is taken"])
def test_a_port_that_is_taken_is_known_by_any_of_these_words(words: str) -> None:
    assert diagnosed(a=f"RuntimeError: Port 29500 {words}\n")["cause"] == "port_in_use"

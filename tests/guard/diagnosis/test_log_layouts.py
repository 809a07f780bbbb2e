"""A verdict depends on what a log says, not on how it is laid out: `pytest
tests/guard/diagnosis/test_log_layouts.py`.
"""

from __future__ import annotations

import functools
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.guard.diagnosis.reading import diagnose_logs
from unisono.guard.diagnosis.scan import scan

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

CASES = Path(__file__).parent / "cases"
EVERY = [
    json.loads(line)
    for name in ("written.jsonl", "made.jsonl")
    for line in (CASES / name).read_text(encoding="utf-8").splitlines()
    if line.strip()
]
PART = 9
"""Of the cases each way of writing is tried on one in so many: all of them take minutes."""
NOISE = (
    "wandb: Tracking run with wandb version 0.17.5",
    (
        "/opt/conda/lib/python3.10/site-packages/torch/utils/checkpoint.py:460: UserWarning:"
        " torch.utils.checkpoint: please pass in use_reentrant=True"
    ),
    "模型加载完成，开始训练",
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used.",
    (
        "[INFO|modeling_utils.py:3988] 2024-11-02 10:00:00,000 >> loading weights file"
        " model.safetensors.index.json"
    ),
    "\x1b[32m✔ cache ready\x1b[0m",
)

Answer = tuple[str, tuple[int, ...], tuple[str, ...]]


def answer(files: Mapping[str, str]) -> Answer:
    return answer_of({name: text.encode() for name, text in files.items()})


def answer_of(files: Mapping[str, bytes]) -> Answer:
    verdict = diagnose_logs([scan(name, io.BytesIO(data)) for name, data in files.items()]).verdict
    return verdict.cause, verdict.ranks, verdict.hosts


@functools.cache
def known(place: int) -> Answer:
    """The answer to a case as it is."""
    return answer(EVERY[place]["files"])


def lines_of(text: str) -> list[str]:
    return text.split("\n")


def in_other_order(files: dict[str, str]) -> dict[str, str]:
    return dict(reversed(files.items()))


def with_noise_around(files: dict[str, str]) -> dict[str, str]:
    return {name: "\n".join(NOISE) + "\n" + text.rstrip("\n") + "\n" + "\n".join(NOISE) + "\n" for name, text in files.items()}  # fmt: skip


def in_other_places(files: dict[str, str]) -> dict[str, str]:
    return {name: re.sub(r"/opt/conda/lib/python3\.\d+/site-packages", "/data1/u0/venv/lib/python3.11/site-packages", text) for name, text in files.items()}  # fmt: skip


def in_colours(files: dict[str, str]) -> dict[str, str]:
    return {name: "\n".join(f"\x1b[36m{line}\x1b[0m" if line else line for line in lines_of(text)) for name, text in files.items()}  # fmt: skip


def with_carriage_returns(files: dict[str, str]) -> dict[str, str]:
    return {name: text.replace("\n", "\r\n") for name, text in files.items()}


def with_a_bar_before(files: dict[str, str]) -> dict[str, str]:
    bar = "".join(f"\rLoading checkpoint shards: {25 * i:3d}%|{'█' * i}| {i}/4 [00:0{i}<00:01,  1.52s/it]" for i in range(5))  # fmt: skip
    return {name: f"{bar}\n{text}" for name, text in files.items()}


def with_times_before(files: dict[str, str]) -> dict[str, str]:
    return {name: "\n".join(f"2025-03-04T10:00:00.{number % 1000:03d}000Z {line}" for number, line in enumerate(lines_of(text))) for name, text in files.items()}  # fmt: skip


def with_times_in_brackets(files: dict[str, str]) -> dict[str, str]:
    return {name: "\n".join(f"[2025-03-04 10:{number // 60 % 60:02d}:{number % 60:02d}] {line}" for number, line in enumerate(lines_of(text))) for name, text in files.items()}  # fmt: skip


def in_objects(files: dict[str, str]) -> dict[str, str]:
    """As a collector of containers' logs keeps them."""
    return {name: "\n".join(json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2025-03-04T10:00:00Z"}) for line in lines_of(text)) for name, text in files.items()}  # fmt: skip


WAYS: list[Callable[[dict[str, str]], dict[str, str]]] = [
    in_other_order, with_noise_around, in_other_places, in_colours, with_carriage_returns, with_a_bar_before, with_times_before, with_times_in_brackets, in_objects,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_layout_of_logs_does_not_change_the_verdict(
    way: Callable[[dict[str, str]], dict[str, str]],
) -> None:
    wrong = []
    for place in range(WAYS.index(way), len(EVERY), PART):
        case = EVERY[place]
        before, after = known(place), answer(way(dict(case["files"])))
        if before != after:
            wrong.append(f"{case['id']}: {before} became {after}")
    assert not wrong, "\n".join(wrong)


def test_cases_that_were_written_are_reported_right() -> None:
    wrong = []
    for place, case in enumerate(EVERY):
        cause, ranks, hosts = known(place)
        right = cause in (case["class"], *case.get("also_accept", []))
        named = case["culprit_rank"] is None or ranks == (case["culprit_rank"],)
        if not right or not named:
            wrong.append(f"{case['id']}: {case['class']}/{case['culprit_rank']} was told as {cause}/{ranks}/{hosts}")  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_every_cause_that_logs_show_is_reached() -> None:
    from unisono.base.causes import CATALOGUE

    reported = {known(place)[0] for place in range(len(EVERY))}
    of_logs = {case["class"] for case in EVERY}
    assert of_logs <= set(CATALOGUE)
    assert of_logs - reported == set()
    assert len(reported) >= 48


def test_evidence_stands_in_the_logs_at_the_line_that_is_named() -> None:
    for case in EVERY[::7]:
        printed = diagnose_logs([scan(name, io.BytesIO(text.encode())) for name, text in case["files"].items()]).verdict  # fmt: skip
        for item in printed.evidence:
            name, _, line = item.where.rpartition(":")
            there = lines_of(case["files"][name])[int(line) - 1]
            assert " ".join(item.text.rstrip("…").split())[:40] in " ".join(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", there).split()), (case["id"], item)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=3000), st.integers(0, len(EVERY) - 1), st.randoms(use_true_random=False))
def test_junk_never_breaks_it(junk: bytes, which: int, chance: random.Random) -> None:
    files: dict[str, Any] = {name: text.encode() for name, text in EVERY[which]["files"].items()}
    for name, data in files.items():
        place = chance.randrange(len(data) + 1)
        files[name] = data[:place] + junk + data[place + chance.randrange(200) :]
    assert answer_of(files)[0]


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=20_000))
def test_what_is_not_a_log_gets_an_answer(junk: bytes) -> None:
    cause, ranks, _ = answer_of({"blob": junk})
    assert cause in ("undetermined", "healthy") or ranks == ()

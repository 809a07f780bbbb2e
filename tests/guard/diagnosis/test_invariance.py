"""What a verdict may not depend on: the order of logs, the names of hosts, which rank it was,
healthy lines between: `pytest tests/guard/diagnosis/test_invariance.py`.
"""

from __future__ import annotations

import functools
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from unisono.guard.diagnosis.reading import diagnose_logs
from unisono.guard.diagnosis.scan import scan

if TYPE_CHECKING:
    from collections.abc import Mapping

CASES = Path(__file__).parent / "cases"
BLIND = [
    json.loads(line)
    for file in sorted(CASES.glob("kept_away*.jsonl"))
    for line in file.read_text(encoding="utf-8").splitlines()
    if "~" not in json.loads(line)["id"]  # the same in another layout
]
HEALTHY = (
    "wandb: Tracking run with wandb version 0.17.5",
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used.",
    (
        "UserWarning: Plan failed with a cudnnException: CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR (Triggered"
        " internally)"
    ),
    "Using the latest cached version of the dataset since squad couldn't be found on the Hugging Face Hub",
)
SWAPPED = (1, 2)
"""Two ranks that are neither the first nor, mostly, the last: those have duties of their own, a
bar, a store, a launcher's last command.
"""

_IN_BLOCK = re.compile(r"[\s\-=]|\[\d+\]:$|Root Cause|Failures:")

Answer = tuple[str, tuple[int, ...], tuple[str, ...]]


def answer(files: Mapping[str, str]) -> Answer:
    verdict = diagnose_logs([scan(name, io.BytesIO(text.encode())) for name, text in files.items()]).verdict
    return verdict.cause, verdict.ranks, verdict.hosts


@functools.cache
def known(place: int) -> Answer:
    return answer(BLIND[place]["files"])


def differing(changed: Mapping[int, tuple[Mapping[str, str], Answer]]) -> list[str]:
    """The cases that are told otherwise than expected once they are changed."""
    rows = []
    for place, (files, expected) in changed.items():
        printed = answer(files)
        if printed != expected:
            rows.append(f"{BLIND[place]['id']}: {expected} became {printed}")
    return rows


def rank_swapped(text: str) -> str:
    """The text with two ranks in each other's place, in every form in which ranks are written
    there.
    """
    one, other = SWAPPED
    turned = {str(one): str(other), str(other): str(one)}
    return re.sub(
        r"(?P<before>\[rank|\[default|[Rr]ank[ _-]|rank=|[Rr]ank\[?[ :=]{1,2}|rank {6}:"
        r" |world_rank=|local_rank[=:] ?|cuda:|global rank |\[1,|mpirank:|task |GPU |\(local_rank:"
        r" )(?P<rank>[12])(?P<after>(?!\d))",
        lambda found: found["before"] + turned[found["rank"]] + found["after"],
        text,
    )


def can_swap(case: Mapping[str, Any]) -> bool:
    """Whether all that tells the two ranks apart is written in a form that is turned."""
    text = "\n".join([*case["files"], *case["files"].values()])
    lists = re.search(
        r"ranks? \[|\[\d+(?:,\d+)+\] |tasks \d|^ ?\d+:"
        r" |\.err|out\.\d|\br\d\.log|std_log|\"rank\"|PID|\bpid|HOST|dmesg|node|worker|trainer|algo|nid|process \d",
        text,
        re.MULTILINE,
    )
    return lists is None and "[rank1]" in text and "[rank2]" in text


def test_the_order_of_logs_does_not_matter() -> None:
    changed = {
        place: (dict(reversed(case["files"].items())), known(place))
        for place, case in enumerate(BLIND)
        if len(case["files"]) > 1
    }
    assert len(changed) >= 20
    assert not (wrong := differing(changed)), "\n".join(wrong)


def test_whichever_rank_it_is_it_is_named() -> None:
    turn = {SWAPPED[0]: SWAPPED[1], SWAPPED[1]: SWAPPED[0]}
    changed = {}
    for place, case in enumerate(BLIND):
        if not can_swap(case):
            continue
        cause, ranks, hosts = known(place)
        files = {rank_swapped(name): rank_swapped(text) for name, text in case["files"].items()}
        changed[place] = (files, (cause, tuple(sorted(turn.get(rank, rank) for rank in ranks)), hosts))
    assert len(changed) >= 12
    assert not (wrong := differing(changed)), "\n".join(wrong)


def test_whatever_a_host_is_called_it_is_named() -> None:
    changed = {}
    for place, case in enumerate(BLIND):
        host = case["culprit_host"]
        if not host:
            continue
        new = re.sub(r"\d+$", lambda found: str(int(found[0]) % 90 + 107), host)
        files = {name.replace(host, new): text.replace(host, new) for name, text in case["files"].items()}
        if new == host or any(new in text for text in case["files"].values()):
            continue
        cause, ranks, hosts = known(place)
        changed[place] = (files, (cause, ranks, tuple(one.replace(host, new) for one in hosts)))
    assert len(changed) >= 12
    assert not (wrong := differing(changed)), "\n".join(wrong)


@pytest.mark.parametrize("every", [3, 7])
def test_healthy_lines_between_do_not_matter(every: int) -> None:
    changed = {}
    for place in range(every % 2, len(BLIND), 2):
        files = {
            name: "\n".join(_with_healthy(text.split("\n"), every))
            for name, text in BLIND[place]["files"].items()
        }
        changed[place] = (files, known(place))
    assert not (wrong := differing(changed)), "\n".join(wrong)


def _with_healthy(lines: list[str], every: int) -> list[str]:
    """A healthy line after each few; none within what one process writes at once: a table, a list
    of facts, an indented block.
    """
    found: list[str] = []
    for number, line in enumerate(lines):
        found.append(line)
        after = lines[number + 1] if number + 1 < len(lines) else ""
        if number % every == 0 and line and after and not _IN_BLOCK.match(after):
            found.append(HEALTHY[number % len(HEALTHY)])
    return found

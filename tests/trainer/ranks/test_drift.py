"""Replicas that are no longer equal are found within a period, and the odd one is named.

Run: pytest tests/trainer/ranks/test_drift.py
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.ranks.conftest import Done, Workshop
from unisono.base.causes import Verdict
from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.jobs.runs.attempt_end import DriftReport, ReplicaDrift, name_drift
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.training_checks import _CHUNK, _checksums, weights_digest

_CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=10**10, bfloat16=True)


@pytest.fixture(scope="module")
def three(workshop: Workshop) -> dict[str, Done]:
    """Runs of three ranks, of eight steps, that compare after every third and after the last: one
    that is well, and two in which a weight of one rank is changed in step 5.
    """
    watch = {"digest_every": "3 steps"}
    faults: dict[str, dict[str, Any]] = {"well": {}} | {
        f"rank {rank}": {"drift": {"rank": rank, "step": 5}} for rank in (0, 1)
    }
    plans = [workshop.plan("narrow", world=3, strategy="ddp", watch=watch, faults=f) for f in faults.values()]
    return dict(zip(faults, workshop.together(plans), strict=True))


def compare_reports(plan: RunPlan, done: Done, *, changed: Mapping[int, str] | None = None) -> tuple[Verdict | None, list[Any]]:  # fmt: skip
    """What the head makes of what the ranks said, and what it shows."""
    shown: list[Any] = []
    drift = ReplicaDrift(plan, shown.append)
    for rank in range(plan.world_size):
        for message in done.ended.messages[rank]:
            reported = {"arithmetic": changed[rank]} if changed and rank in changed else {}
            changed_message: Any = {**message, **reported}
            drift.on_message(rank, changed_message)
    return drift.look(), shown


@pytest.mark.ranks
def test_healthy_replicas_report_the_same_at_every_period_and_at_the_end(
    three: dict[str, Done],
) -> None:
    done = three["well"]
    printed = [done.ended.of_kind(rank, "digest") for rank in range(3)]
    assert [[m["step"] for m in one] for one in printed] == [[3, 6, 8]] * 3
    digests = [[m["digest"] for m in one] for one in printed]
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == 3, "training changes weights"
    assert compare_reports(done.plan, done) == (None, [])


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_with_a_changed_weight_is_named_with_the_last_equal_step(
    three: dict[str, Done], rank: int
) -> None:
    done = three[f"rank {rank}"]
    verdict, shown = compare_reports(done.plan, done)
    assert verdict is not None
    assert shown == []
    assert (verdict.cause, verdict.ranks, verdict.step, verdict.when) == (
        "replicas_diverged",
        (rank,),
        6,
        "during",
    )
    assert (
        f"rank {rank}, node 0 (here) holds different weights than the other ranks after step 6"
        in verdict.summary
    )
    assert "equal after step 3" in verdict.summary
    assert verdict.evidence[0].where == f"rank {rank}, node 0 (here)"
    good = "they are good" in verdict.fix[0]
    assert good is (rank != 0), "rank 0 writes the checkpoints"


@pytest.mark.ranks
def test_ranks_that_round_differently_are_reported_of_once_and_not_ended(three: dict[str, Done]) -> None:
    """Other instructions, other last bits: on such nodes a difference proves nothing."""
    done = three["rank 1"]
    verdict, shown = compare_reports(done.plan, done, changed={1: "x86_64 CPU with SSE9"})
    assert verdict is None
    (warning,) = shown
    assert warning["code"] == "replicas_round_differently"
    assert "SSE9" in warning["text"]


@pytest.mark.parametrize(
    ("digests", "blamed"),
    [("ab", ()), ("aab", (2,)), ("abb", (0,)), ("abc", ()), ("aabb", ()), ("aabc", ()), ("aaabc", (3, 4)), ("aabbc", ())],
)  # fmt: skip
def test_only_a_majority_can_report_who_is_odd(digests: str, blamed: tuple[int, ...]) -> None:
    places = [
        RankPlace(rank=n, node_rank=n, local_rank=0, host=f"h{n}", device=_CPU) for n in range(len(digests))
    ]
    found = {rank: DriftReport(digest * 32, "same") for rank, digest in enumerate(digests)}
    verdict = name_drift(places, found, step=200, equal_at=None)
    assert verdict.ranks == blamed
    assert verdict.hosts == tuple(f"h{rank}" for rank in blamed)
    assert len(verdict.evidence) == len(set(digests)), "all groups are shown"
    assert verdict.fix


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 3 * _CHUNK - 1), st.integers(0, 31))
def test_a_device_digest_sees_any_bit_and_any_two_words_that_change_places(place: int, bit: int) -> None:
    """The way of devices, tried on the CPU: it is the same arithmetic."""
    words = torch.arange(3 * _CHUNK, dtype=torch.int32)
    before = _checksums(words.view(torch.float32)).tolist()
    changed = words.clone()
    changed[place] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert _checksums(changed.view(torch.float32)).tolist() != before
    swapped = words.clone()
    other = (place + 7919) % len(words)
    swapped[place], swapped[other] = words[other], words[place]
    assert _checksums(swapped.view(torch.float32)).tolist() != before


def test_a_digest_depends_on_bits_and_order_and_not_on_layout() -> None:
    a, b = torch.randn(7, 5), torch.randn(3)
    assert weights_digest([a, b]) == weights_digest([a.t().contiguous().t(), b])
    assert weights_digest([a, b]) != weights_digest([b, a])
    assert weights_digest([a, torch.zeros(3)]) != weights_digest([a, -torch.zeros(3)]), "-0.0 is other bits"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_digest_of_a_device_is_that_of_the_same_sums_here() -> None:
    tensor = torch.randn(3 * _CHUNK + 5)
    assert _checksums(tensor.cuda()).tolist() == _checksums(tensor).tolist()

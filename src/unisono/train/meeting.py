"""How a rank finds its place and meets the others: it says what it holds, waits for the word, and only then joins the group."""

import sys

import torch

from unisono.causes import Evidence, Verdict
from unisono.errors import Disagreed, Problem
from unisono.events import Reporter
from unisono.facts import Environment
from unisono.model.load import LoadedModel
from unisono.plan import RankPlace, RunPlan
from unisono.train import faults
from unisono.train.batches import TrainingData
from unisono.train.front_line import front_line
from unisono.train.group import Group, Listener, Ranks
from unisono.train.rank_report import bound_uuid, report_rank
from unisono.watch import Beats


def find_place(plan: RunPlan, environment: Environment) -> RankPlace:
    """Which rank of the plan this process is, by what it was started with. One rank alone looks at no variable.

    Raises:
        Disagreed: if the plan has no such rank, or means another by it.
    """
    if plan.world_size == 1:
        return plan.ranks[0]
    rank = environment.rank
    if rank is None or rank >= plan.world_size:
        told = "is not set" if rank is None else f"is {rank}"
        raise _another_plan(
            None, f"RANK {told}, and the plan has ranks 0 to {plan.world_size - 1}", "start ranks through unisono train"
        )  # fmt: skip
    place = plan.ranks[rank]
    for name, found, planned in (
        ("WORLD_SIZE", environment.world_size, plan.world_size),
        ("LOCAL_RANK", environment.local_rank, place.local_rank),
    ):
        if found != planned:
            told = "is not set" if found is None else f"is {found}"
            raise _another_plan(
                place, f"{name} {told} for rank {rank}, and the plan says {planned}", "start ranks through unisono train"
            )  # fmt: skip
    return place


def check_device(place: RankPlace, device: torch.device) -> None:
    """Holds the bound device against the plan.

    Raises:
        Disagreed: if it is another.
    """
    planned, bound = place.device.uuid, bound_uuid(device)
    if bound is not None and planned is not None and planned.startswith("GPU-") and planned != bound:
        raise _another_plan(
            place, f"rank {place.rank} has bound {bound}, and the plan gives it {planned}",
            "unset CUDA_VISIBLE_DEVICES where the rank starts, or name devices by --devices",
        )  # fmt: skip


def meet(
    plan: RunPlan,
    place: RankPlace,
    report: Reporter,
    beats: Beats,
    *,
    device: torch.device,
    loaded: LoadedModel,
    data: TrainingData,
) -> Group:
    """Reports, waits for the front's word that all ranks mean the same run, and joins them. All ranks must call it.

    The process ends here if the front goes, or ends the run because ranks differ.

    Raises:
        Disagreed: if those who have joined are not those of the plan.
    """
    report.phase("agree.ranks", "comparing what the ranks hold")
    listener = Listener(plan.store_host) if place.rank == 0 else None
    mine = report_rank(
        plan, place, device=device, loaded=loaded, data=data, store_port=listener.port if listener else None
    )
    report.send("rank_report", report=mine.to_json())
    beats.enter("agree.ranks")
    host, port = _wait_for_go()
    report.phase("join", "joining the other ranks")
    beats.enter("join")
    group = Ranks(
        f"{plan.run_id}/{plan.epoch}", rank=place.rank, world_size=plan.world_size, device=device, store=(host, port),
        listener=listener, beats=beats,
    )  # fmt: skip
    check_world(plan, place, group)
    return faults.among(group, plan, beats)


def check_world(plan: RunPlan, place: RankPlace, group: Ranks) -> None:
    """Holds those who have joined against the plan, by the group's own word and by counting them. All ranks must call it.

    Raises:
        Disagreed: if there are more or fewer. A smaller world would train, and on other batches than were meant.
    """
    here = torch.ones((), dtype=torch.int64, device=group.device)
    group.sum(here)
    for what, found in (("the group has", group.joined), ("counted are", int(here))):
        if found != plan.world_size:
            raise _another_world(place, f"{what} {found} ranks, and the plan has {plan.world_size}")


def _another_world(place: RankPlace, what: str) -> Disagreed:
    fix = "start all nodes again, with the same --nodes and --nproc as in the plan"
    summary = f"{place.label}: {what}"
    verdict = Verdict(
        cause="world_mismatch", when="before", summary=summary, phase="join", evidence=(Evidence(where=place.label, text=what),), fix=(fix,),
    )  # fmt: skip
    return Disagreed(
        Problem(summary, place.label, "a smaller or larger world trains on other batches than were meant", fix), verdict=verdict,
    )  # fmt: skip


def _wait_for_go() -> tuple[str, int]:
    """Where rank 0's store is, from the one line on stdin."""
    message = front_line().wait_for("go")
    if message is None:
        # The ranks differ, and the front has said how; or there is no front, and only the log is left.
        sys.stderr.write("no word to go on from the front on stdin: this rank leaves\n")
        sys.exit(Disagreed.exit_code)
    try:
        host, port = message["store"]
        return str(host), int(port)
    except (ValueError, KeyError, TypeError) as error:
        raise AssertionError(f"the front's word cannot be read: {message!r}") from error


def _another_plan(place: RankPlace | None, what: str, fix: str) -> Disagreed:
    verdict = Verdict(
        cause="plan_mismatch", when="before", summary=what, ranks=(place.rank,) if place else (), hosts=(place.host,) if place else (),
        phase="agree.ranks", evidence=(Evidence(where=place.label, text=what),) if place else (), fix=(fix,),
    )  # fmt: skip
    return Disagreed(
        Problem(what, place.label if place else "", "a rank does what the plan says, or nothing", fix),
        verdict=verdict,
    )

"""Ranks over NCCL on one CUDA device, whose kernels take turns on it.

Run: pytest -m gpu tests/gpu/test_ranks.py

Each rank has a different name of the device, and is a host of its own for NCCL (own_host.py). So
what NCCL does over a network is run here: the collectives of replicas and shards, and what the
watch sees of ranks that wait in one. NVLink, peer access and shared memory are not.
"""

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.gpu.whole_runs import (
    BFLOAT16,
    DEVICE,
    DIES_AT,
    EXACT,
    FULL,
    NAMED_S,
    NF4,
    PACED,
    STEPS,
    WITH_ANSWERS,
    Ended,
    Runs,
)
from unisono.front.drill.drills import DRILLS, Drill, is_named, named_cause_in
from unisono.front.drill.sandbox import Sandbox
from unisono.guard.facts.machine import probe_nvidia

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MOST_RANKS = 3
OWN_HOST = [sys.executable, "-m", "tests.gpu.own_host"]
DDP = {"parallel": {"strategy": "ddp"}}
FSDP = {"parallel": {"strategy": "fsdp"}}
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "lora ddp": ("lora", DDP),
    "full ddp": ("full", {**FULL, **DDP}),
    "lora fsdp": ("lora", FSDP),
    "full fsdp": ("full", {**FULL, **FSDP}),
    "dpo ddp": ("dpo", DDP),
}
"""Runs of two ranks, and the run of one whose losses they have to rounding."""
RESUMED = {"lora ddp": {**EXACT, **DDP}, "full fsdp": {**EXACT, **FULL, **FSDP}}
FAULTS = {drill.fault: drill for drill in DRILLS if drill.sandbox is Sandbox and drill.faults and drill.want}
HARMLESS = {
    drill.fault: drill for drill in DRILLS if drill.sandbox is Sandbox and drill.faults and not drill.want
}


def _gpus() -> list[dict[str, Any]]:
    """The device under several names: CUDA_VISIBLE_DEVICES takes its UUID, 0, 00 …"""
    (gpu, *_), _note = probe_nvidia()
    return [asdict(gpu) | {"index": rank, "uuid": gpu.uuid if rank == 0 else "0" * rank} for rank in range(MOST_RANKS)]  # fmt: skip


@pytest.fixture(scope="module")
def place(model_dir: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A folder for all of them, on a machine with several devices."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = str(Path(__file__).parents[2])
    # The tests' own fork server serves only programs with its variables.
    env = {} if root in paths else {"PYTHONPATH": os.pathsep.join([root, *paths])}
    answers = {"gpus": _gpus(), "worker": OWN_HOST, "task": OWN_HOST}
    made = Runs(tmp_path_factory.mktemp("ranks"), model_dir, rows_file, answers=answers, env=env)
    yield made
    made.close()


@pytest.fixture(scope="module")
def runs(place: Runs, pair_files: tuple[Path, Path]) -> Runs:
    """All runs, begun at once; those that others wait for come first."""
    dpo: dict[str, Any] = {
        "objective": "dpo",
        "data": {"train": str(pair_files[0])},
        "optim": {"lr": 5e-3},
        "duration": "6 steps",
    }
    two = ("--nproc", "2")
    dies = {"die": {"rank": 1, "step": DIES_AT, "how": "sigkill"}, **PACED}
    for kind, sections in RESUMED.items():
        place.train(f"{kind} killed", *two, faults=dies, **sections)
        place.train(f"{kind} undisturbed", *two, **sections)
    singles: dict[str, dict[str, Any]] = {"lora": {}, "full": FULL, "dpo": dpo}
    for name, sections in singles.items():
        place.train(name, "--nproc", "1", **sections)
    for name, (of, sections) in EQUAL.items():
        place.train(name, *two, **(dpo if of == "dpo" else {}), **sections)
    for strategy, sections in {"ddp": DDP, "fsdp": FSDP}.items():
        place.train(f"bfloat16 {strategy}", *two, **BFLOAT16, **sections)
    if find_spec("bitsandbytes") is not None:
        place.train("nf4", "--nproc", "1", **NF4)
        place.train("nf4 ddp", *two, **NF4, **DDP)
    return place


@pytest.fixture(scope="module")
def drills(place: Runs) -> Runs:
    """The runs with faults, begun at once."""
    for drill in (*FAULTS.values(), *HARMLESS.values()):
        _begin(place, drill)
    return place


def _begin(place: Runs, drill: Drill) -> None:
    """Begins the run of a drill, on the device."""
    faults = dict(drill.faults)
    if "starve" in faults:
        fifo = place.folder / "fifo"
        os.mkfifo(fifo)
        faults["starve"] = {**faults["starve"], "fifo": str(fifo)}
    sections = {**drill.config, "checkpoint": {"every": "100000 steps", **drill.config.get("checkpoint", {})}}
    batch: dict[str, Any] = {"batch": {"global": 6}, "optim": {"lr": 1e-3}}
    place.train(f"fault {drill.fault}", "--nproc", str(drill.nproc), "--json", faults=faults, **batch, **sections)  # fmt: skip


def _verdict(run: Ended) -> dict[str, Any]:
    verdict: dict[str, Any] = run.read("verdict.json")
    print(json.dumps(verdict, indent=1))
    return verdict


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_have_the_losses_of_one(runs: Runs, name: str) -> None:
    one, two = runs.ended(EQUAL[name][0]).check(), runs.ended(name).check()
    plan = two.read("plan.json")
    assert (plan["world_size"], plan["device"]["kind"]) == (2, DEVICE)
    assert plan["strategy"] == EQUAL[name][1]["parallel"]["strategy"]
    assert two.losses == pytest.approx(one.losses, rel=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_in_bfloat16_have_losses_near_those_in_float32(runs: Runs, strategy: str) -> None:
    found, wanted = runs.ended(f"bfloat16 {strategy}").check(), runs.ended("lora").check()
    assert len(found.losses) == STEPS
    assert found.losses == pytest.approx(wanted.losses, rel=0.05)


def test_replicas_of_a_quantized_base_have_the_losses_of_one(runs: Runs) -> None:
    needs.package("bitsandbytes")
    assert runs.ended("nf4 ddp").check().losses == pytest.approx(runs.ended("nf4").check().losses, rel=1e-3)


@pytest.mark.parametrize("kind", RESUMED)
def test_killed_rank_is_named_and_resumed_run_is_bit_equal_to_undisturbed(runs: Runs, kind: str) -> None:
    dead, whole = runs.ended(f"{kind} killed").check(5), runs.ended(f"{kind} undisturbed").check()
    verdict = _verdict(dead)
    assert (verdict["cause"], verdict["ranks"]) == ("rank_killed", [1])
    command = [*runs.program(f"{kind} again", None), "train", str(runs.folder / f"{kind} killed.yaml")]
    again = runs.run([*command, "--nproc", "2"], dead.out).check()
    assert again.figures == whole.figures
    assert again.weights() == whole.weights()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_rank(drills: Runs, fault: str) -> None:
    """While the others wait in a kernel of NCCL."""
    drill, run = FAULTS[fault], drills.ended(f"fault {fault}")
    named = [named_cause_in(line, at=0.0, node=0, words=drill.words) for line in run.lines]
    found = [cause for cause in named if cause is not None]
    assert is_named(drill, found, ["unused"]), f"{found}\n{run.stderr}\n{run.stdout[-3000:]}"
    assert not [cause for cause in found if cause.cause not in drill.want], found
    if found[-1].is_end:
        assert _verdict(run)["named_after_s"] < max(NAMED_S, drill.limit_s)
    assert "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_is_no_fault_ends_well(drills: Runs, fault: str) -> None:
    run = drills.ended(f"fault {fault}").check()
    assert not (run.out / "verdict.json").exists()
    assert all(map(math.isfinite, run.losses))


def test_the_ladder_runs_a_collective_over_nccl_and_reads_its_log(place: Runs) -> None:
    command = [*place.program("ladder", None), "doctor", str(place.write("ladder")), "--nproc", "2", "--ladder", "--json"]  # fmt: skip
    checks = json.loads(place.run(command, place.folder).stdout)["checks"]
    (found,) = [check for check in checks if "ladder" in check["id"]]
    print(json.dumps(found, indent=1))
    assert found["status"] in ("pass", "warn")
    assert "nccl" in json.dumps(found).lower()


def test_two_names_of_one_device_are_found_out_before_nccl_is(place: Runs) -> None:
    """The front cannot know that they are names of one device; the ranks compare what they have
    bound.
    """
    plain = place.folder / "plain.answers.json"
    plain.write_text(json.dumps({"gpus": _gpus()}))
    command = [*WITH_ANSWERS, str(plain), "train", str(place.write("one device")), "--nproc", "2", "--json"]
    verdict = _verdict(place.run(command, place.folder / "one device").check(3))
    assert (verdict["cause"], verdict["ranks"]) == ("duplicate_gpu", [0, 1])


def test_what_nccl_says_of_two_ranks_on_one_device_is_named(place: Runs) -> None:
    """What happens with a launcher that does not compare them."""
    place.train("one host", "--nproc", "2", "--json", env={"ONE_HOST": "1"})
    assert _verdict(place.ended("one host"))["cause"] == "duplicate_gpu"


def test_rank_with_an_endless_kernel_is_named_and_not_the_waiting_one(
    place: Runs,
) -> None:
    """The last test: meanwhile the device computes little else."""
    own = f"{place.folder / 'objectives.py'}:EndlessOnOne"
    words = ("--nproc", "2", "--json", "--trust-code")
    watch = {"stall_after": "20 seconds"}
    place.train("endless", *words, **BFLOAT16, duration="100000 steps", objective=own, watch=watch)
    verdict = _verdict(place.ended("endless").check(4))
    assert (verdict["cause"], verdict["ranks"]) == ("user_code_stuck", [1])
    assert verdict["named_after_s"] < NAMED_S

"""Programs of other people under `unisono run`: unchanged where they are well, named where they are
not.

Run: pytest tests/guard/programs/test_programs.py; with all programs: pytest tests/guard/programs/test_programs.py -m
"long or not long"
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guard.integrations.launched_programs import train
from tests.guard.programs import llama_factory
from tests.guard.programs.guarded import (
    ACCELERATE,
    DDP,
    FSDP2,
    LAUNCHER,
    LIGHTNING,
    LIGHTNING_ITSELF,
    LIGHTNING_ONE,
    LLAMA_FACTORY,
    RAY,
    SFT,
    TRAINER,
    Guarded,
    Program,
)
from tests.guard.programs.test_one_node import is_gone, until
from tests.jobs.nodes.network_namespaces import Ground, Namespaces, why_no_namespaces

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

Start = Callable[..., Guarded]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program under a front; what it started is ended with the test."""
    begun: list[Guarded] = []

    def make(program: Program, *arguments: str, **more: object) -> Guarded:
        folder = tmp_path / f"run{len(begun)}"
        folder.mkdir()
        begun.append(Guarded(program, folder, *arguments, **more))  # type: ignore[arg-type]
        return begun[-1]

    yield make
    for one in begun:
        one.close()


def _long(*programs: Program) -> list[object]:
    return [pytest.param(program, marks=pytest.mark.long, id=program.name) for program in programs]


def _short(*programs: Program) -> list[object]:
    return [pytest.param(program, id=program.name) for program in programs]


_OTHERS = (FSDP2, SFT, LIGHTNING, ACCELERATE)


@pytest.mark.parametrize("program", [*_short(TRAINER), *_long(DDP, *_OTHERS)])
def test_a_healthy_program_trains_to_the_same_bits_and_ends_with_0(
    program: Program, start: Start, tmp_path: Path
) -> None:
    guarded = start(program)
    ended = guarded.ended()
    assert (ended.exit_code, ended.verdict) == (0, None), guarded.front.text()
    bare = train(program.file, tmp_path / "bare", ranks=program.ranks)
    assert [[line["loss"] for line in guarded.losses(rank)] for rank in range(program.ranks)] == bare.losses
    assert guarded.file("result.json")["outcome"] == "completed"


@pytest.mark.long
def test_a_program_on_one_device_has_no_process_group_and_ends_with_0(start: Start) -> None:
    guarded = start(LIGHTNING_ONE)
    assert guarded.ended().exit_code == 0, guarded.front.text()
    assert "Initializing distributed" not in guarded.front.text()


@pytest.mark.long
def test_a_program_that_starts_its_ranks_by_itself_trains_and_ends_with_0(start: Start) -> None:
    guarded = start(LIGHTNING_ITSELF)
    assert guarded.ended().exit_code == 0, guarded.front.text()
    assert len(guarded.losses(0)) == len(guarded.losses(1)) == 6


@pytest.mark.parametrize("program", [*_short(DDP), *_long(FSDP2, TRAINER, LIGHTNING, ACCELERATE)])
def test_a_second_destroy_of_the_process_group_is_not_a_failure(program: Program, start: Start) -> None:
    guarded = start(program, "--fault", "destroy")
    assert guarded.ended().exit_code == 0, guarded.front.text()


_RESUMES_BY = {
    TRAINER.name: "resume_from_checkpoint=True", SFT.name: "resume_from_checkpoint=True", LIGHTNING.name: 'ckpt_path="last"',
}  # fmt: skip


@pytest.mark.parametrize("program", [*_short(DDP), *_long(TRAINER, *_OTHERS)])
def test_killed_rank_is_named_with_the_programs_own_way_to_resume(program: Program, start: Start) -> None:
    guarded = start(program, "--steps", "5000", "--step-s", "0.02")
    since = guarded.strike(1, signal.SIGKILL)
    ended = guarded.ended(since=since)
    assert ended.verdict is not None, guarded.front.text()
    assert (ended.verdict.cause, ended.verdict.ranks) == ("rank_killed", (1,))
    # Some note it before the optimizer's step, some after: it may die between.
    noted = guarded.losses(1)[-1]["step"]
    assert ended.verdict.step in (noted - 1, noted, noted + 1)
    assert ended.exit_code == 5
    reported = [line for line in ended.verdict.fix if "resume" in line.lower() or "goes on" in line]
    way = _RESUMES_BY.get(program.name, "")
    assert [way in line for line in reported] == ([True] if way else []), reported


@pytest.mark.parametrize("program", [*_long(DDP, TRAINER, *_OTHERS)])
def test_a_rank_that_is_stopped_is_named_and_nothing_of_it_is_left(program: Program, start: Start) -> None:
    guarded = start(program, "--steps", "5000", "--step-s", "0.02")
    pid = guarded.pid_at(1, 4)
    since = guarded.strike(1, signal.SIGSTOP)
    ended = guarded.ended(since=since)
    assert ended.verdict is not None, guarded.front.text()
    assert (ended.verdict.cause, ended.verdict.ranks) == ("rank_stopped", (1,))
    assert ended.exit_code == 4
    until(lambda: is_gone(pid), "the stopped rank is gone")


# Accelerate deals a loader's batches out by itself: whatever the rows, all ranks make the same
# number of steps.
@pytest.mark.parametrize(
    "program",
    [*_long(DDP, TRAINER, LIGHTNING_ITSELF, *[other for other in _OTHERS if other is not ACCELERATE])],
)
def test_a_rank_with_fewer_steps_is_named(program: Program, start: Start) -> None:
    guarded = start(program, "--fault", "steps", "--steps", "40")
    ended = guarded.ended()
    assert ended.verdict is not None, guarded.front.text()
    assert (ended.verdict.cause, ended.verdict.ranks) == ("unequal_steps", (1,)), ended.verdict.summary
    assert ended.exit_code == 4


@pytest.mark.parametrize("program", [*_short(TRAINER), *_long(DDP, SFT, LIGHTNING, ACCELERATE)])
def test_a_split_without_a_seed_is_named_before_the_first_step(program: Program, start: Start) -> None:
    guarded = start(program, "--fault", "unseeded")
    ended = guarded.ended()
    assert ended.verdict is not None, guarded.front.text()
    assert ended.verdict.cause == "split_mismatch"
    assert ended.exit_code == 3
    assert guarded.losses(0) == guarded.losses(1) == []


@pytest.mark.long
@pytest.mark.parametrize("fault", ["unseeded", "steps"])
@pytest.mark.parametrize("program", [TRAINER, SFT, LIGHTNING, ACCELERATE], ids=lambda program: program.name)
def test_with_the_callback_the_refusal_is_the_fronts_verdict(
    program: Program, fault: str, start: Start
) -> None:
    guarded = start(program, "--callback", "--fault", fault)
    ended = guarded.ended()
    assert ended.verdict is not None, guarded.front.text()
    assert ended.verdict.cause == {"unseeded": "split_mismatch", "steps": "unequal_steps"}[fault]
    assert ended.exit_code == 3
    assert guarded.losses(0) == guarded.losses(1) == []


def _as_node(ground: Ground, node: int, nproc: int, port: int) -> dict[str, str]:
    """What a person exports on each of two nodes, as LLaMA-Factory's documentation says."""
    return {
        "NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": ground.address(0), "MASTER_PORT": str(port), "NPROC_PER_NODE": str(nproc),
        "UNISONO_TOKEN": "0123456789abcdef0123456789abcdef", "GLOO_SOCKET_IFNAME": "eth0" if ground.apart else "lo",
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("program", [LAUNCHER, LLAMA_FACTORY], ids=lambda program: program.name)
def test_a_different_number_of_ranks_on_one_node_is_refused_on_both(
    program: Program, start: Start, ground: Ground, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    arguments, changes = _of_llama_factory(request, tmp_path) if program is LLAMA_FACTORY else ((), {})
    port = ground.head_port()
    both = [
        start(
            program,
            *arguments,
            changes={**changes, **_as_node(ground, node, 2 - node, port)},
            ground=ground,
            node=node,
        )
        for node in range(2)
    ]
    ends = [one.ended() for one in both]
    assert [end.exit_code for end in ends] == [3, 3], both[0].front.text()
    assert {end.verdict.cause if end.verdict else "" for end in ends} == {"nproc_mismatch"}
    assert len({end.verdict.summary if end.verdict else "" for end in ends}) == 1
    assert not both[0].losses(0)


@pytest.mark.long
def test_an_unchanged_llama_factory_trains_on_two_nodes(
    start: Start, ground: Ground, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    arguments, changes = _of_llama_factory(request, tmp_path)
    port = ground.head_port()
    both = [
        start(LLAMA_FACTORY, *arguments, changes={**changes, **_as_node(ground, node, 1, port)}, ground=ground, node=node)
        for node in range(2)
    ]  # fmt: skip
    ends = [one.ended() for one in both]
    assert [end.exit_code for end in ends] == [0, 0], both[0].front.text() + both[1].front.text()
    assert (tmp_path / "saves" / "trainer_state.json").exists()


@pytest.fixture(scope="session")
def llama_factory_programs() -> Path:
    """The programs of LLaMA-Factory's own environment; where it cannot be had, the test says
    why.
    """
    try:
        return llama_factory.install()
    except llama_factory.NotInstalled as reason:
        pytest.skip(f"needs LLaMA-Factory: {reason}")


def _of_llama_factory(request: pytest.FixtureRequest, folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    programs: Path = request.getfixturevalue("llama_factory_programs")
    model = llama_factory.make_model(folder / "model")
    return (str(llama_factory.write_training(folder, steps=4, model=model)),), llama_factory.environment(
        programs
    )


@pytest.mark.long
def test_an_unchanged_llama_factory_trains_under_run(
    start: Start, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    arguments, changes = _of_llama_factory(request, tmp_path)
    guarded = start(LLAMA_FACTORY, *arguments, changes={**changes, "NPROC_PER_NODE": "2"})
    assert guarded.ended().exit_code == 0, guarded.front.text()
    assert (tmp_path / "saves" / "trainer_state.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["", "destroy"])
def test_ray_train_trains_under_run_also_where_its_loop_destroys_the_group(
    fault: str, start: Start, ground: Ground
) -> None:
    """In a network of its own: Ray takes the machine's first address for its daemons."""
    if not isinstance(ground, Namespaces):
        pytest.skip(why_no_namespaces())
    guarded = start(
        RAY, *(["--fault", fault] if fault else []), ground=ground, changes={"GLOO_SOCKET_IFNAME": "eth0"}
    )
    assert guarded.ended().exit_code == 0, guarded.front.text()
    assert len(guarded.losses(0)) == len(guarded.losses(1)) == 6


@pytest.mark.long
def test_a_worker_of_ray_that_is_killed_is_named(start: Start, ground: Ground) -> None:
    if not isinstance(ground, Namespaces):
        pytest.skip(why_no_namespaces())
    guarded = start(
        RAY, "--steps", "5000", "--step-s", "0.02", ground=ground, changes={"GLOO_SOCKET_IFNAME": "eth0"}
    )
    ended = guarded.ended(since=guarded.strike(1, signal.SIGKILL))
    assert ended.verdict is not None, guarded.front.text()
    assert ended.verdict.ranks == (1,)

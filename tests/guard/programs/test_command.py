"""How a command line is read. Pure. Run: pytest tests/guard/programs/test_command.py"""

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.errors import UsageError
from unisono.guard.places.topology import Accelerators
from unisono.guard.programs.launcher_facts import comparable, read_command
from unisono.guard.programs.program_request import RunRequest, RunShape, read_shape

WORDS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12),
    min_size=1,
    max_size=8,
)
MULTI = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29600", "NPROC_PER_NODE": "4"}


def shape(line: str, variables: dict[str, str] | None = None, **flags: Any) -> RunShape:
    words = tuple(shlex.split(line))
    return read_shape(RunRequest(words, **flags), read_command(words), variables or {}, Accelerators(0))


@given(WORDS)
def test_no_command_line_makes_reading_fail(words: list[str]) -> None:
    command = read_command(words)
    assert command.words == tuple(words)
    comparable(command)


@given(
    WORDS, st.sampled_from(["torchrun", "accelerate launch", "deepspeed", "python -m torch.distributed.run"])
)
def test_no_launcher_s_options_make_reading_fail(words: list[str], launcher: str) -> None:
    comparable(read_command([*launcher.split(), *words]))


@given(
    st.integers(2, 64), st.integers(1, 16), st.sampled_from(["-", "_"]), st.sampled_from(["=", " "]),
    st.lists(st.sampled_from(["--lr", "1", "-x", "--nnodes=9", "--node-rank", "7"]), max_size=5),
)  # fmt: skip
def test_torchrun_is_understood_however_it_is_spelt(
    nodes: int, nproc: int, dashes: str, joined: str, arguments: list[str]
) -> None:
    """And what the script itself is given is nobody's option."""
    options = {
        "nnodes": nodes,
        "node_rank": nodes - 1,
        "nproc_per_node": nproc,
        "master_addr": "a",
        "master_port": 29511,
    }
    words = []
    for name, value in options.items():
        words += f"--{name.replace('_', dashes)}{joined}{value}".split()
    found = shape(shlex.join(["torchrun", *words, "train.py", *arguments]))
    topology = found.topology
    assert (topology.nodes, topology.node_rank, topology.nproc) == (nodes, nodes - 1, nproc)
    assert (topology.head_host, topology.head_port, topology.nproc_declared) == ("a", 29511, True)
    assert found.command.arguments == tuple(arguments)


@pytest.mark.parametrize(
    ("line", "kind", "script"),
    [
        ("torchrun --standalone -m pkg.train x", "torchrun", "pkg.train"),
        ("python -u -m torch.distributed.run --nproc-per-node 2 t.py", "torchrun", "t.py"),
        ("accelerate launch --multi_gpu --num_processes 2 t.py", "accelerate", "t.py"),
        ("accelerate config", "other", ""),
        ("deepspeed --num_gpus 2 t.py --deepspeed c.json", "deepspeed", "t.py"),
        ("/opt/bin/python3.12 -W ignore t.py --nnodes 3", "python", "t.py"),
        ("python -c pass", "python", ""),
        ("bash run.sh", "other", ""),
    ],
)  # fmt: skip
def test_launchers_are_distinguished(line: str, kind: str, script: str) -> None:
    command = read_command(shlex.split(line))
    assert (command.kind, command.script) == (kind, script)


def test_the_environment_counts_where_the_arguments_report_nothing() -> None:
    found = shape("llamafactory-cli train x.yaml", MULTI).topology
    assert (found.nodes, found.node_rank, found.head_host, found.head_port, found.nproc) == (
        2,
        1,
        "a",
        29600,
        4,
    )
    found = shape("torchrun --node-rank 0 t.py", {**MULTI, "PET_NPROC_PER_NODE": "3"}).topology
    assert (found.node_rank, found.nproc, found.origins["node_rank"]) == (0, 3, "--node-rank")
    assert found.nproc_origin == "PET_NPROC_PER_NODE"


def test_a_head_of_two_words_is_reported_by_both() -> None:
    line = (
        "accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip a --main_process_port 29500"
        " --num_processes 4 t.py"
    )
    found = shape(line).topology
    assert (found.head_host, found.origins["head"]) == ("a", "--main_process_ip, --main_process_port")


def test_our_option_beats_a_variable_and_not_the_program_s_own_word() -> None:
    assert shape("torchrun t.py", MULTI, nproc=7).topology.nproc == 7
    with pytest.raises(UsageError, match="--nproc 7 and --nproc-per-node 2 contradict each other"):
        shape("torchrun --nproc-per-node 2 t.py", MULTI, nproc=7)
    with pytest.raises(UsageError, match="--head b and --master_addr a"):
        shape("torchrun --nnodes 2 --node_rank 0 --master_addr a t.py", head="b:1")


def test_the_fronts_leave_a_program_its_port() -> None:
    line = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:29400 t.py"
    found = shape(line, node_rank=0)
    assert found.own_rendezvous
    assert (found.topology.head_port, "29400" in found.notes[0]) == (29401, True)
    with pytest.raises(UsageError, match="same port"):
        shape(line, node_rank=0, head="a:29400")
    assert not shape(
        "torchrun --nnodes 2 --master_addr a --master_port 29400 t.py", node_rank=0
    ).own_rendezvous


def test_words_that_report_which_node_it_is_may_differ_and_no_others() -> None:
    def of(line: str) -> list[str]:
        return comparable(read_command(shlex.split(line)))

    assert of("torchrun --node-rank 0 --nnodes 2 /a/t.py --lr 1") == of(
        "/x/torchrun --nnodes 2 --node_rank=1 /b/t.py --lr 1"
    )
    assert of("torchrun --nnodes 2 t.py --lr 1") != of("torchrun --nnodes 2 t.py --lr 2")
    assert of("torchrun --nnodes 2 t.py --node-rank 1") != of("torchrun --nnodes 2 t.py --node-rank 2")

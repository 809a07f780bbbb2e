"""Breaks real programs under `unisono run`, and writes what was named and when: program × fault →
cause, ranks, seconds.

    python bench/run_programs.py                      all; writes bench/results/run_programs.json after each row
    python bench/run_programs.py -k "HF Trainer" -f kill -f steps

Seconds are counted from the blow where there is one (SIGKILL, SIGSTOP), from the shorter rank's
last step where a rank makes fewer, else from the start of the front: then the imports of torch and
the trainer are in them. Rows of an earlier call that are not made anew stay.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.guard.programs.guarded import (  # noqa: E402 - the tests are found through the line above
    ACCELERATE,
    DDP,
    FSDP2,
    LIGHTNING,
    LIGHTNING_ITSELF,
    RAY,
    SFT,
    TRAINER,
    Guarded,
    Named,
    Program,
)  # fmt: skip
from tests.guard.programs.node_loss import TRAINING, cut, kill, lose_power, training_on_two_nodes  # noqa: E402
from tests.jobs.nodes.network_namespaces import Namespaces  # noqa: E402

_RESULTS = ROOT / "bench" / "results" / "run_programs.json"
_PROGRAMS = (DDP, TRAINER, FSDP2, LIGHTNING, ACCELERATE, SFT, LIGHTNING_ITSELF, RAY)
_LONG = ("--steps", "5000", "--step-s", "0.02")
_LOST = {
    "power": (lose_power, "node 1 loses its power"), "node": (kill, "all of node 1 is killed"), "cut": (cut, "node 1 is cut off"),
}  # fmt: skip
_SHORTER_MAKES = {
    "ddp.py": 37,
    "fsdp2.py": 37,
    "ray_train.py": 37,
}  # of 40 steps; the trainers' rank makes 38


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    program: str
    fault: str
    exit_code: int
    cause: str
    ranks: tuple[int, ...]
    summary: str
    named_s: float | None
    ended_s: float
    counted_from: str
    load: float


_Start = Callable[..., Guarded]
"""Starts the program with these arguments under a front."""


def _healthy(start: _Start, _: Program) -> tuple[Guarded, float | None, str]:
    return start(), None, "start"


def _faulty(fault: str, *more: str) -> Callable[[_Start, Program], tuple[Guarded, float | None, str]]:
    return lambda start, _: (start("--fault", fault, *more), None, "start")


def _steps(start: _Start, program: Program) -> tuple[Guarded, float | None, str]:
    guarded = start("--fault", "steps", "--steps", "40")
    try:
        guarded.pid_at(1, _SHORTER_MAKES.get(program.file, 38))
    except AssertionError:  # refused before
        return guarded, None, "start"
    return guarded, time.monotonic(), "the shorter rank's last step"


def _strike(number: signal.Signals) -> Callable[[_Start, Program], tuple[Guarded, float | None, str]]:
    def strike(start: _Start, _: Program) -> tuple[Guarded, float | None, str]:
        guarded = start(*_LONG)
        return guarded, guarded.strike(1, number), number.name

    return strike


_FAULTS = {
    "healthy": _healthy, "destroy": _faulty("destroy"), "unseeded": _faulty("unseeded"), "steps": _steps, "callback": _faulty("steps", "--callback"),
    "kill": _strike(signal.SIGKILL), "stop": _strike(signal.SIGSTOP),
}  # fmt: skip
_WORDS = {
    "healthy": "none", "destroy": "the process group is destroyed twice", "unseeded": "a split without a seed", "steps": "a rank makes fewer steps",
    "callback": "a rank would make fewer steps, with the callback", "kill": "a rank is killed", "stop": "a rank is stopped",
}  # fmt: skip


def _can(program: Program, fault: str) -> bool:
    return not (
        (fault == "unseeded" and program.file in ("fsdp2.py", "ray_train.py"))
        or (fault == "callback" and program.file in ("ddp.py", "fsdp2.py", "ray_train.py"))
        or (fault in ("destroy", "callback", "unseeded") and program is LIGHTNING_ITSELF)
        or (fault == "destroy" and program is SFT)
        or (fault == "steps" and program.file == "accelerate_loop.py" and fault != "callback")
    )


def _row(program: Program, fault: str) -> Row:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        load, folder, place = os.getloadavg()[0], Path(name), {}
        if program is RAY:  # it takes the machine's first address for its daemons
            apart = Namespaces(1, folder)
            stack.callback(apart.close)
            place = {"ground": apart, "changes": {"GLOO_SOCKET_IFNAME": "eth0"}}

        def start(*arguments: str) -> Guarded:
            guarded = Guarded(program, folder, *arguments, **place)  # type: ignore[arg-type]
            stack.callback(guarded.close)
            return guarded

        guarded, since, counted = _FAULTS[fault](start, program)
        ended: Named = guarded.ended(since=since)
    return _found(program, _WORDS[fault], ended, counted=counted, load=load)


def _lost_row(fault: str) -> Row:
    """Of two nodes, each a network namespace; what the one that is left says."""
    blow, words = _LOST[fault]
    with tempfile.TemporaryDirectory() as name:
        load, folder = os.getloadavg()[0], Path(name)
        apart = Namespaces(2, folder)
        try:
            with training_on_two_nodes(apart, folder) as both:
                since = time.monotonic()
                blow(apart, 1)
                ended = both[0].ended(since=since)
        finally:
            apart.close()
    return _found(TRAINING, words, ended, counted="the blow", load=load)


def _found(program: Program, fault: str, ended: Named, *, counted: str, load: float) -> Row:
    verdict = ended.verdict
    return Row(
        program.name, fault, ended.exit_code, verdict.cause if verdict else "none", verdict.ranks if verdict else (),
        verdict.summary if verdict else "", ended.named_s, ended.ended_s, counted, round(load, 1),
    )  # fmt: skip


def main() -> None:
    """Makes the rows that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", default="", help="only programs with this in their name")
    parser.add_argument("-f", action="append", choices=[*_FAULTS, *_LOST], help="only these faults")
    asked = parser.parse_args()
    kept = json.loads(_RESULTS.read_text())["rows"] if _RESULTS.exists() else []
    rows = {(row["program"], row["fault"]): row for row in kept}
    wanted = [
        partial(_row, program, fault)
        for program in _PROGRAMS if asked.k in program.name
        for fault in _FAULTS if fault in (asked.f or _FAULTS) and _can(program, fault)
    ]  # fmt: skip
    wanted += [partial(_lost_row, fault) for fault in _LOST if asked.k in TRAINING.name and fault in (asked.f or _LOST)]  # fmt: skip
    for make in wanted:
        try:
            row = make()
        except AssertionError as error:
            print(error, file=sys.stderr)
            continue
        rows[row.program, row.fault] = asdict(row)
        print(json.dumps(asdict(row)), flush=True)
        _write(list(rows.values()))


def _write(rows: list[dict[str, object]]) -> None:
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "note": "`load` is the machine's load average when a row began; over 2 it was shared"}  # fmt: skip
    _RESULTS.write_text(
        json.dumps({"schema": 1, "machine": machine, "rows": rows}, indent=1, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()

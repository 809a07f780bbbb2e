"""Cases from errors that torch, datasets, peft, accelerate, TRL and wandb raise themselves."""

from __future__ import annotations

import functools
import signal
import sys
from typing import TYPE_CHECKING

from tests.guard.diagnosis.making.record import PROGRAMS, Want, case, neutral, run, squeeze, when

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

SOURCE = (
    "made: torch 2.13 CPU, transformers 5.23, datasets 5.2, peft 0.21, accelerate 1.15, trl 1.16,"
    " wandb 0.28; paths and hosts rewritten"
)
PROGRAM = PROGRAMS / "library_errors.py"
UNREADABLE, FROZEN = Want("dataset_file_unreadable"), Want("adapter_gets_no_gradient")
PROMPT, BATCH = Want("waits_for_input"), Want("batch_sizes_do_not_divide")
MODES = {
    "schema": UNREADABLE, "types": UNREADABLE, "parquet": UNREADABLE, "csv": UNREADABLE,
    "weights_only": Want("weights_only_load"), "no_grad": FROZEN, "targets": FROZEN, "all_frozen": FROZEN,
    "shared": Want("shared_tensors_on_save"), "bf16": Want("bf16_unsupported"),
    "cuda_home": Want("extension_build_failed"), "ninja": Want("extension_build_failed"), "trl_batch": BATCH,
    "pdb": PROMPT, "remote_code": PROMPT, "answers": PROMPT, "wandb": Want("tracker_login"),
}  # fmt: skip
"""What goes wrong in one process, and what a diagnosis has to say."""


def one(
    base: Path, mode: str, want: Want, place: int, launcher: tuple[str, ...] = (sys.executable,)
) -> dict[str, object]:
    """A program of one mode; `wandb` has to be installed for its own."""
    work = base / mode
    text = run([*launcher, str(PROGRAM)], {"MODE": mode, "HOME": str(work)}, work, 90)
    return kept(f"lib-{mode.replace('_', '-')}", want, text, work, place)


def kept(name: str, want: Want, text: str, work: Path, place: int) -> dict[str, object]:
    text = neutral(text, place, work, "train.py").replace("library_errors.py", "train.py")
    return case(name, want, {"train.log": squeeze(text, 12_000)}, SOURCE)


def torchrun() -> tuple[str, ...]:
    return ("torchrun", "--standalone", "--nproc-per-node", "2")


def hung_up(base: Path) -> dict[str, object]:
    """The launcher gets SIGHUP, as when its terminal is closed."""
    work = base / "hung-up"

    def hang_up(child: subprocess.Popen[bytes]) -> None:
        when(work / "stdout", "step 20 ")
        child.send_signal(signal.SIGHUP)

    text = run([*torchrun(), str(PROGRAM)], {"MODE": "steps"}, work, 90, during=hang_up)
    return kept("lib-hung-up", Want("terminal_closed"), text, work, 2)


def cases(base: Path) -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    """All of them: (name, what makes it)."""
    for place, (mode, want) in enumerate(MODES.items()):
        yield f"lib-{mode.replace('_', '-')}", functools.partial(one, base, mode, want, place)
    for mode, want in (("split", Want("model_split_over_devices")), ("accelerate_batch", BATCH)):
        launcher = torchrun()
        yield f"lib-{mode.replace('_', '-')}", functools.partial(one, base, mode, want, 1, launcher)
    yield "lib-hung-up", functools.partial(hung_up, base)

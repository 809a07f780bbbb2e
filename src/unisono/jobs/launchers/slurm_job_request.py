"""A batch job from the command line and the config, and its batch script.

Pure, except for the working directory and the Python path.
"""

import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from unisono.base.errors import UsageError
from unisono.base.text import one_line, parse_seconds
from unisono.guard.facts.slurm import seconds_of
from unisono.guard.places.topology import positive
from unisono.guard.rundir import RunDir
from unisono.jobs.launchers.launcher import front_command
from unisono.jobs.launchers.slurm_controller import NodesRequest
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.config import RunConfig

_WORD = re.compile(r"[A-Za-z0-9_.@:][A-Za-z0-9_.@:-]*")
_SIGNAL_MARGIN_S = 15
"""Between the end of `grace` and the end of the job: ranks and fronts exit, and the script requests
its requeue.
"""

_CONFIG = "/dev/stdin"  # srun sends it to every node: the config at submission, even without a shared disk
_EARLY_S = 30  # Slurm checks limits every 30 s and may signal that much earlier


@dataclass(frozen=True)
class JobRequest(NodesRequest):
    """One batch job.

    Attributes:
        folder: the working directory; paths of the config are relative to it.
        signal_s: seconds before the end of the job at which Slurm signals it.
        words: the command of each node, without `--launcher` and related options.
        typed: the user's command, for messages.
    """

    name: str
    run: RunDir
    folder: Path
    signal_s: int
    words: tuple[str, ...]
    typed: str


def job_request(
    request: TrainRequest, config: RunConfig, *, partition: str | None, time_limit: str | None, gpus: bool
) -> JobRequest:
    """The batch job of a request.

    Args:
        config: with absolute paths.
        partition: as typed.
        time_limit: as typed.
        gpus: whether the cluster allocates accelerators.

    Raises:
        UsageError: if an option is not valid for Slurm.
    """
    least, nodes = nodes_of(request.nodes)
    run = RunDir(Path(config.output_dir))
    checked_partitions(partition, time_limit)
    signal_s = math.ceil(parse_seconds(config.grace)) + _SIGNAL_MARGIN_S
    limit_s = seconds_of(time_limit or "")
    if limit_s is not None and limit_s < signal_s + _EARLY_S:
        raise UsageError.of(
            f"--time {time_limit} ends before anything could be trained",
            where="command line",
            why=(
                f"the run starts to save {signal_s} s before the end, and Slurm may signal {_EARLY_S} s"
                " earlier"
            ),
            fix="set a longer limit, e.g. --time 8:00:00",
        )
    if any(character in str(path) for path in (run.root, Path.cwd()) for character in "\n\r\0"):
        raise UsageError.of(
            "a path contains a line break", where="output_dir", fix="set a different output_dir"
        )
    return JobRequest(
        name=f"unisono-{re.sub(r'[^A-Za-z0-9_.-]', '-', run.root.name)[:60]}",
        run=run,
        folder=Path.cwd(),
        least_nodes=least,
        nodes=nodes,
        nproc=request.nproc,
        gpus=gpus_of(request.nproc, config) if gpus else 0,
        partition=partition,
        time=time_limit,
        signal_s=signal_s,
        words=front_command(request, _CONFIG),
        typed=request.command,
    )


def checked_partitions(partition: str | None, time_limit: str | None) -> tuple[str, ...]:
    """The requested partitions, checked together with the time limit: they become words of Slurm's
    commands.

    Raises:
        UsageError: if one has characters that Slurm does not use.
    """
    for name, value in (("--partition", partition), ("--time", time_limit)):
        for word in value.split(",") if value is not None else ():
            _check(word, name)
    return tuple(partition.split(",")) if partition else ()


def nodes_of(text: str | None) -> tuple[int, int]:
    """The smallest and the largest number of nodes in `--nodes`; 1 if it is absent.

    Raises:
        UsageError: if it is not N or MIN:MAX.
    """
    low, colon, high = (text or "1").partition(":")
    least = positive(low, "--nodes")
    most = positive(high, "--nodes") if colon else least
    if least > most:
        raise UsageError.of(
            f"--nodes {text}: the first number is larger than the second",
            where="command line",
            why="MIN:MAX are the smallest and the largest number of nodes",
            fix=f"--nodes {most}:{least}",
        )
    return least, most


def _check(word: str, name: str) -> None:
    if _WORD.fullmatch(word) and len(word) <= 100:
        return
    raise UsageError.of(
        f"{name} {one_line(word, limit=80)!r} is not a valid name or limit for Slurm",
        where="command line",
        why="letters, digits and _ . @ : - are valid, but not - at the start",
        fix=f"e.g. {name} {'gpu' if name == '--partition' else '8:00:00'}",
    )


def gpus_of(nproc: int | None, config: RunConfig) -> int:
    """The number of accelerators for a node: where Slurm allocates them, a rank without one would
    train on the CPU.

    Raises:
        UsageError: if the number of ranks is not given.
    """
    if config.device == "cpu":
        return 0
    if nproc is None:
        raise UsageError.of(
            "this cluster allocates accelerators, but the number for each node is not given",
            where="command line",
            why="every rank needs one",
            fix="pass --nproc N, or device=cpu to train on the CPU",
        )
    return nproc


def quoted(words: tuple[str, ...]) -> str:
    """The words, quoted for a shell."""
    return shlex.join(words)


_MAKE_TOKEN = "import secrets; print(secrets.token_urlsafe(32))"  # noqa: S105 - a command, not a token
_BODY = """\
umask 077
mkdir -p -m 700 -- {folder}
# The nodes' shared secret: made here for each start and passed in srun's environment. \
It is not in any file or command line.
UNISONO_TOKEN="$({python} -c {make_token})"; export UNISONO_TOKEN
newest() {{ ls -- {checkpoints} 2>/dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1; }}
before="$(newest)"

# One front on each node; node 0 is the head. Output: lines of JSON, prefixed with the node's number. \
All fronts get the config below.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1{cpus}{no_kill} --kill-on-bad-exit=0 --wait=0 --label \\
  {command}{at_least} >>{output}."$SLURM_JOB_ID" 2>&1 <<'{end}' &
{config}{end}
step=$!

# --signal sends USR1 {signal_s} s before the time limit: the fronts save a checkpoint and exit with 75, \
and the job is requeued.
out_of_time=
trap 'out_of_time=1; kill -USR1 "$step" 2>/dev/null' USR1
trap 'kill -USR1 "$step" 2>/dev/null' TERM
while :; do wait "$step"; kill -0 "$step" 2>/dev/null || break; done
wait "$step"; code=$?
if [ "$code" -eq 75 ] && [ -n "$out_of_time" ]; then
  if [ "$(newest)" = "$before" ]; then
    echo "unisono: no new checkpoint within this time limit, so the job is not requeued: set a longer --time"
  else
    echo "unisono: the time limit is reached; the job is requeued and will resume from $(newest)"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
  fi
fi
exit "$code"
"""


def batch_script(spec: JobRequest, config: str) -> str:
    """The complete batch script; every word from the user is quoted.

    Args:
        config: the text of the config file.
    """
    elastic = spec.least_nodes < spec.nodes
    options = {
        "--job-name": spec.name,
        "--nodes": spec.number,
        # With a number of tasks Slurm allocates only the smallest number of nodes; srun below sets
        # one task for each node.
        "--ntasks-per-node": None if elastic else "1",
        "--mincpus": str(spec.nproc) if elastic and spec.nproc else None,
        "--cpus-per-task": str(spec.nproc) if spec.nproc else None,
        "--gpus-per-node": str(spec.gpus) if spec.gpus else None,
        "--partition": spec.partition,
        "--time": spec.time,
        "--signal": f"B:USR1@{spec.signal_s}",
        "--chdir": str(spec.folder),
        "--output": f"{_literal(spec.run.slurm)}/%j.log",
        "--open-mode": "append",
    }
    lines = ["#!/bin/bash", f"# Written by unisono for: {' '.join(spec.typed.split())}"]
    lines += [f"#SBATCH {name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue", *(["#SBATCH --no-kill"] if elastic else []), ""]
    body = _BODY.format(
        folder=shlex.quote(str(spec.run.slurm)),
        python=shlex.quote(sys.executable),
        make_token=shlex.quote(_MAKE_TOKEN),
        checkpoints=shlex.quote(str(spec.run.checkpoints)),
        cpus=f" --cpus-per-task={spec.nproc}" if spec.nproc else "",
        no_kill=" --no-kill" if elastic else "",
        at_least=f' --nodes {spec.least_nodes}:"$SLURM_JOB_NUM_NODES"' if elastic else "",
        command=quoted(spec.words),
        output=shlex.quote(str(spec.run.slurm / "lines")),
        signal_s=spec.signal_s,
        config=config if config.endswith("\n") else config + "\n",
        end=_end_of(config),
    )
    return "\n".join(lines) + body


def _end_of(config: str) -> str:
    """An end marker that does not occur in the config."""
    end = "END_OF_CONFIG"
    while end in config:
        end += "_"
    return end


def output_file(folder: Path, job: str) -> Path:
    """The file with the output of a job's fronts."""
    return folder / f"lines.{job}"


def log_file(folder: Path, job: str) -> Path:
    """The file with the output of the script itself and of Slurm."""
    return folder / f"{job}.log"


def _literal(path: Path) -> str:
    """A path without Slurm's replacement patterns."""
    return str(path).replace("%", "%%")

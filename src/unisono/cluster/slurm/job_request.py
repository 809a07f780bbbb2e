"""What a batch job is to be, read from the command line and the config, and its batch script. Pure but for the checks of the machine here."""

import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from unisono.config import RunConfig
from unisono.errors import UsageError
from unisono.facts.slurm import seconds_of
from unisono.launch.train_request import TrainRequest
from unisono.plan.topology import positive
from unisono.rundir import RunDir
from unisono.supervise.child_process import option_words
from unisono.text import one_line, parse_seconds

_WORD = re.compile(r"[A-Za-z0-9_.@:][A-Za-z0-9_.@:-]*")
_SIGNAL_MARGIN_S = 15
"""Between the end of `grace` and the end of the job: ranks and fronts are gone by then, and the script asks for its requeue."""

_CONFIG = "/dev/stdin"  # srun gives it to every node: as it was when the job was submitted, also where no disk is shared
_EARLY_S = 30  # Slurm looks at limits every half minute, and rounds towards early


@dataclass(frozen=True)
class JobRequest:
    """One batch job.

    Attributes:
        name: of the job, as squeue shows it.
        run: the run's directory.
        folder: where the commands are given; paths of the config are relative to it.
        least_nodes: so many are enough.
        nodes: how many.
        nproc: ranks on each node; None: as many as its devices.
        gpus: accelerators that each node is asked for; 0: none.
        partition: as it was typed; None: the cluster's own choice.
        time: as it was typed; None: the partition's own limit.
        signal_s: seconds before the end of the job at which it is told.
        words: of the command that each node runs, without `--launcher` and its like.
        typed: the command, for people.
    """

    name: str
    run: RunDir
    folder: Path
    least_nodes: int
    nodes: int
    nproc: int | None
    gpus: int
    partition: str | None
    time: str | None
    signal_s: int
    words: tuple[str, ...]
    typed: str

    @property
    def partitions(self) -> tuple[str, ...]:
        """Those that are named."""
        return tuple(self.partition.split(",")) if self.partition else ()


def job_request(request: TrainRequest, config: RunConfig, *, gpus: bool) -> JobRequest:
    """The job that a request stands for.

    Args:
        request: with `--launcher slurm`.
        config: its paths absolute.
        gpus: whether the cluster gives out accelerators.

    Raises:
        UsageError: if an option cannot be one of Slurm's.
    """
    least, nodes = nodes_of(request.nodes)
    run = RunDir(Path(config.output_dir))
    checked_partitions(request)
    signal_s = math.ceil(parse_seconds(config.grace)) + _SIGNAL_MARGIN_S
    limit_s = seconds_of(request.time or "")
    if limit_s is not None and limit_s < signal_s + _EARLY_S:
        raise UsageError.of(
            f"--time {request.time} is over before anything could be trained",
            where="command line",
            why=f"{signal_s} s before the end the run begins to save, and Slurm may say so {_EARLY_S} s earlier",
            fix="ask for more, as --time 8:00:00",
        )
    if any(character in str(path) for path in (run.root, Path.cwd()) for character in "\n\r\0"):
        raise UsageError.of("a path has a line break in it", where="output_dir", fix="set another output_dir")
    return JobRequest(
        name=f"unisono-{re.sub(r'[^A-Za-z0-9_.-]', '-', run.root.name)[:60]}",
        run=run,
        folder=Path.cwd(),
        least_nodes=least,
        nodes=nodes,
        nproc=request.nproc,
        gpus=gpus_of(request.nproc, config) if gpus else 0,
        partition=request.partition,
        time=request.time,
        signal_s=signal_s,
        words=_node_command(request),
        typed=request.command,
    )


def checked_partitions(request: TrainRequest) -> tuple[str, ...]:
    """The partitions that are named. They and the time limit are checked: they become words of Slurm's commands.

    Raises:
        UsageError: if one cannot be a word of Slurm's.
    """
    for name, value in (("--partition", request.partition), ("--time", request.time)):
        for word in value.split(",") if value is not None else ():
            _check(word, name)
    return tuple(request.partition.split(",")) if request.partition else ()


def nodes_of(text: str | None) -> tuple[int, int]:
    """The fewest nodes and all of them, of `--nodes`; one where it is absent.

    Raises:
        UsageError: if it is no such number.
    """
    low, colon, high = (text or "1").partition(":")
    least = positive(low, "--nodes")
    most = positive(high, "--nodes") if colon else least
    if least > most:
        raise UsageError.of(
            f"--nodes {text}: the first number is larger than the second",
            where="command line",
            why="MIN:MAX are the fewest nodes that the job can do with, and all of them",
            fix=f"--nodes {most}:{least}",
        )
    return least, most


def _check(word: str, name: str) -> None:
    if _WORD.fullmatch(word) and len(word) <= 100:
        return
    raise UsageError.of(
        f"{name} {one_line(word, limit=80)!r} is nothing that Slurm knows",
        where="command line",
        why="it has letters, digits and _ . @ : -, and does not begin with -",
        fix=f"as in {name} {'gpu' if name == '--partition' else '8:00:00'}",
    )


def gpus_of(nproc: int | None, config: RunConfig) -> int:
    """How many accelerators a node needs: on a cluster that gives them out, a rank without one would train on the CPU.

    Raises:
        UsageError: if nothing says it.
    """
    if config.device == "cpu":
        return 0
    if nproc is None:
        raise UsageError.of(
            "this cluster gives out accelerators, and nothing says how many a node needs",
            where="command line",
            why="every rank has one of its own",
            fix="pass --nproc N, or device=cpu to train on the CPU",
        )
    return nproc


def _node_command(request: TrainRequest) -> tuple[str, ...]:
    """The command of each node. `--fresh` is not in it: a job that is requeued would rename its own run.

    Nor is `--nodes`: the step says how many there are, and of MIN:MAX the script knows how many Slurm has given.
    """
    options = {
        "--nproc": request.nproc,
        "--devices": request.devices,
        "--restarts": request.restarts,
        "--join-timeout": f"{request.join_timeout_s:g}",
    }
    allowed = [word for key in request.allow for word in ("--allow", key)]
    flags = {
        "--resume": request.resume,
        "--trust": request.trust,
        "--debug-comm": request.debug_comm,
        "--no-rehearse": not request.rehearse,
        "--json": True,
    }
    given = option_words({name: is_given or None for name, is_given in flags.items()})
    front = (sys.executable, "-m", "unisono", "train", _CONFIG, *request.overrides)
    return (*front, *option_words(options), *allowed, *given)


def quoted(words: tuple[str, ...]) -> str:
    """The words as a shell reads them."""
    return shlex.join(words)


_MAKE_TOKEN = "import secrets; print(secrets.token_urlsafe(32))"  # noqa: S105 - it makes one
_BODY = """\
umask 077
mkdir -p -m 700 -- {folder}
# The nodes' shared secret: made here for each start, and handed on in srun's environment. No file and no command line has it.
UNISONO_TOKEN="$({python} -c {make_token})"; export UNISONO_TOKEN
newest() {{ ls -- {checkpoints} 2>/dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1; }}
before="$(newest)"

# One front on each node; node 0 is the head. Lines of JSON, each behind the number of its node. All get the config below.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1{cpus}{no_kill} --kill-on-bad-exit=0 --wait=0 --label \\
  {command}{at_least} >>{output}."$SLURM_JOB_ID" 2>&1 <<'{end}' &
{config}{end}
step=$!

# USR1 comes {signal_s} s before the time limit, by --signal: the fronts save a checkpoint and leave with 75, and the job is queued again.
out_of_time=
trap 'out_of_time=1; kill -USR1 "$step" 2>/dev/null' USR1
trap 'kill -USR1 "$step" 2>/dev/null' TERM
while :; do wait "$step"; kill -0 "$step" 2>/dev/null || break; done
wait "$step"; code=$?
if [ "$code" -eq 75 ] && [ -n "$out_of_time" ]; then
  if [ "$(newest)" = "$before" ]; then
    echo "unisono: no new checkpoint in this time limit, so the job is not queued again: ask for more --time"
  else
    echo "unisono: the time is over; the job goes back into the queue, and on from $(newest)"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
  fi
fi
exit "$code"
"""


def batch_script(asked: JobRequest, config: str) -> str:
    """The whole script; every word that somebody chose is quoted.

    Args:
        asked: the job.
        config: the text of the config file.
    """
    number = str(asked.nodes) if asked.least_nodes == asked.nodes else f"{asked.least_nodes}-{asked.nodes}"
    elastic = asked.least_nodes < asked.nodes
    options = {
        "--job-name": asked.name,
        "--nodes": number,
        # With a number of tasks Slurm gives no more nodes than the fewest have tasks; srun says below that it is one a node.
        "--ntasks-per-node": None if elastic else "1",
        "--mincpus": str(asked.nproc) if elastic and asked.nproc else None,
        "--cpus-per-task": str(asked.nproc) if asked.nproc else None,
        "--gpus-per-node": str(asked.gpus) if asked.gpus else None,
        "--partition": asked.partition,
        "--time": asked.time,
        "--signal": f"B:USR1@{asked.signal_s}",
        "--chdir": str(asked.folder),
        "--output": f"{_literal(asked.run.slurm)}/%j.log",
        "--open-mode": "append",
    }
    lines = ["#!/bin/bash", f"# Written by unisono for: {' '.join(asked.typed.split())}"]
    lines += [f"#SBATCH {name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue", *(["#SBATCH --no-kill"] if elastic else []), ""]
    body = _BODY.format(
        folder=shlex.quote(str(asked.run.slurm)),
        python=shlex.quote(sys.executable),
        make_token=shlex.quote(_MAKE_TOKEN),
        checkpoints=shlex.quote(str(asked.run.checkpoints)),
        cpus=f" --cpus-per-task={asked.nproc}" if asked.nproc else "",
        no_kill=" --no-kill" if elastic else "",
        at_least=f' --nodes {asked.least_nodes}:"$SLURM_JOB_NUM_NODES"' if elastic else "",
        command=quoted(asked.words),
        output=shlex.quote(str(asked.run.slurm / "lines")),
        signal_s=asked.signal_s,
        config=config if config.endswith("\n") else config + "\n",
        end=_end_of(config),
    )
    return "\n".join(lines) + body


def _end_of(config: str) -> str:
    """A line that the config does not have."""
    end = "END_OF_CONFIG"
    while end in config:
        end += "_"
    return end


def output_file(folder: Path, job: str) -> Path:
    """The file into which the script has the fronts of a job speak."""
    return folder / f"lines.{job}"


def log_file(folder: Path, job: str) -> Path:
    """The file of the script's own words, and of Slurm's on the job."""
    return folder / f"{job}.log"


def _literal(path: Path) -> str:
    """A path in which Slurm replaces nothing."""
    return str(path).replace("%", "%%")

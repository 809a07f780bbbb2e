"""The batch script of a job. Pure."""

import shlex
import sys
from pathlib import Path

from unisono.launch.slurm.asked import JobAsked, quoted

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


def batch_script(asked: JobAsked, config: str) -> str:
    """The whole script; every word that somebody chose is quoted.

    Args:
        asked: the job.
        config: the text of the config file.
    """
    number = str(asked.nodes) if asked.least_nodes == asked.nodes else f"{asked.least_nodes}-{asked.nodes}"
    elastic = asked.least_nodes < asked.nodes
    options = {
        "--job-name": asked.name, "--nodes": number,
        # With a number of tasks Slurm gives no more nodes than the fewest have tasks; srun says below that it is one a node.
        "--ntasks-per-node": None if elastic else "1", "--mincpus": str(asked.nproc) if elastic and asked.nproc else None,
        "--cpus-per-task": str(asked.nproc) if asked.nproc else None,
        "--gpus-per-node": str(asked.gpus) if asked.gpus else None, "--partition": asked.partition, "--time": asked.time,
        "--signal": f"B:USR1@{asked.signal_s}", "--chdir": str(asked.folder),
        "--output": f"{_literal(asked.run.slurm)}/%j.log", "--open-mode": "append",
    }  # fmt: skip
    lines = ["#!/bin/bash", f"# Written by unisono for: {' '.join(asked.typed.split())}"]
    lines += [f"#SBATCH {name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue", *(["#SBATCH --no-kill"] if elastic else []), ""]
    body = _BODY.format(
        folder=shlex.quote(str(asked.run.slurm)), python=shlex.quote(sys.executable), make_token=shlex.quote(_MAKE_TOKEN),
        checkpoints=shlex.quote(str(asked.run.checkpoints)), cpus=f" --cpus-per-task={asked.nproc}" if asked.nproc else "",
        no_kill=" --no-kill" if elastic else "", at_least=f' --nodes {asked.least_nodes}:"$SLURM_JOB_NUM_NODES"' if elastic else "", command=quoted(asked.words), output=shlex.quote(str(asked.run.slurm / "lines")),
        signal_s=asked.signal_s, config=config if config.endswith("\n") else config + "\n", end=_end_of(config),
    )  # fmt: skip
    return "\n".join(lines) + body


def _end_of(config: str) -> str:
    """A line that the config does not have."""
    end = "END_OF_CONFIG"
    while end in config:
        end += "_"
    return end


def lines_of(folder: Path, job: str) -> Path:
    """The file into which the script has the fronts of a job speak."""
    return folder / f"lines.{job}"


def log_of(folder: Path, job: str) -> Path:
    """The file of the script's own words, and of Slurm's on the job."""
    return folder / f"{job}.log"


def _literal(path: Path) -> str:
    """A path in which Slurm replaces nothing."""
    return str(path).replace("%", "%%")

"""What Slurm's variables say of the step that this process is a task of."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SlurmStep:
    """One `srun` of a job, seen from one of its tasks.

    Attributes:
        job: its id.
        step: the step's number within the job.
        restart: how often the job was requeued before.
        nodes: of this step.
        tasks: of this step, over all nodes.
        node: this node's number within the step, from 0.
        nodelist: the step's nodes as Slurm writes them: `gpu[01-04,7]`.
    """

    job: str
    step: str
    restart: int
    nodes: int
    tasks: int
    node: int
    nodelist: str

    @property
    def name(self) -> str:
        """JOB.STEP, as sacct and scancel know it."""
        return f"{self.job}.{self.step}"


def read_slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """The step, or None outside of one: a batch script and the shell of salloc are in a job, and in no step."""
    numbers = {
        name: _whole(env.get(f"SLURM_{name}", ""))
        for name in ("STEP_NUM_NODES", "STEP_NUM_TASKS", "NODEID", "PROCID")
    }
    job, step, nodelist = (env.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "STEP_NODELIST"))
    if not (job.isdigit() and step.isdigit() and nodelist) or None in numbers.values():
        return None
    nodes, tasks, node = (numbers[name] or 0 for name in ("STEP_NUM_NODES", "STEP_NUM_TASKS", "NODEID"))
    if not 0 <= node < nodes:
        return None
    return SlurmStep(job, step, _whole(env.get("SLURM_RESTART_COUNT", "")) or 0, nodes, tasks, node, nodelist)


def hosts_of(nodelist: str) -> list[str]:
    """The names that a list of Slurm's stands for, in its order; empty if it cannot be read.

    `a,b` or `gpu[01-03,07]-ib` or `rack[1-2]node[1-4]`.
    """
    names: list[str] = []
    for word in _split(nodelist):
        expanded = _expand(word)
        if not expanded:
            return []
        names += expanded
    return names


def seconds_of(limit: str) -> float | None:
    """A time limit as Slurm writes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; None if it is none, or there is none."""
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,6}))?(?::(\d{1,6}))?", limit.strip())
    if found is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found[1] is not None or found[4] is not None:
        return days * 86_400.0 + first * 3_600 + second * 60 + third
    return first * 60.0 + second


_MOST = 100_000


def _split(text: str) -> list[str]:
    """At commas that are outside of brackets; empty where brackets do not match."""
    word = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
    return re.findall(word, text) if re.fullmatch(rf"{word}(?:,{word})*", text) else []


def _expand(word: str) -> list[str]:
    found = re.search(r"\[([^\[\]]*)\]", word)
    if found is None:
        return [] if "[" in word or "]" in word else [word]
    before, after = word[: found.start()], word[found.end() :]
    middle: list[str] = []
    for part in found[1].split(","):
        span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if span is None:
            return []
        low, high = int(span[1]), int(span[2] or span[1])
        if high < low or high - low > _MOST:
            return []
        middle += [f"{number:0{len(span[1])}d}" for number in range(low, high + 1)]
    rest = _expand(after) if after else [""]
    return [before + number + end for number in middle for end in rest]


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

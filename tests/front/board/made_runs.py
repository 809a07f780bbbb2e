"""Directories as runs leave them, in every state that the board shows; small and large."""

import json
import math
import random
from pathlib import Path
from typing import Any

from unisono.trainer.objectives.rollout_files import write_rollout
from unisono.trainer.objectives.sampled import AnswerGroup, SampledAnswer

HOSTILE = (
    "<script>window.hurt=1</script>", "</script><script>window.hurt=1</script>", "</style><img src=x onerror='window.hurt=1'>",
    "\u202egnp.exe\u202c", "\x1b[31mred\x1b[0m\x1b]0;title\x07", "<!--", "]]>", "{{7*7}}", "javascript:window.hurt=1", "\u2028line\u2029",
)  # fmt: skip
SECRET = "hf_" + "aB3dE5gH7jK9mN1pQ3rS5tU7vW"
VERDICT: dict[str, Any] = {
    "schema": 1, "cause": "rank_stopped", "when": "during", "severity": "fatal", "summary": "rank 1, node 0 (a) is stopped (state T), in forward and backward of step 40, for 3 s",
    "ranks": [1], "hosts": ["a"], "phase": "compute", "step": 40, "named_after_s": 3.1, "confidence": 1.0,
    "evidence": [{"where": "rank 1, node 0 (a)", "text": "no progress for 3.1 s; state T"}], "fix": ["Find out who stopped it: Ctrl-Z in a terminal, a debugger."],
}  # fmt: skip


def metrics_line(
    step: int, rng: random.Random, *, lr: float = 2e-4, total: int = 1_000_000
) -> dict[str, Any]:
    """A line of metrics.jsonl, as rank 0 writes it."""
    return {
        "step": step, "epoch": step / 100, "loss": 8 * math.exp(-step * lr / 0.012) + 0.1 + 0.05 * rng.random(), "lr": lr * (1 - step / (total + 1)), "grad_norm": 1 + rng.random(),
        "tokens": step * 1500, "loss_tokens": step * 1100, "tokens_per_second": 4000 + 500 * rng.random(), "step_time_s": 0.3 + 0.02 * rng.random(), "data_time_s": 0.001,
        "comm_time_s": 0.02, "cpu_time_s": 0.1, "memory_bytes": 501608448,
    }  # fmt: skip


def make_run(
    root: Path,
    *,
    steps: int = 40,
    total: int = 100,
    ranks: int = 2,
    outcome: str | None = "completed",
    seed: int = 0,
    lr: float = 2e-4,
    rollouts: int = 0,
    **more: Any,
) -> Path:
    """A run with all its regions.

    Args:
        rollouts: its first steps with sampled answers.
        outcome: of result.json; None: there is none.
        more: keys of result.json.
    """
    rng = random.Random(seed)
    for folder in ("events", "logs", "verdicts", "checkpoints"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    write(root / "plan.json", plan_of(total, ranks, lr))
    write(root / "config.yaml", None, text="model: {path: builtin:tiny}\n")
    write(root / "data.json", {
        "schema": 1, "sources": [{"path": "data/train.jsonl", "rows": 2000, "used": 1990, "cut": 4, "bad": 2, "eval": 0, "tokens": 81868, "dropped": {"longer than 256 tokens": 8}}],
        "total": {"rows": 2000, "used": 1990, "cut": 4, "bad": 2, "eval": 0, "tokens": 81868, "dropped": {"longer than 256 tokens": 8}},
        "rows": [{"file": "data/train.jsonl", "line": 17, "what": "bad", "why": "no completion"}],
    })  # fmt: skip
    with (root / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(metrics_line(step, rng, lr=lr, total=total)) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "eval_loss": 2 / step}) + "\n")
    write_ranks(root, ranks, steps)
    for step in range(1, rollouts + 1):
        write_rollout(root, step, groups_of(step, rng, share=0.7 * step / rollouts), rank=0, ranks=1)
    if outcome is not None:
        codes = {"completed": 0, "stalled": 4, "died": 5, "preempted": 75}
        write(
            root / "result.json",
            {
                "schema": 1,
                "run_id": "r",
                "outcome": outcome,
                "exit_code": codes.get(outcome, 1),
                "step": steps,
                "tokens": steps * 1500,
                "loss": 0.5,
                "wall_time_s": 12.5,
                "restarts": [],
                **more,
            },
        )
    if outcome in ("stalled", "died"):
        write(root / "verdict.json", VERDICT)
    return root


PROMPTS = 6


def groups_of(step: int, rng: random.Random, *, share: float, text: str = "") -> list[AnswerGroup]:
    """The groups of a step: 3 of 6 prompts, with 4 answers each, of which about a share are right.

    Args:
        text: of all prompts and answers; empty: sums.
    """
    groups = []
    for place in range((step - 1) * 3, step * 3):
        number = place % PROMPTS
        asked, right = f"What is {number + 13} + {2 * number + 8}?", str(3 * number + 21)
        prompt = [
            {"role": "system", "content": "Think, then give the number alone on the last line."},
            {"role": "user", "content": text or asked},
        ]
        group = AnswerGroup(
            step,
            place,
            number,
            text or f"data/prompts.jsonl:{number + 1}",
            [5, 6],
            {"prompt": prompt, "columns": {}},
        )
        for _ in range(4):
            is_right, is_long = rng.random() < share, rng.random() < 0.3 * (1 - share)
            said = f"{number + 13} and {2 * number + 8} make\n{right if is_right else rng.randint(10, 99)}"
            tokens = [7] * (16 if is_long else rng.randint(6, 12))
            rewards = {"exact": float(is_right and not is_long), "length": float(not is_long)}
            group.answers.append(
                SampledAnswer(
                    group.prompt, tokens, [-1.0] * len(tokens), text or said, is_truncated=is_long,
                    rewards={f"{text}{name}": value for name, value in rewards.items()},
                    reward=rewards["exact"] + 0.1 * rewards["length"],
                )
            )  # fmt: skip
        values = [answer.reward or 0.0 for answer in group.answers]
        mean = sum(values) / len(values)
        group.is_equal = len(set(values)) == 1
        for answer, value in zip(group.answers, values, strict=True):
            answer.advantage = value - mean
        groups.append(group)
    return groups


def plan_of(total: int, ranks: int, lr: float) -> dict[str, Any]:
    """What the board reads of a plan."""
    return {
        "schema": 1, "run_id": "r", "world_size": ranks, "total_steps": total, "strategy": "ddp", "nodes": [{"node_rank": 0, "host": "a"}],
        "ranks": [{"rank": rank, "node_rank": rank // 8, "local_rank": rank % 8, "host": f"host{rank // 8}", "device": {"kind": "cpu", "name": "CPU"}} for rank in range(ranks)],
        "config": {"model": {"path": "builtin:tiny"}, "optim": {"lr": lr, "schedule": "cosine"}, "data": {"train": "data/train.jsonl"}, "checkpoint": {"best": None}, "seed": 0},
        "origins": {"optim.lr": "train.yaml:9"}, "resume_reason": "fresh",
    }  # fmt: skip


def write_ranks(root: Path, ranks: int, steps: int, *, start: float = 1_795_540_000.0) -> None:
    """Events, a timeline and logs of each rank."""
    for rank in range(ranks):
        events = [{"kind": "phase", "time": start + rank / 100, "phase": "start", "text": "loading torch"}]
        if rank == 0:
            events += [
                {
                    "kind": "sample",
                    "time": start + step,
                    "step": step,
                    "prompt": "at six call Oscar",
                    "text": "six",
                    "reference": "six",
                }
                for step in range(10, steps + 1, 10)
            ]
        (root / "events" / f"rank-{rank:05d}.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in events)
        )
        (root / "logs" / f"host{rank // 8}-rank-{rank:05d}.log").write_text(
            f"a warning of rank {rank}\nRuntimeError: CUDA out of memory\n"
        )
    for node in range((ranks + 7) // 8):
        with (root / "events" / f"timeline-{node:05d}.jsonl").open("w") as file:
            for step in range(min(steps, 120)):
                for rank in range(node * 8, min(ranks, node * 8 + 8)):
                    at = start + step / 2
                    for offset, phase, seconds in ((0.0, "compute", 0.3), (0.3, "comm", 0.2)):
                        file.write(
                            json.dumps(
                                {
                                    "schema": 1,
                                    "time": at + offset,
                                    "rank": rank,
                                    "phase": phase,
                                    "step": step + 1,
                                    "seconds": seconds,
                                }
                            )
                            + "\n"
                        )
                    if step % 20 == 19:
                        file.write(
                            json.dumps(
                                {
                                    "schema": 1,
                                    "time": at + 0.5,
                                    "rank": rank,
                                    "phase": "comm",
                                    "step": step + 1,
                                    "seconds": {"data": 0.1, "compute": 5.9, "comm": 3.9, "other": 0.1},
                                }
                            )
                            + "\n"
                        )


def write(path: Path, value: Any, *, text: str | None = None) -> None:
    """A file as JSON, or as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) if text is None else text)


def append(root: Path, *lines: dict[str, Any], end: str = "\n") -> None:
    """Lines at the end of metrics.jsonl; the last one ends with `end`."""
    text = "\n".join(json.dumps(line) for line in lines) + end
    with (root / "metrics.jsonl").open("a") as file:
        file.write(text)


def make_hostile(root: Path) -> Path:
    """A run whose every text wants to be something else."""
    make_run(root, outcome="stalled")
    bad = " ".join(HOSTILE)
    verdict = {
        **VERDICT,
        "summary": bad,
        "hosts": [bad],
        "evidence": [{"where": bad, "text": bad + SECRET}],
        "fix": [bad],
    }
    write(root / "verdict.json", verdict)
    write(root / "verdicts" / "0001.json", {**verdict, "cause": bad, bad: bad})
    plan = plan_of(100, 2, 2e-4)
    plan["config"] |= {bad: bad, "api_key": "geheim-geheim", "note": SECRET}
    for place in plan["ranks"]:
        place["host"] = bad
    write(root / "plan.json", plan)
    write(
        root / "data.json",
        {
            "schema": 1,
            "sources": [{"path": bad, "rows": 1, "used": 1, "dropped": {bad: 1}}],
            "total": {},
            "rows": [{"file": bad, "line": bad, "what": bad, "why": bad}],
        },
    )
    append(root, {"step": 41, "loss": 1.0, bad: 3.0, "note": bad})
    with (root / "logs" / "host0-rank-00000.log").open("a") as file:
        file.write(bad + "\n" + f"HF_TOKEN={SECRET}\n" + "x" * (1 << 20) + "\n" + bad + "\n")
    write_rollout(root, 1, groups_of(1, random.Random(0), share=0.5, text=bad), rank=0, ranks=1)
    with (root / "events" / "rank-00000.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"kind": "sample", "time": 1e9, "step": 50, "prompt": bad, "text": bad, "reference": bad}
            )
            + "\n"
        )
        file.write(json.dumps({"kind": bad, "time": 1e9, "text": bad}) + "\n")
    return root

"""The files of rollouts: every answer with its tokens, log-probabilities and rewards.

`rollouts/step-00000001.0.parquet` has the answers that rank 0 sampled before step 1, a row each:

    step            optimizer step that trains on it
    place, answer   of the prompt in the endless order, and number in its group
    row, prompt     where the prompt is from, and its text or messages, as JSON
    text            of the answer
    prompt_ids, ids, log_probs   tokens, and log-probabilities when they were sampled, float32
    is_sampled      of each token, whether the model wrote it; null: it wrote all
    messages        with an environment those of all turns and tools, as JSON; else null
    turns, refused_calls   of the model, and its calls of tools that gave an error
    stop            stop, or length
    reward          the sum; null: the answer has left its group
    rewards         by function, as JSON
    advantage, has_loss, is_equal
    draw            0: the prompt of that place; else the number of the one that was drawn instead
    is_replaced     whether another prompt was drawn, so that nothing is trained on it
    policy          optimizer steps that the weights had made
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.base.errors import IntegrityError
from unisono.base.files import make_private_dir, whole_file
from unisono.base.text import one_line
from unisono.guard.rundir import ROLLOUTS
from unisono.trainer.objectives.rewards.calls import RewardFailure
from unisono.trainer.objectives.sampled import AnswerGroup, SampledAnswer

FOLDER, FAILURES = ROLLOUTS, "rewards.jsonl"
_FIX = "restore that directory, or start with --fresh"


def write_rollout(
    directory: Path, first: int, groups: Sequence[AnswerGroup], *, rank: int, ranks: int
) -> None:
    """Writes the answers of a rank before the first step that trains on them.

    Files of an earlier start with more ranks are removed: their answers were of other weights.

    Raises:
        OSError: from the file system.
    """
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {
            "step": group.step,
            "place": group.place,
            "answer": number,
            "row": group.row,
            "prompt": json.dumps(group.record["prompt"], ensure_ascii=False),
            "text": answer.text,
            "prompt_ids": answer.prompt,
            "ids": answer.tokens,
            "log_probs": answer.log_probs,
            "is_sampled": answer.is_sampled,
            "messages": None if answer.messages is None else json.dumps(answer.messages, ensure_ascii=False),
            "turns": answer.turns,
            "refused_calls": answer.refused_calls,
            "stop": "length" if answer.is_truncated else "stop",
            "reward": answer.reward,
            "rewards": json.dumps(answer.rewards),
            "advantage": answer.advantage,
            "has_loss": answer.has_loss,
            "is_equal": group.is_equal,
            "draw": group.draw,
            "is_replaced": group.is_replaced,
            "policy": first - 1,
        }
        for group in groups
        for number, answer in enumerate(group.answers)
    ]
    kinds = {
        **dict.fromkeys(("step", "place", "answer", "turns", "refused_calls", "draw", "policy"), pa.int64()),
        **dict.fromkeys(("row", "prompt", "text", "messages", "stop", "rewards"), pa.string()),
        **dict.fromkeys(("prompt_ids", "ids"), pa.list_(pa.int32())),
        "log_probs": pa.list_(pa.float32()),
        "is_sampled": pa.list_(pa.bool_()),
        **dict.fromkeys(("reward", "advantage"), pa.float64()),
        **dict.fromkeys(("has_loss", "is_equal", "is_replaced"), pa.bool_()),
    }
    table = pa.Table.from_pylist(rows, schema=pa.schema(kinds.items()))
    make_private_dir(directory / FOLDER)
    for path in _paths(directory, first):
        if int(path.suffixes[0][1:]) >= ranks:
            path.unlink(missing_ok=True)  # each rank does it
    with whole_file(directory / FOLDER / f"step-{first:08d}.{rank}.parquet") as temporary:
        parquet.write_table(table, temporary, compression="zstd")


def note_failures(directory: Path, failures: Sequence[RewardFailure]) -> None:
    """Appends a line for each failed reward to rewards.jsonl.

    Raises:
        OSError: from the file system.
    """
    if not failures:
        return
    lines = "".join(json.dumps(failure.to_json(), ensure_ascii=False) + "\n" for failure in failures)
    with (directory / FAILURES).open("ab", buffering=0) as file:  # of all ranks: one write each
        file.write(lines.encode(errors="replace"))


def read_rollout(
    directory: Path, firsts: range, groups: Sequence[AnswerGroup], draw: Callable[[AnswerGroup, int], None]
) -> bool:
    """Gives groups their answers, which were sampled before the run was interrupted; or False if
    none were: the run ended before their step, and has been extended since.

    Args:
        directory: of the run.
        firsts: the steps before which they may have been sampled; the last is the first that is
            still to be made.
        groups: with the prompts of their places, of that step and later ones.
        draw: gives a group the prompt of a draw.

    Raises:
        IntegrityError: if some are missing, or a file is damaged.
    """
    from pyarrow import parquet

    by_place, latest = {group.place: group for group in groups}, 0
    for path in (path for first in firsts for path in _paths(directory, first)):
        try:
            rows = parquet.read_table(path).to_pylist()
        except ValueError as error:  # ArrowInvalid
            raise IntegrityError.of(
                f"the answers that step {firsts[-1]} trains on are damaged",
                where=str(path),
                why=one_line(str(error), limit=200),
                fix=_FIX,
            ) from error
        for row in rows:
            latest = max(latest, row["step"])
            if (group := by_place.get(row["place"])) is not None and not row["is_replaced"]:
                if group.draw != row["draw"]:
                    draw(group, row["draw"])
                group.is_equal = row["is_equal"]
                group.answers.append(_answer(row))
    if latest == firsts[-1] - 1:
        return False
    missing = [group for group in groups if not group.answers]
    if missing:
        raise IntegrityError.of(
            f"the answers to {missing[0].row} that step {missing[0].step} trains on are not there",
            where=str(directory / FOLDER),
            why="they were sampled by weights that the checkpoint does not have",
            fix=_FIX,
        )
    return True


def _answer(row: dict[str, Any]) -> SampledAnswer:
    return SampledAnswer(
        row["prompt_ids"],
        row["ids"],
        row["log_probs"],
        row["text"],
        is_truncated=row["stop"] == "length",
        rewards=json.loads(row["rewards"]),
        reward=row["reward"],
        advantage=row["advantage"],
        has_loss=row["has_loss"],
        is_sampled=row.get("is_sampled"),  # rollouts of earlier versions lack these
        messages=None if row.get("messages") is None else json.loads(row["messages"]),
        turns=row.get("turns", 1),
        refused_calls=row.get("refused_calls", 0),
    )


def _paths(directory: Path, first: int) -> list[Path]:
    """The files of all ranks that are here."""
    return sorted((directory / FOLDER).glob(f"step-{first:08d}.*.parquet"))

"""What each region of the page shows, as JSON values: the same on the page and in
`/api/runs/NAME/REGION`.

All text is made harmless, and secrets are masked.
"""

import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from unisono.base.causes import find_cause
from unisono.base.causes.verdict import EXIT_CODES, Cause, Verdict
from unisono.base.errors import ConfigError
from unisono.base.files import objects_of, open_plain, read_object
from unisono.base.locale import Chinese, chinese
from unisono.base.text import is_secret, names_secret, one_line, plain, redact, why_unreadable
from unisono.front.board.curves import TIME
from unisono.front.board.follow import TRAINER_STATE, FollowedRun, inside, trainer_state_of
from unisono.front.board.rollouts import answers_of_some_steps, answers_of_step, answers_over_steps
from unisono.guard.rundir.merged_logs import LogLine
from unisono.guard.rundir.records import STOPPED_WITHOUT_A_STALL, best_evaluated
from unisono.guard.watch import PHASES
from unisono.trainer.checkpoint.retention import row_of
from unisono.trainer.config.sections import GRPO
from unisono.trainer.config.yaml_file import read_yaml
from unisono.trainer.plan.families import family_for

ROLLOUTS = "rollouts"
REGIONS = (
    "status",
    "verdict",
    "curves",
    ROLLOUTS,
    "ranks",
    "data",
    "checkpoints",
    "samples",
    "config",
    "log",
)
"""In the order of the page; that of rollouts is only on it if a run has some."""
POINTS = 2_000
_MOST_POINTS = 20_000
_MOST_ROWS = 500
_MOST_CHARS = 4_000
_LOG_LINES = 400
_LONGEST_SENTENCE = 600
"""Longer texts are not ours, and matching them would take long."""
_MOST_FOUND = 400
_MOST_DEPTH = 12
_MOST_NAME = 120
_MASK = "…"
Region = dict[str, Any]
Query = dict[str, str]


def show_region(run: FollowedRun, region: str, query: Query, *, key: bytes = b"") -> Region:
    """One region of a run, as of its last look.

    A file that cannot be read is a line in `problems`, and the rest is shown.

    Args:
        query: parameters of the address: `points`, `from`, `to` and `since` of curves, `q` and
            `rank` of the log; of rollouts `step` and `group`, or `row` for its answers over the
            steps, or `spread` for some of all steps.
        key: the user's key; checkpoints that are not signed with it are foreign.
    """
    problems: list[str] = []
    reader = _RunFileReader(run, problems)
    try:
        content = _SHOW[region](run, reader, query, key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        content = {}
        problems.append(_why(error))
    if region in run.problems:
        problems.append(run.problems[region])
    body = content if region == "curves" else harmless(content)
    return {"schema": 1, "version": run.versions[region], **body, "problems": harmless(problems)}


class _RunFileReader:
    """Reads the small JSON files of a run."""

    def __init__(self, run: FollowedRun, problems: list[str]) -> None:
        self._run = run
        self._root = run.root
        self._problems = problems

    def read(self, path: Path) -> Region:
        """The object in a file; empty without one.

        An unknown schema is a problem, and shown as far as it is known.
        """
        try:
            value = self._run.read(path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._problems.append(f"{path.relative_to(self._root)}: {_why(error)}")
            return {}
        if not isinstance(value, dict):
            self._problems.append(f"{path.relative_to(self._root)}: it is not a JSON object")
            return {}
        if value.get("schema", 1) != 1:
            self._problems.append(
                f"{path.relative_to(self._root)}: its schema is {value['schema']!r}, and this version of"
                " unisono knows 1"
            )
        return value


def _why(error: Exception) -> str:
    return (
        why_unreadable(error)
        if isinstance(error, OSError | ValueError)
        else f"it has an unexpected form ({error!r})"
    )


def harmless(value: Any, depth: int = 0) -> Any:
    """A JSON value with text that is safe to show: no control or direction marks, no
    secrets, a bounded length; NaN is null.
    """
    if isinstance(value, str):
        cut = value if len(value) <= _MOST_CHARS else f"{value[:_MOST_CHARS]}{_MASK}"
        return redact(
            plain(redact(cut))
        )  # what a control character had kept apart may become a secret without it
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth > _MOST_DEPTH:
        return None
    if isinstance(value, dict):
        return {
            harmless(str(name)): (
                _MASK
                if names_secret(str(name)) and isinstance(item, str) and item
                else harmless(item, depth + 1)
            )
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [harmless(item, depth + 1) for item in value]
    return value


# ---- how the run stands


def _status(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    plan, result = reader.read(run.run.plan), reader.read(run.run.result)
    kind = "unisono" if plan or result or run.run.lock.exists() else "other"
    total = _whole(plan.get("total_steps")) or _foreign_total(run)
    step = run.curves.step or _whole(result.get("step")) or 0
    state = _state(run, plan, result, kind)
    per_step = run.curves.step_seconds()
    left = per_step * (total - step) if per_step and total and state == "running" else None
    code = _whole(result.get("exit_code"))
    return {
        "name": run.name,
        "path": str(run.root),
        "kind": "program" if isinstance(plan.get("command"), list) else kind,
        "state": state,
        "stopped_by": _stopped_by(result) if state == "stalled" else None,
        "exit_code": code,
        "meaning": EXIT_CODES.get(code) if code is not None else None,
        "step": step,
        "total_steps": total,
        "seconds_left": left,
        "holder": asdict(run.holder) if run.holder else None,
        "warning": _warning(run) if state == "running" else None,
        "moved_to": run.moved_to or None,
        "world_size": _whole(plan.get("world_size")),
        "nodes": len(objects_of(plan.get("nodes"))) or None,
        "model": (_config_of(plan).get("model") or {}).get("path"),
        "unit": family_for(_config_of(plan).get("objective", "")).unit,
        "resume": (reason := plan.get("resume_reason")),
        "chinese": {"resume": _in_chinese(reason) if isinstance(reason, str) else None},
        "loss": _last(run, "loss"),
        "eval_loss": _last(run, "eval_loss"),
        "reward": _last(run, "reward"),
        "eval_reward": _last(run, "eval_reward"),
        "tokens": _last(run, "tokens"),
        "tokens_per_second": _last(run, "tokens_per_second"),
        "wall_time_s": result.get("wall_time_s") or _last(run, TIME),
        "restarts": len(objects_of(result.get("restarts"))),
        "result_problems": objects_of(result.get("problems")),
        "more": {name: value for name, value in result.items() if name not in _RESULT_KEYS},
    }


def _config_of(plan: Region) -> Region:
    config = plan.get("config")
    return config if isinstance(config, dict) else {}


def _warning(run: FollowedRun) -> str | None:
    """The present suspicion of a stall; one of an earlier start is over."""
    when, text = run.warning
    try:
        since = datetime.fromisoformat(run.holder.since).timestamp() if run.holder else 0.0
    except ValueError:
        since = 0.0
    return text if text and when >= since else None


_RESULT_KEYS = frozenset(
    [
        "schema",
        "run_id",
        "outcome",
        "exit_code",
        "output_dir",
        "step",
        "tokens",
        "loss",
        "eval",
        "tokens_per_second",
        "checkpoint",
        "weights",
        "verdict",
        "problems",
        "restarts",
        "wall_time_s",
    ]
)


def _state(run: FollowedRun, plan: Region, result: Region, kind: str) -> str:
    """An outcome of result.json, or: running, dead (its holder is), unstarted, unknown."""
    if run.holder is not None:
        return "running"
    if result.get("outcome"):
        return str(result["outcome"])
    if kind == "other":
        return "unknown"
    return "dead" if run.run.lock.exists() or plan else "unstarted"


def _stopped_by(result: Region) -> str | None:
    """The cause with which a run is `stalled` in result.json although no rank has stalled."""
    verdict = result.get("verdict")
    cause = verdict.get("cause") if isinstance(verdict, dict) else None
    return cause if cause in STOPPED_WITHOUT_A_STALL else None


def _foreign_total(run: FollowedRun) -> int | None:
    """The steps that another trainer plans."""
    state = trainer_state_of(run.root)
    if state is not None and state.name == TRAINER_STATE:
        return _whole(read_object(inside(run.root, state)).get("max_steps"))
    last = run.curves.last.get("total_steps")
    return int(last[1]) if last and math.isfinite(last[1]) else None


def _last(run: FollowedRun, key: str) -> float | None:
    point = run.curves.last.get(key)
    return point[1] if point and math.isfinite(point[1]) else None


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


# ---- what is wrong


def _verdict(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    earlier = sorted(run.run.verdicts.glob("*.json"), reverse=True)[:50]
    body = reader.read(run.run.verdict)
    return {
        "verdict": shown_verdict(body) if body else None,
        "earlier": [shown_verdict(value) for path in earlier if (value := reader.read(path))],
    }


def shown_verdict(body: Region) -> Region:
    """A verdict in the words of the terminal, and what `unisono explain` says of its cause."""
    body = harmless(body)  # before lines are made of it, which drops what keeps words apart
    known = find_cause(str(body.get("cause")))
    try:
        lines = Verdict.from_json(body).lines()
    except ValueError:
        lines = [f"WHAT      {one_line(str(body.get('summary')))}  [{one_line(str(body.get('cause')))}]"]
    parts = [(label, text) for label, text in ((line[:10].strip(), line[10:]) for line in lines)]
    explain = _explained(known) if known else None
    translated = {
        "lines": [(label, _in_chinese(text)) for label, text in parts],
        "explain": _translated(explain),
    }
    return {**body, "lines": parts, "explain": explain, "chinese": translated}


@functools.cache
def _chinese() -> Chinese:
    """The translator of the terminal, once something needs it."""
    return chinese()


def _translated(value: Any) -> Any:
    """What `unisono explain` says, in Chinese; ids and numbers stay."""
    if isinstance(value, dict):
        return {name: one if name == "id" else _translated(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_translated(one) for one in value]
    return _in_chinese(value) if isinstance(value, str) else value


def _in_chinese(text: str) -> str:
    return _chinese()(text) if len(text) <= _LONGEST_SENTENCE else text


def _explained(cause: Cause) -> Region:
    return {
        "id": cause.id,
        "title": cause.title,
        "meaning": cause.meaning,
        "signs": list(cause.telltales),
        "similar": [list(pair) for pair in cause.neighbours],
        "fix": [str(line) for line in cause.remedy],
        "exit_code": cause.exit_code,
        "retry_helps": cause.retry_helps,
    }


# ---- curves


def _curves(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    curves = run.curves
    head = {"generation": curves.generation, "lines": curves.lines}
    since = _number(query, "since", -1)
    if (
        since >= 0
        and _number(query, "generation", -1) == curves.generation
        and (new := curves.since(int(since))) is not None
    ):
        return {**head, "appended": True, "series": {_name(key): points for key, points in new.items()}}
    most = int(min(_MOST_POINTS, max(10, _number(query, "points", POINTS))))
    first, last = _number(query, "from", -math.inf), _number(query, "to", math.inf)
    return {
        **head,
        "appended": False,
        "series": {_name(name): series.points(most, first, last) for name, series in curves.series.items()},
    }


def _name(key: str) -> str:
    """The name of a curve: any text that a trainer has logged a number under."""
    return str(harmless(key[:_MOST_NAME]))


def _number(query: Query, name: str, default: float) -> float:
    try:
        value = float(query.get(name, ""))
    except ValueError:
        return default
    return default if math.isnan(value) else value


# ---- ranks


def _ranks(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    plan, verdict = reader.read(run.run.plan), reader.read(run.run.verdict)
    culprits = {rank for rank in verdict.get("ranks") or () if type(rank) is int}
    places = {place.get("rank"): place for place in objects_of(plan.get("ranks"))}
    ranks = sorted({rank for rank in places if type(rank) is int} | set(run.ranks))
    most = max(20, min(600, int(40_000 / max(1, len(ranks)))))
    rows: list[Region] = []
    for rank in ranks:
        place, times = places.get(rank, {}), run.ranks.get(rank)
        device = place.get("device")
        rows.append(
            {
                "rank": rank,
                "host": place.get("host"),
                "node_rank": place.get("node_rank"),
                "device": device.get("name") if isinstance(device, dict) else None,
                "culprit": rank in culprits,
                "phase": times.phase if times else None,
                "chinese": {"phase": _phase_in_chinese(times.phase) if times else None},
                "step": times.step if times else None,
                "since": times.since if times else None,
                "seen": times.seen if times else None,
                "seconds": {name: round(value, 3) for name, value in times.seconds.items()} if times else {},
                "spans": (
                    [
                        [round(start, 3), length, phase]
                        for start, length, phase, _ in list(times.spans)[-most:]
                    ]
                    if times
                    else []
                ),
            }
        )
    return {"ranks": rows, "now": max((row["seen"] or 0 for row in rows), default=0)}


@functools.cache
def _phase_in_chinese(name: str) -> str:
    return next((_in_chinese(phase.text) for phase in PHASES if phase.name == name), name)


# ---- the rest


def _data(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    ledger = reader.read(run.run.data)
    rows = objects_of(ledger.get("rows"))
    return {
        "sources": objects_of(ledger.get("sources")),
        "total": ledger.get("total") if isinstance(ledger.get("total"), dict) else None,
        "rows": rows[:_MOST_ROWS],
        "rows_left_out": max(0, len(rows) - _MOST_ROWS),
    }


def _checkpoints(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    plan = reader.read(run.run.plan)
    paths = [
        path
        for path in sorted(run.run.checkpoints.glob("step-*"))
        if path.name.removeprefix("step-").isdecimal() and run.accepts(path)
    ]
    rows = [row_of(path, key=key) for path in paths]
    section = (plan.get("config") or {}).get("checkpoint") or {}
    is_grpo = (plan.get("config") or {}).get("objective") == GRPO
    metric = section.get("best") or ("reward" if is_grpo else "eval_loss")
    best = (
        best_evaluated(run.run.metrics, {row["step"] for row in rows}, metric=str(metric))
        if rows and run.accepts(run.run.metrics)
        else None
    )
    for row in rows:
        row["best"] = bool(best and row["step"] == best[0])
    return {"checkpoints": rows, "best_by": str(metric)}


def _samples(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    by_step: dict[int, dict[str, Region]] = {}
    for message in run.samples:
        step = _whole(message.get("step"))
        if step is not None:
            fields = {name: message.get(name) for name in ("prompt", "text", "reference")}
            fields |= {"pictures": _names(message.get("pictures")), "drawn": _names([message.get("drawn")])}
            row = f"{message.get('prompt')} {fields['pictures']}"
            by_step.setdefault(step, {})[row] = fields  # of a step that was done twice, the second
    return {
        "evaluations": [
            {"step": step, "samples": list(by_step[step].values())}
            for step in sorted(by_step, reverse=True)[:50]
        ]
    }


_PICTURE = re.compile(r"[0-9a-f]{32}\.jpg")
_PICTURE_BYTES = 1 << 19  # of one of 256 × 256 pixels; they have a tenth of it
_JPEG = b"\xff\xd8\xff"


def pictures_in(message: Mapping[str, Any]) -> list[str]:
    """The names of the pictures of a sample: those of its prompt, and the one that was drawn."""
    return [*_names(message.get("pictures")), *_names([message.get("drawn")])]


def _names(value: object) -> list[str]:
    names = value if isinstance(value, list) else []
    return [name for name in names if isinstance(name, str) and _PICTURE.fullmatch(name)]


def read_picture(run: FollowedRun, name: str) -> bytes | None:
    """The thumbnail of a picture that a sample of the run names; None if there is none."""
    if not any(name in pictures_in(message) for message in list(run.samples)):
        return None
    path = run.run.thumbnails / name
    if not run.accepts(path):
        return None
    try:
        with open_plain(path) as stream:
            data = stream.read(_PICTURE_BYTES + 1)
    except OSError:
        return None
    return data if data.startswith(_JPEG) and len(data) <= _PICTURE_BYTES else None


def _rollouts(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    if "row" in query:
        return answers_over_steps(run, query["row"])
    if "spread" in query:
        return answers_of_some_steps(run)
    step = _number(query, "step", math.inf)
    return answers_of_step(run, int(step) if math.isfinite(step) else None, query.get("group"))


def _config(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    plan = reader.read(run.run.plan)
    origins: Region = plan["origins"] if isinstance(plan.get("origins"), dict) else {}
    config = plan.get("config")
    if not isinstance(config, dict):
        config = {}
        if run.run.config.is_file():
            try:
                config, _ = read_yaml(inside(run.root, run.run.config))
            except ConfigError as error:
                raise ValueError(str(error)) from None
    rows = [
        {"key": name, "value": _masked(name, value), "origin": origins.get(name)}
        for name, value in _flat(config)
    ]
    known = {row["key"] for row in rows}
    more = (
        "world_size",
        "strategy",
        "threads",
        "micro_batch",
        "gradient_checkpointing",
        "total_steps",
        "steps_per_epoch",
        "warmup_steps",
    )
    rows += [
        {"key": f"plan: {name}", "value": plan[name], "origin": origins.get(name)}
        for name in more
        if name in plan and name not in known
    ]
    return {"keys": rows}


def _flat(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """Every leaf of a config with its dotted key."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _masked(name: str, value: Any) -> Any:
    return (
        _MASK
        if is_secret(value) or (names_secret(name.rpartition(".")[2]) and isinstance(value, str))
        else value
    )


def _log(run: FollowedRun, reader: _RunFileReader, query: Query, key: bytes) -> Region:
    """The last lines; with `q` or `rank` those that match, also far from the end."""
    words, rank = query.get("q", "").strip().lower(), query.get("rank", "")
    if not words and not rank:
        shown = list(run.log)[-_LOG_LINES:]
        return {
            "lines": [_line(one) for one in shown],
            "left_out": max(0, len(run.log) - _LOG_LINES),
            "skipped": run.log_skipped,
            "ended": False,
        }
    matches: list[LogLine] = []
    sources = run.log_sources()
    sources.find()
    left_out = 0
    for one in sources.more(whole=False):
        if (not rank or str(one.rank) == rank) and (not words or words in one.text.lower()):
            matches.append(one)
            if len(matches) > 2 * _MOST_FOUND:
                left_out += _MOST_FOUND
                del matches[:_MOST_FOUND]
    left_out += max(0, len(matches) - _MOST_FOUND)
    return {
        "lines": [_line(one) for one in matches[-_MOST_FOUND:]],
        "left_out": left_out,
        "skipped": run.log_skipped,
    }


def _line(one: LogLine) -> Region:
    text = (
        one.text
        if len(one.text) <= _MOST_CHARS
        else f"{one.text[:_MOST_CHARS]}{_MASK} ({len(one.text):,} characters)"
    )
    return {
        "time": one.time or None,
        "rank": one.rank if one.rank >= 0 else None,
        "host": one.host,
        "source": one.source,
        "text": text,
        "marked": bool(one.signatures),
    }


_SHOW: dict[str, Callable[[FollowedRun, _RunFileReader, Query, bytes], Region]] = {
    "status": _status,
    "verdict": _verdict,
    "curves": _curves,
    ROLLOUTS: _rollouts,
    "ranks": _ranks,
    "data": _data,
    "checkpoints": _checkpoints,
    "samples": _samples,
    "config": _config,
    "log": _log,
}


_RowKey = Literal["state", "step", "total_steps", "loss", "eval_loss", "exit_code"]
_ROW_KEYS: tuple[_RowKey, ...] = get_args(_RowKey)
_METRICS_BYTES = 64 << 10


class RowVerdict(TypedDict):
    """The newest verdict of a run; `of_last_start`: whether it is on that."""

    cause: str
    summary: str
    of_last_start: bool


class RunRow(TypedDict):
    """A run in a list.

    Attributes:
        age_s: the time since the run last wrote a plan, metrics or a result.
        problems: why files cannot be read.
    """

    name: str
    path: str
    state: str | None
    step: int | None
    total_steps: int | None
    loss: float | None
    eval_loss: float | None
    exit_code: int | None
    age_s: float | None
    verdict: RowVerdict | None
    problems: list[str]


def summarize_run(name: str, root: Path, *, now: float) -> RunRow:
    """A run in one row, from the regions `status` and `verdict` and the end of its metrics; `now`
    in seconds since 1970.
    """
    row = RunRow(
        name=name, path=str(root), state=None, step=None, total_steps=None, loss=None, eval_loss=None,
        exit_code=None, age_s=None, verdict=None, problems=[],
    )  # fmt: skip
    try:
        run = FollowedRun(name, root, _METRICS_BYTES)
        run.look(at_ranks=False)
        status, verdict = show_region(run, "status", {}), show_region(run, "verdict", {})
        written = [time_of(path) for path in (run.run.metrics, run.run.result, run.run.plan, root)]
    except OSError as error:
        shown: RunRow = harmless({**row, "state": "unreadable", "problems": [_why(error)]})
        return shown
    problems = [*status["problems"], *verdict["problems"]]
    problems += [f"curves: {run.problems['curves']}"] if "curves" in run.problems else []
    for key in _ROW_KEYS:
        row[key] = status.get(key)
    row["problems"] = list(dict.fromkeys(problems))
    if row["state"] in ("dead", "unstarted", "unknown") and any(
        text.startswith(("plan.json", "result.json", "curves")) for text in problems
    ):
        row["state"] = "unreadable"
    row["age_s"] = max(0.0, now - (max(written[:-1]) or written[-1]))
    newest = verdict.get("verdict") or next(iter(verdict.get("earlier") or []), None)
    if newest is not None:
        row["verdict"] = {
            "cause": newest.get("cause"),
            "summary": newest.get("summary"),
            "of_last_start": bool(verdict.get("verdict")),
        }
    return row


def time_of(path: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 without one."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def list_runs(runs: Iterable[FollowedRun]) -> Region:
    """What `/api/runs` gives."""
    return harmless(
        {
            "schema": 1,
            "time": time.time(),
            "runs": [
                {"name": run.name, "path": str(run.root), "versions": dict(run.versions)} for run in runs
            ],
        }
    )

"""What becomes of a result: exports, evaluations, answers to the prompts of a file, and a
repository of the hub.
"""

import itertools
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.errors import UsageError
from unisono.base.files import objects_of, parse_json
from unisono.front.board.regions import harmless
from unisono.front.board.server import Board
from unisono.front.studio.audit import AuditLog
from unisono.front.studio.gate import text_of
from unisono.front.studio.permissions import Permissions
from unisono.front.studio.runs import base_model, run_root
from unisono.front.studio.tasks import PageTask, Tasks

EXPORTS: dict[str, tuple[str, ...]] = {
    "adapter": (),
    "merged": ("--merge",),
    "gguf": ("--format", "gguf"),
    "gguf-adapter": ("--format", "gguf", "--adapter"),
    "diffusers": ("--format", "diffusers"),
    "kohya": ("--format", "kohya"),
}
"""Options of `unisono export`, by what is taken away."""
QUANTIZED = ("f16", "bf16", "f32", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
_MOST_SIDES = 4
_MOST_ROWS = 200
_LONGEST_TOKEN = 1_000


@dataclass(frozen=True)
class Chosen:
    """A model of the page: the result of a run, one of its checkpoints, or the model that it began
    with.

    Attributes:
        name: of the run.
        target: as commands take it: the directory of the run, or a name of a model.
        step: of a checkpoint; None: the result.
    """

    name: str
    target: str
    step: int | None = None

    @property
    def options(self) -> list[str]:
        """Of a command on it."""
        return [] if self.step is None else ["--step", str(self.step)]


@dataclass
class Results:
    """The actions on results; each is a command in a task."""

    board: Board
    permissions: Permissions
    tasks: Tasks
    audit: AuditLog
    may_push: bool

    def chosen(self, body: Mapping[str, Any]) -> Chosen:
        """The model that `name`, `step` and `base` of a request name.

        Raises:
            UsageError: if there is no such run, or its model may not be read.
        """
        root, step = self.root(body), body.get("step")
        if not body.get("base"):
            is_step = isinstance(step, int) and not isinstance(step, bool)
            return Chosen(root.name, str(root), step if is_step else None)
        base = base_model(root)
        if base is None:
            raise UsageError.of(f"the plan of {root.name} names no model", fix="choose another run")
        self.permissions.require(base)
        return Chosen(f"{root.name} (base)", base)

    def root(self, body: Mapping[str, Any]) -> Path:
        """The directory of the run `name`.

        Raises:
            UsageError: if there is none, or it is outside.
        """
        return self.permissions.folders.inside(str(run_root(self.board, text_of(body, "name"))))

    async def export(self, body: dict[str, Any]) -> dict[str, Any]:
        """Exports the result of the run `name` in the form `what`."""
        chosen, what = self.chosen(body), text_of(body, "what")
        if what not in EXPORTS:
            raise UsageError.of(f"{what!r} is not a form of export", fix=f"use {', '.join(EXPORTS)}")
        options = list(EXPORTS[what])
        kind = text_of(body, "quantize", default="")
        if kind and kind not in QUANTIZED:
            raise UsageError.of(f"{kind!r} is not a quantization", fix=f"use {', '.join(QUANTIZED)}")
        if kind and what == "gguf":
            options += ["--quantize", kind]
        out = self._new("exports", f"{chosen.name}-{what}")
        return self._start(
            "export", chosen, ["export", chosen.target, str(out), *options, *chosen.options], out
        )

    async def evaluate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Measures the result of the run `name` on the file `data`; its answers are written."""
        chosen, data = self.chosen(body), self._file(body)
        out = self._new("answers", f"{chosen.name}-evaluation", ".jsonl")
        words = ["eval", chosen.target, "--data", data, "--out", str(out), *chosen.options]
        return self._start("evaluate", chosen, words, out)

    async def compare(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answers the prompts of the file `data` with each of `sides`."""
        sides, data = objects_of(body.get("sides")), self._file(body)
        if not 0 < len(sides) <= _MOST_SIDES:
            raise UsageError.of(f"{len(sides)} models cannot be compared", fix=f"name 1 to {_MOST_SIDES}")
        all_chosen, group = [self.chosen(side) for side in sides], secrets.token_hex(3)
        for chosen in all_chosen:
            out = self._new("answers", chosen.name.partition(" ")[0], ".jsonl")
            words = ["generate", "--file", data, "--out", str(out), *chosen.options, "--", chosen.target]
            self._start("answer", chosen, words, out, group=group)
        return {"group": group}

    async def push(self, body: dict[str, Any]) -> dict[str, Any]:
        """Uploads the result of the run `name` to `repo` at the hub.

        The token goes only into the environment of the command.
        """
        if not self.may_push:
            raise UsageError.of(
                "this studio does not push to the hub",
                why="the server was started without --allow-push",
                fix="start `unisono studio --allow-push`, or use `unisono push`",
            )
        chosen, repo = self.chosen(body), text_of(body, "repo").strip()
        token = text_of(body, "token").strip()
        if not token.isascii() or not token.isprintable() or not 0 < len(token) <= _LONGEST_TOKEN:
            raise UsageError.of("there is no token", fix="paste a token of the hub with write access")
        flags = [flag for flag in ("--private", "--merge") if body.get(flag.removeprefix("--"))]
        words = ["push", *flags, *chosen.options, "--", chosen.target, repo]
        return self._start("push", chosen, words, None, environment={"HF_TOKEN": token})

    async def stop_task(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ends the task `id`."""
        self.tasks.stop(text_of(body, "id"))
        self.audit.write("stop task", id=body["id"])
        return {}

    def answers(self, group: str) -> dict[str, Any]:
        """The answers of a comparison, or of one task by its id: a column for each model."""
        tasks = [
            one
            for one in self.tasks.tasks.values()
            if group and group in (one.id, one.group) and one.out is not None and one.kind != "export"
        ]
        columns = [_read_answers(task) for task in tasks]
        rows = [
            {
                "prompt": next((one["prompt"] for one in row if one), None),
                "reference": next((one["reference"] for one in row if one and "reference" in one), None),
                "answers": [one and one["answer"] for one in row],
            }
            for row in itertools.zip_longest(*columns)
        ]
        shown: dict[str, Any] = harmless({"columns": [task.run for task in tasks], "rows": rows})
        return shown

    def _file(self, body: dict[str, Any]) -> str:
        return str(self.permissions.folders.inside(text_of(body, "data")))

    def _new(self, folder: str, name: str, suffix: str = "") -> Path:
        """A path that nothing has yet."""
        out = self.permissions.folders.state / folder / f"{name}-{secrets.token_hex(3)}{suffix}"
        out.parent.mkdir(parents=True, exist_ok=True)
        return out

    def _start(
        self, kind: str, chosen: Chosen, words: list[str], out: Path | None, **more: Any
    ) -> dict[str, Any]:
        title = chosen.name if chosen.step is None else f"{chosen.name} @ {chosen.step}"
        task = self.tasks.start(PageTask(kind, title, words, out, **more))
        self.audit.write(kind, run=chosen.name, command=words)
        return task.to_json()


def _read_answers(task: PageTask) -> list[dict[str, Any]]:
    """Prompt and answer of each line that a task has written."""
    assert task.out is not None
    try:
        with task.out.open("rb") as file:
            lines = [parse_json(line) for line in itertools.islice(file, _MOST_ROWS)]
    except (OSError, ValueError):
        return []
    return [
        {
            "prompt": _as_text(line.get("prompt")),
            "answer": _as_text(line.get("answer", line.get("text"))),
            **({"reference": _as_text(line["reference"])} if "reference" in line else {}),
        }
        for line in objects_of(lines)
    ]


def _as_text(value: object) -> str:
    """A prompt as it is shown: a text, or the last of its messages."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        return _as_text(value[-1].get("content"))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

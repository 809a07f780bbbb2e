"""What the page asks for: each action takes a request's body, and gives what the page shows."""

import asyncio
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.errors import ConfigError, Problem, UsageError
from unisono.base.files import write_text
from unisono.base.text import Duration
from unisono.front.board.regions import harmless, shown_verdict
from unisono.front.board.server import Board
from unisono.front.studio.audit import AuditLog
from unisono.front.studio.commands import Commands, shown_plan
from unisono.front.studio.draft import ConfigDraft, changed, draft_of, read_draft
from unisono.front.studio.folders import Folders
from unisono.front.studio.gate import text_of
from unisono.front.studio.models import Models
from unisono.front.studio.permissions import Permissions
from unisono.front.studio.problems import shown_problem, shown_problems, translated
from unisono.front.studio.run_queue import RunQueue
from unisono.front.studio.runs import base_model, run_root, run_rows
from unisono.front.studio.tasks import Tasks
from unisono.jobs.runs.config_file import load_config

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
_MOST_LOG = 16 << 20


@dataclass
class Actions:
    """The actions of one server."""

    board: Board
    folders: Folders
    permissions: Permissions
    queue: RunQueue
    commands: Commands
    tasks: Tasks
    models: Models
    audit: AuditLog

    # ---- the config

    async def draft(self, body: dict[str, Any]) -> dict[str, Any]:
        """The config in `text` with the `changes` of the form laid over it."""
        draft = self._draft(body)
        refused = self.permissions.refusals(draft.config) if draft.config else []
        shown = draft.to_json()
        shown["problems"] += [{"key": key, **shown_problem(problem)} for key, problem in refused]
        shown["notes"] = [translated(note) for note in draft.notes]
        return {**shown, "command": f"unisono train {self._config_name(draft)}"}

    def _draft(self, body: dict[str, Any]) -> ConfigDraft:
        draft, changes = read_draft(text_of(body, "text")), body.get("changes")
        return draft_of(changed(draft.values, changes)) if isinstance(changes, dict) and changes else draft

    def _config_name(self, draft: ConfigDraft) -> str:
        output = draft.values.get("output_dir")
        return shlex.quote(
            f"{Path(output).name}.yaml" if isinstance(output, str) and output else "train.yaml"
        )

    def _complete(self, body: dict[str, Any]) -> ConfigDraft:
        """A config that may be started.

        Raises:
            ConfigError: with every problem.
        """
        draft = self._draft(body)
        problems = [problem for _, problem in draft.problems]
        if draft.config is not None:
            problems += [problem for _, problem in self.permissions.refusals(draft.config)]
        if problems or draft.config is None:
            raise ConfigError(*problems)
        return draft

    async def plan(self, body: dict[str, Any]) -> dict[str, Any]:
        """The plan of `train --dry-run`."""
        path = self._written(self._complete(body), "plan")
        plan = shown_plan(await self.commands.ask("plan", "train", str(path), "--dry-run", *self._trust()))
        warnings = [translated(text) for text in plan.pop("warnings", [])]
        return {**plan, "warnings": warnings, "problems": shown_problems(plan["problems"])}

    async def preview(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first rows as the model sees them, and the ledger."""
        path = self._written(self._complete(body), "preview")
        shown = (await self.commands.ask("preview", "data", "preview", str(path), "--rows", "6"))[-1]
        if "rows" not in shown:
            return {"problems": shown_problems(shown.get("problems") or [])}
        body = {name: shown[name] for name in ("rows", "ledger", "lengths", "notes")}
        return {**harmless(body), "problems": []}

    def _written(self, draft: ConfigDraft, name: str) -> Path:
        path = self.folders.state / "drafts" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, draft.text)
        return path

    def _trust(self) -> list[str]:
        return ["--trust-code"] if self.permissions.trusts_code else []

    # ---- runs

    async def start(self, body: dict[str, Any]) -> dict[str, Any]:
        """Queues a new run; the queue begins it if none is running."""
        draft = self._complete(body)
        assert draft.config is not None
        output = self.folders.inside(draft.config.output_dir)
        if output.exists() and any(output.iterdir()):
            raise UsageError.of(
                f"{self.folders.shown(output)} exists already",
                why="each run has a directory of its own",
                fix="choose another output_dir, or resume the run on the page of runs",
            )
        start = self.queue.add(output.name, draft.text, output_dir=output, options=self._trust())
        self.audit.write("start", run=output.name, command=start.words)
        return {"name": output.name, "path": str(output), "state": start.state}

    async def steer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Stops, resumes, extends or begins afresh the run `name`; or takes the start `id` from the
        queue.
        """
        action = text_of(body, "action")
        if action == "cancel":
            self.queue.cancel(text_of(body, "id"))
            self.audit.write("cancel", id=body["id"])
            return {"state": "cancelled"}
        root = self._root(body)
        if action == "stop":
            state = self.queue.stop(root)
            self.audit.write("stop", run=root.name)
            return {"state": state}
        options = self._options_of(action, body)
        config = root / "config.yaml"
        self._refuse_forbidden(config, options)
        start = self.queue.add_again(config, output_dir=root, options=[*options, *self._trust()])
        self.audit.write(action, run=root.name, command=start.words)
        return {"state": start.state}

    def _root(self, body: dict[str, Any]) -> Path:
        root = run_root(self.board, text_of(body, "name"))
        return self.folders.inside(str(root))

    def _options_of(self, action: str, body: dict[str, Any]) -> list[str]:
        if action == "resume":
            return ["--resume"]
        if action == "fresh":
            return ["--fresh"]
        if action != "extend":
            raise UsageError.of(f"{action!r} is not an action", fix="use stop, resume, extend or fresh")
        duration = text_of(body, "duration").strip()
        try:
            Duration.parse(duration)
        except ValueError as error:
            raise UsageError.of(
                f"duration: {error}", fix="as in `3 epochs`, `500 steps` or `2M tokens`"
            ) from None
        return ["--resume", f"duration={duration}"]

    def _refuse_forbidden(self, config: Path, options: list[str]) -> None:
        """A run's directory may come from somebody else, and its config is judged as any other."""
        overrides = tuple(one for one in options if not one.startswith("-"))
        refused = self.permissions.refusals(load_config(config, overrides).config)
        if refused:
            raise ConfigError(*(problem for _, problem in refused))

    def rows(self) -> dict[str, Any]:
        """The runs, and what runs beside them."""
        self.board.search()
        self.board.refresh()
        return {
            "runs": harmless(run_rows(self.board, self.queue)),
            "tasks": [harmless(task.to_json()) for task in self.tasks.tasks.values()],
            "models": [harmless(model.to_json()) for model in self.models.loaded.values()],
        }

    # ---- models

    async def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Loads the result of the run `name`, its checkpoint of `step`, or with `base` the model
        that it began with.
        """
        root = self._root(body)
        step = body.get("step")
        target: str | None = str(root)
        if body.get("base"):
            target, step = base_model(root), None
        if target is None:
            raise UsageError.of(f"the plan of {root.name} names no model", fix="choose another run")
        model = self.models.load(target, step if isinstance(step, int) else None)
        self.audit.write("load", model=model.id)
        return model.to_json()

    async def unload(self, body: dict[str, Any]) -> dict[str, Any]:
        """Unloads the model `id`."""
        name = text_of(body, "id")
        self.models.unload(name)
        self.audit.write("unload", model=name)
        return {}

    # ---- results

    async def export(self, body: dict[str, Any]) -> dict[str, Any]:
        """Exports the result of the run `name` in the form `what`."""
        root, what = self._root(body), text_of(body, "what")
        if what not in EXPORTS:
            raise UsageError.of(f"{what!r} is not a form of export", fix=f"use {', '.join(EXPORTS)}")
        options = list(EXPORTS[what])
        kind = text_of(body, "quantize", default="")
        if kind and kind not in QUANTIZED:
            raise UsageError.of(f"{kind!r} is not a quantization", fix=f"use {', '.join(QUANTIZED)}")
        if kind and what == "gguf":
            options += ["--quantize", kind]
        out = self.folders.state / "exports" / f"{root.name}-{what}-{secrets.token_hex(3)}"
        out.parent.mkdir(parents=True, exist_ok=True)
        words = ["export", str(root), str(out), *options, *self._step(body)]
        task = self.tasks.start("export", root.name, words, out=out)
        self.audit.write("export", run=root.name, command=words)
        return task.to_json()

    async def evaluate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Measures the result of the run `name` on the file `data`."""
        root, data = self._root(body), self.folders.inside(text_of(body, "data"))
        words = ["eval", str(root), "--data", str(data), *self._step(body)]
        task = self.tasks.start("evaluate", root.name, words)
        self.audit.write("evaluate", run=root.name, command=words)
        return task.to_json()

    def _step(self, body: dict[str, Any]) -> list[str]:
        step = body.get("step")
        return ["--step", str(step)] if isinstance(step, int) and not isinstance(step, bool) else []

    async def stop_task(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ends the task `id`."""
        self.tasks.stop(text_of(body, "id"))
        self.audit.write("stop task", id=body["id"])
        return {}

    # ---- a failure

    async def diagnose(self, body: dict[str, Any]) -> dict[str, Any]:
        """The verdict on the log `text`."""
        text = text_of(body, "text")
        if not text.strip() or len(text) > _MOST_LOG:
            raise UsageError(
                Problem("there is no log to read", fix=f"paste up to {_MOST_LOG >> 20} Mi characters")
            )
        path = self.folders.state / "drafts" / f"log-{secrets.token_hex(4)}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_text(path, text, mode=0o600)
            answer = (await self.commands.ask("diagnose", "diagnose", str(path)))[-1]
        finally:
            path.unlink(missing_ok=True)
        self.audit.write("diagnose", characters=len(text))
        if "cause" not in answer:
            return {"problems": shown_problems(answer.get("problems") or [])}
        return {"verdict": await asyncio.to_thread(shown_verdict, answer), "problems": []}

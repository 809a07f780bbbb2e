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
from unisono.front.studio.owner import OwnerSettings
from unisono.front.studio.permissions import Permissions
from unisono.front.studio.problems import shown_problem, shown_problems, translated
from unisono.front.studio.results import Results
from unisono.front.studio.run_queue import RunQueue
from unisono.front.studio.runs import run_rows
from unisono.jobs.runs.config_file import load_config

_MOST_LOG = 16 << 20


@dataclass
class Actions:
    """The actions of one server."""

    board: Board
    folders: Folders
    owner: OwnerSettings
    permissions: Permissions
    queue: RunQueue
    commands: Commands
    results: Results
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
        words = ["unisono", "train", self._config_name(draft), *self._launcher(body)]
        return {**shown, "command": shlex.join(words)}

    def _launcher(self, body: dict[str, Any]) -> list[str]:
        return self.owner.launcher_options(text_of(body, "launcher", default=""))

    def _draft(self, body: dict[str, Any]) -> ConfigDraft:
        draft, changes = read_draft(text_of(body, "text")), body.get("changes")
        return draft_of(changed(draft.values, changes)) if isinstance(changes, dict) and changes else draft

    def _config_name(self, draft: ConfigDraft) -> str:
        output = draft.values.get("output_dir")
        return f"{Path(output).name}.yaml" if isinstance(output, str) and output else "train.yaml"

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
        options = ["--dry-run", *self._launcher(body), *self._trust()]
        path = self._written(self._complete(body), "plan")
        plan = shown_plan(await self.commands.ask("plan", "train", str(path), *options))
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
        options = [*self._launcher(body), *self._trust()]
        draft = self._complete(body)
        assert draft.config is not None
        output = self.folders.inside(draft.config.output_dir)
        if output.exists() and any(output.iterdir()):
            raise UsageError.of(
                f"{self.folders.shown(output)} exists already",
                why="each run has a separate directory",
                fix="choose another output_dir, or resume the run on the page of runs",
            )
        start = self.queue.add(
            output.name,
            draft.text,
            output_dir=output,
            options=options,
            launcher=text_of(body, "launcher", default=""),
        )
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
        root = self.results.root(body)
        if action == "stop":
            state = self.queue.stop(root)
            self.audit.write("stop", run=root.name)
            return {"state": state}
        launcher = text_of(body, "launcher", default=self.queue.launcher_of(root))
        options = [*self._options_of(action, body), *self.owner.launcher_options(launcher)]
        config = root / "config.yaml"
        self._refuse_forbidden(config, options)
        options += self._trust()
        start = self.queue.add_again(config, output_dir=root, options=options, launcher=launcher)
        self.audit.write(action, run=root.name, command=start.words)
        return {"state": start.state}

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
            "tasks": [harmless(task.to_json()) for task in self.results.tasks.tasks.values()],
            "models": [harmless(model.to_json()) for model in self.models.loaded.values()],
        }

    # ---- models

    async def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Loads the result of the run `name`, its checkpoint of `step`, or with `base` the model
        that it began with.
        """
        chosen = self.results.chosen(body)
        model = self.models.load(chosen.target, chosen.step)
        self.audit.write("load", model=model.id)
        return model.to_json()

    async def unload(self, body: dict[str, Any]) -> dict[str, Any]:
        """Unloads the model `id`."""
        name = text_of(body, "id")
        self.models.unload(name)
        self.audit.write("unload", model=name)
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

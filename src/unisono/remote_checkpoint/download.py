"""`--resume` without a local checkpoint: downloads the latest complete one from checkpoint.storage."""

import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import KEY_FILE, Manifest, user_key
from unisono.checkpoint.store import CheckpointStore, temporary_name
from unisono.config import RunConfig
from unisono.errors import IntegrityError, UnfitError
from unisono.events import Message, Show
from unisono.facts import Environment
from unisono.files import fsync_dir, make_private_dir, read_object, write_json
from unisono.remote_checkpoint.upload import STALLED_S, storage_url
from unisono.rundir import RunDir
from unisono.supervise.child_process import Programs
from unisono.supervise.task_process import run_task
from unisono.text import show_bytes, show_seconds

_NOTE_AFTER_S, _NOTE_EVERY_S = 2.0, 10.0
_RUN_FILES = ".brought.tmp-"


def download_newest(
    config: RunConfig, environment: Environment, *, who: str, programs: Programs, trust: bool, show: Show
) -> bool:
    """Downloads a checkpoint into an output_dir without an intact one, so that the run can resume there.

    The caller holds the directory's lock. A kill at any time leaves a complete download, or what `remove_partial_download` removes.

    Args:
        config: with or without checkpoint.storage.
        who: this node, for notes on other nodes; empty for a single node.
        trust: `--trust`: accept a checkpoint without this user's signature.

    Returns:
        Whether a checkpoint was downloaded.

    Raises:
        UnfitError: if the storage cannot be read, so that its content is unknown.
        IntegrityError: if its checkpoint is damaged or signed with a different key.
    """
    run = RunDir(Path(config.output_dir))
    if config.checkpoint.storage is None:
        return False
    store = CheckpointStore(run.checkpoints, key=user_key(environment.settings_dir))
    plan = read_object(run.plan)
    run_id = plan.get("run_id") if isinstance(plan.get("run_id"), str) else None
    if (run_id is None and store.list()) or store.newest_intact(run_id=run_id, trust=trust) is not None:
        return False
    download = _Download(run, store, storage_url(config.checkpoint.storage, run.root), who, programs, show)
    before, damage = None, None
    while (manifest := download.look(run_id, before=before)) is not None:
        if not trust and not manifest.is_signed_by(user_key(environment.settings_dir)):
            raise _not_signed(manifest, download.url)
        try:
            download.do(manifest, is_new=not plan)
        except IntegrityError as error:
            damage, before, run_id = error, manifest.step, manifest.run_id
            download.warn(error)
            continue
        return True
    if damage is not None:
        raise damage
    _note(
        show,
        f"{download.url} holds no complete checkpoint of {f'run {run_id}' if run_id else 'a run of this name'}",
    )
    return False


def remove_partial_download(run: RunDir) -> bool:
    """Removes a download that a killed start left in a directory without a run. The caller holds the directory's lock.

    Returns:
        Whether one was removed. A download with its plan is complete, and stays.
    """
    for folder in run.root.glob(f"{_RUN_FILES}*"):
        shutil.rmtree(folder, ignore_errors=True)
    if not run.bringing.exists():
        return False
    is_complete = run.plan.exists()
    if not is_complete:
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # there were none before
        for path in (run.config, run.environment, run.data, run.metrics):
            path.unlink(missing_ok=True)
        fsync_dir(run.root)
    run.bringing.unlink()
    return not is_complete


def _not_signed(manifest: Manifest, url: str) -> IntegrityError:
    return IntegrityError.of(
        f"the checkpoint of step {manifest.step} in the storage is not signed with your key",
        where=f"{url}/{manifest.run_id}",
        why="checkpoints signed with a different key need --trust",
        fix=f"copy {KEY_FILE} from the machine that wrote it to your settings folder (~/.config/unisono), or pass --trust",
    )


class _Download:
    def __init__(
        self, run: RunDir, store: CheckpointStore, url: str, who: str, programs: Programs, show: Show
    ) -> None:
        self.url = url
        self._run = run
        self._who = who
        self._store = store
        self._programs = programs
        self._show = show

    def look(self, run_id: str | None, *, before: int | None) -> Manifest | None:
        """The manifest of the latest complete checkpoint in the storage, of one run or of the latest run; optionally before a step."""
        request = {"action": "look", "url": self.url, "run_id": run_id, "before": before}
        _note(self._show, f"looking in {self.url} for a checkpoint to resume from")
        found = self._ask(request)["manifest"]
        return Manifest.from_bytes(found.encode()) if found else None

    def warn(self, error: IntegrityError) -> None:
        """Warns of a damaged checkpoint, before an older one is tried."""
        problem = error.problems[0]
        text = f"{problem.what}: {problem.why}; trying an older one"
        self._show(
            {
                "kind": "warning",
                "time": time.time(),
                "code": "storage_damaged",
                "text": text,
                "fix": "delete it there",
            }
        )

    def do(self, manifest: Manifest, *, is_new: bool) -> None:
        """Downloads a checkpoint, completely or not at all.

        Args:
            is_new: whether there is no run here: its files besides the checkpoint are downloaded, too.
        """
        nonce = secrets.token_hex(4)
        temporary = self._run.checkpoints / temporary_name(manifest.step, nonce)
        beside = self._run.root / f"{_RUN_FILES}{os.getpid()}-{nonce}"
        if is_new:
            self._run.plan.unlink(
                missing_ok=True
            )  # an unreadable plan would make a partial download look complete
            body = {"schema": 1, "url": self.url, "run_id": manifest.run_id, "step": manifest.step}
            write_json(self._run.bringing, body, mode=0o600)
        try:
            make_private_dir(self._run.checkpoints)
            for folder in (temporary, beside):
                folder.mkdir(mode=0o700)
            self._fetch(manifest, temporary, beside)
            self._store.adopt(temporary, manifest)
            if is_new:
                self._place(beside)
        except BaseException:  # including Ctrl-C: leaves nothing partial; raised again
            remove_partial_download(self._run)
            raise
        finally:
            for folder in (temporary, beside):
                shutil.rmtree(folder, ignore_errors=True)
        self._run.bringing.unlink(missing_ok=True)

    def _fetch(self, manifest: Manifest, temporary: Path, beside: Path) -> None:
        step, run_id = manifest.step, manifest.run_id
        request = {
            "action": "fetch",
            "url": self.url,
            "run_id": run_id,
            "step": step,
            "to": str(temporary),
            "beside": str(beside),
        }
        line = f"{self._who} is downloading" if self._who else "downloading"
        line += f" step {step} of run {run_id} from {self.url}"
        _note(self._show, f"{line} ({show_bytes(manifest.total_bytes)})")
        result = self._ask(request, _FetchProgress(self._show, line))
        duration = f"{show_bytes(result['bytes'])} in {show_seconds(result['seconds'])}"
        _note(self._show, f"step {step} of run {run_id} is downloaded from {self.url}: {duration}")

    def _ask(
        self, request: dict[str, Any], on_message: Callable[[Message], None] | None = None
    ) -> dict[str, Any]:
        """The result of a storage task; a hanging storage is an error."""
        try:
            return run_task(
                "storage", request, on_message=on_message, programs=self._programs, silence_s=STALLED_S
            )
        except UnfitError as error:
            if error.problems[0].where != "storage":
                raise
            raise UnfitError.of(
                f"{self.url} does not answer: {error.problems[0].what}",
                where="checkpoint.storage",
                why="the run would resume from it",
                fix="fix the storage, or start without --resume to begin a new run here",
            ) from error

    def _place(self, beside: Path) -> None:
        """Moves the run's other files into its directory; the plan last, since it marks the directory as complete."""
        names = sorted((path.name for path in beside.iterdir()), key=lambda name: name == self._run.plan.name)
        for name in names:
            (beside / name).rename(self._run.root / name)
        fsync_dir(self._run.root)


class _FetchProgress:
    """Shows the progress of a download: after two seconds, then every ten."""

    def __init__(self, show: Show, line: str) -> None:
        self._show = show
        self._line = line
        self._next = time.monotonic() + _NOTE_AFTER_S

    def __call__(self, message: Message) -> None:
        if message["kind"] != "progress" or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _NOTE_EVERY_S
        _note(self._show, f"{self._line}: {show_bytes(message['bytes'])} of {show_bytes(message['of'])}")


def _note(show: Show, text: str) -> None:
    show({"kind": "note", "time": time.time(), "text": text})

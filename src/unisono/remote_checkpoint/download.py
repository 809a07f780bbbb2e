"""`--resume` where nothing is left here: the newest complete checkpoint is brought back from checkpoint.storage."""

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

_SAYS_AFTER_S, _SAYS_EVERY_S = 2.0, 10.0
_BESIDE = ".brought.tmp-"


def download_newest(
    config: RunConfig, environment: Environment, *, who: str, programs: Programs, trust: bool, show: Show
) -> bool:
    """Fills an output_dir that has no intact checkpoint from the storage, so that the run there goes on; else does nothing.

    Called by who holds the directory's lock. A kill at any moment leaves what `remove_partial_download` removes, or the whole.

    Args:
        config: with checkpoint.storage or without.
        environment: for the user's key.
        who: this node, for the others; empty where there are none.
        programs: what is started.
        trust: `--trust`: take a checkpoint that is not signed by this user, too.
        show: sees what is said.

    Returns:
        Whether something was brought.

    Raises:
        UnfitError: if the storage cannot be read: that it holds nothing is then not known.
        IntegrityError: if what it holds is a stranger's, or is damaged.
    """
    run = RunDir(Path(config.output_dir))
    if config.checkpoint.storage is None:
        return False
    store = CheckpointStore(run.checkpoints, key=user_key(environment.settings_dir))
    plan = read_object(run.plan)
    run_id = plan.get("run_id") if isinstance(plan.get("run_id"), str) else None
    if (run_id is None and store.list()) or store.newest_intact(run_id=run_id, trust=trust) is not None:
        return False
    bringing = _Download(run, store, storage_url(config.checkpoint.storage, run.root), who, programs, show)
    before, damage = None, None
    while (manifest := bringing.look(run_id, before=before)) is not None:
        if not trust and not manifest.is_signed_by(user_key(environment.settings_dir)):
            raise _not_signed(manifest, bringing.url)
        try:
            bringing.do(manifest, is_new=not plan)
        except IntegrityError as error:
            damage, before, run_id = error, manifest.step, manifest.run_id
            bringing.warn(error)
            continue
        return True
    if damage is not None:
        raise damage
    _say(
        show,
        f"{bringing.url} holds no complete checkpoint of {f'run {run_id}' if run_id else 'a run of this name'}",
    )
    return False


def remove_partial_download(run: RunDir) -> bool:
    """Removes what a killed start had begun to bring into a directory in which there was no run; under the directory's lock.

    Returns:
        Whether there was such a thing. A copy whose plan is there is whole, and stays.
    """
    for folder in run.root.glob(f"{_BESIDE}*"):
        shutil.rmtree(folder, ignore_errors=True)
    if not run.bringing.exists():
        return False
    is_whole = run.plan.exists()
    if not is_whole:
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # there were none before
        for path in (run.config, run.environment, run.data, run.metrics):
            path.unlink(missing_ok=True)
        fsync_dir(run.root)
    run.bringing.unlink()
    return not is_whole


def _not_signed(manifest: Manifest, url: str) -> IntegrityError:
    return IntegrityError.of(
        f"the checkpoint of step {manifest.step} in the storage is not signed with your key",
        where=f"{url}/{manifest.run_id}",
        why="a checkpoint of somebody else's is not read unasked",
        fix=f"copy {KEY_FILE} of the machine that wrote it into your folder of settings (~/.config/unisono), or pass --trust",
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
        """The manifest of the newest complete checkpoint there: of one run or of the newest, before a step or of all."""
        request = {"action": "look", "url": self.url, "run_id": run_id, "before": before}
        _say(self._show, f"looking into {self.url} for a checkpoint to go on from")
        found = self._ask(request)["manifest"]
        return Manifest.from_bytes(found.encode()) if found else None

    def warn(self, error: IntegrityError) -> None:
        """Says what is wrong with one; an older one is looked for."""
        problem = error.problems[0]
        text = f"{problem.what}: {problem.why}; an older one is looked for"
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
        """Brings one here; leaves nothing half.

        Args:
            manifest: of the checkpoint.
            is_new: there is no run here, nor a checkpoint: what stands beside it comes along.
        """
        nonce = secrets.token_hex(4)
        temporary = self._run.checkpoints / temporary_name(manifest.step, nonce)
        beside = self._run.root / f"{_BESIDE}{os.getpid()}-{nonce}"
        if is_new:
            self._run.plan.unlink(missing_ok=True)  # one that cannot be read: it would make half a copy whole
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
        except BaseException:  # also Ctrl-C: nothing half is left; raised again
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
        line = f"{self._who} is fetching" if self._who else "fetching"
        line += f" step {step} of run {run_id} from {self.url}"
        _say(self._show, f"{line} ({show_bytes(manifest.total_bytes)})")
        result = self._ask(request, _FetchProgress(self._show, line))
        took = f"{show_bytes(result['bytes'])} in {show_seconds(result['seconds'])}"
        _say(self._show, f"step {step} of run {run_id} is back from {self.url}: {took}")

    def _ask(
        self, request: dict[str, Any], on_message: Callable[[Message], None] | None = None
    ) -> dict[str, Any]:
        """What the storage's task gives; a storage that hangs is not waited for."""
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
                why="the run would go on from it",
                fix="mend it, or start without --resume to begin anew here",
            ) from error

    def _place(self, beside: Path) -> None:
        """What a run's directory needs besides; the plan last, since with it the directory counts as the run's."""
        names = sorted((path.name for path in beside.iterdir()), key=lambda name: name == self._run.plan.name)
        for name in names:
            (beside / name).rename(self._run.root / name)
        fsync_dir(self._run.root)


class _FetchProgress:
    """Says how far a fetch is: after two seconds, then every ten."""

    def __init__(self, show: Show, line: str) -> None:
        self._show = show
        self._line = line
        self._next = time.monotonic() + _SAYS_AFTER_S

    def __call__(self, message: Message) -> None:
        if message["kind"] != "progress" or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SAYS_EVERY_S
        _say(self._show, f"{self._line}: {show_bytes(message['bytes'])} of {show_bytes(message['of'])}")


def _say(show: Show, text: str) -> None:
    show({"kind": "note", "time": time.time(), "text": text})

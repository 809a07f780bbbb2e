"""Fills the cache of huggingface_hub with a model or a dataset, and compares what is in it with the
digests of the hub.
"""

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.base.errors import (
    IntegrityError,
    ModelError,
    Problem,
    UnisonoError,
    UsageError,
    error_number,
    storage_failure,
)
from unisono.base.files import path_below, read_text, write_text
from unisono.base.text import one_line, redact, show_bytes
from unisono.guard.facts import read_environment
from unisono.guard.facts.environment import Hub, check_hub_answers, hub_silence, read_hub

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".mar", ".joblib")
"""Endings of files that run code when they are loaded."""
_OF_OTHERS = (".h5", ".msgpack", ".onnx", ".tflite", ".ot", ".gguf", ".safetensors.index.json.bak")
"""Endings of weights for other libraries, which are not downloaded where safetensors are there."""
_ATTEMPTS = 3
_WAIT_S = 1.0
_CHUNK = 4 << 20
_DATASETS = "datasets/"
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MOST_BYTES = 1 << 50


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        digest: SHA-256 of its content for a large file; the SHA-1 of git's blob for others; empty
            if the hub names none.
    """

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class RemoteRepo:
    """A repository of the hub at one commit.

    Attributes:
        kind: `model` or `dataset`.
    """

    name: str
    kind: str
    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True)
class FileSelection:
    """Which files of a repository are downloaded, and why others are not."""

    files: tuple[RemoteFile, ...]
    skipped: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Their size together."""
        return sum(file.bytes for file in self.files)


@dataclass
class CacheCheck:
    """What a comparison of cached files with their digests has found.

    Attributes:
        verified: the number of files whose content has its digest.
        damaged: a line for each file that differs.
        unverified: files without a known digest.
    """

    verified: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)


def find_repo(name: str, revision: str | None) -> RemoteRepo:
    """The model of this name; without one the dataset; `datasets/NAME` is a dataset.

    Raises:
        UsageError, UnfitError: if the hub does not give it.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    kinds = ("dataset",) if name.startswith(_DATASETS) else ("model", "dataset")
    name = name.removeprefix(_DATASETS)
    _refuse_paths(name, revision)
    _refuse_silence(name)
    check_hub_answers()
    for kind in kinds:
        try:
            return _described(name, kind, revision)
        except RepositoryNotFoundError as error:
            if isinstance(error, GatedRepoError) or kind == kinds[-1]:
                raise hub_error(error, name, revision) from error
    raise AssertionError


def _refuse_paths(name: str, revision: str | None) -> None:
    """Refuses a name or revision that would lead out of the cache."""
    try:
        path_below(Path(), name, parts=2)
    except ValueError as error:
        fix = "it is NAME or OWNER/NAME, e.g. Qwen/Qwen3-0.6B"
        raise UsageError.of(f"{name} is not a name of the hub", where=name, why=str(error), fix=fix) from None
    try:
        path_below(Path(), revision or "main")
    except ValueError as error:
        fix = "pass a branch, tag or commit"
        raise UsageError.of(
            f"{revision} is not a revision", where="--revision", why=str(error), fix=fix
        ) from None


def _refuse_silence(name: str) -> None:
    hub = _hub()
    silence = hub_silence(hub)
    if silence:
        raise ModelError.of(
            f"{name} cannot be downloaded",
            where=hub.endpoint,
            why=silence,
            fix=(
                f"unset {hub.offline}"
                if hub.offline
                else "check the network; a proxy is named by HTTPS_PROXY, a mirror by HF_ENDPOINT"
            ),
        )


def _hub() -> Hub:
    return read_hub(read_environment().hub_cache)


def _described(name: str, kind: str, revision: str | None) -> RemoteRepo:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    info: Any = _tried(
        lambda: HfApi().repo_info(name, repo_type=kind, revision=revision, files_metadata=True),
        name,
        revision,
        passes=RepositoryNotFoundError,
    )
    try:
        return _remote_repo(name, kind, info)
    except ValueError as error:
        raise ModelError.of(
            f"the file list of {name} cannot be used",
            where=_hub().endpoint,
            why=str(error),
            fix="choose a different repository, or a hub or mirror that you trust: HF_ENDPOINT names it",
        ) from error


def _remote_repo(name: str, kind: str, info: Any) -> RemoteRepo:
    """A repository as the hub describes it.

    Raises:
        ValueError: if its commit is not a digest, a name leads out of the cache, or a size is
            impossible.
    """
    if not _DIGEST.fullmatch(str(info.sha)):
        raise ValueError(f"its commit {str(info.sha)[:80]!r} is not a digest")
    return RemoteRepo(name, kind, info.sha, tuple(map(_remote_file, info.siblings or ())))


def _remote_file(file: Any) -> RemoteFile:
    path_below(Path(), file.rfilename)
    size = file.size or 0
    if not isinstance(size, int) or not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"the size of {file.rfilename} is {str(size)[:80]}")
    return RemoteFile(file.rfilename, size, str((file.lfs.sha256 if file.lfs else file.blob_id) or ""))


def select_files(repo: RemoteRepo, *, trust: bool) -> FileSelection:
    """All files of a dataset; of a model all but weights that unisono does not read.

    Args:
        trust: also pickled weights.

    Raises:
        ModelError: if a model has only pickled weights, without `trust`.
    """
    if repo.kind == "dataset":
        return FileSelection(repo.files)
    pickles = [file for file in repo.files if file.path.lower().endswith(PICKLES)]
    has_safe = any(file.path.endswith(".safetensors") for file in repo.files)
    if pickles and not has_safe and not trust:
        raise ModelError.of(
            f"{repo.name} has only pickled weights: {', '.join(file.path for file in pickles[:3])}",
            where=f"{repo.name}@{repo.commit[:12]}",
            why="loading a pickle can run arbitrary code, and unisono reads safetensors only",
            fix="choose a model with safetensors, or convert it; --trust downloads the files anyway",
        )
    left_out = {file.path for file in pickles if not trust}
    if has_safe:
        left_out |= {file.path for file in repo.files if file.path.lower().endswith(_OF_OTHERS)}
    kept = tuple(file for file in repo.files if file.path not in left_out)
    return FileSelection(kept, tuple(sorted(left_out)))


def download(
    repo: RemoteRepo, revision: str | None, selection: FileSelection, on_progress: Callable[[int], None]
) -> Path:
    """The directory of the cache with the files.

    Files that are there already are not downloaded again.

    Args:
        on_progress: called several times a second with the bytes that are there.

    Raises:
        UnisonoError: if files cannot be downloaded or written.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # re-exported

    disable_progress_bars()
    names = [file.path for file in selection.files]
    blobs = _place(repo) / "blobs"

    def fetch() -> str:
        return str(
            snapshot_download(
                repo.name,
                repo_type=repo.kind,
                revision=repo.commit,
                allow_patterns=[re.sub(r"([\[*?])", r"[\1]", name) for name in names],
                max_workers=4,
            )
        )

    with _reported(blobs, on_progress):
        directory = Path(_tried(fetch, repo.name, revision))
    _note_revision(repo, revision or "main")
    on_progress(selection.bytes)
    return directory


def _note_revision(repo: RemoteRepo, revision: str) -> None:
    """Writes the commit of a branch or tag where huggingface_hub looks for it without a network."""
    if revision != repo.commit:
        file = path_below(_place(repo) / "refs", revision)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, repo.commit)


def _place(repo: RemoteRepo) -> Path:
    return read_environment().hub_cache / f"{repo.kind}s--{repo.name.replace('/', '--')}"


@contextlib.contextmanager
def _reported(blobs: Path, on_progress: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile, a thread reports the size of all blobs, the incomplete ones included."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.25):
            with contextlib.suppress(OSError):
                on_progress(sum(path.stat().st_size for path in blobs.iterdir()))

    thread = threading.Thread(target=watch, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def verify_download(repo: RemoteRepo, selection: FileSelection, directory: Path) -> CacheCheck:
    """Reads the downloaded files, and compares them with the digests that the hub lists.

    A damaged one is removed from the cache.

    Raises:
        IntegrityError: if one is missing or differs.
    """
    checked = CacheCheck()
    for file in selection.files:
        _compare(directory / file.path, file.path, file.digest, file.bytes, checked)
    if checked.damaged:
        for file in selection.files:
            if any(line.startswith(f"{file.path}: ") for line in checked.damaged):
                _remove(directory / file.path)
        raise damage(
            repo.name, checked, directory, "run the same command again: the damaged files were removed"
        )
    return checked


def verify_cache(name: str, revision: str | None) -> tuple[Path, CacheCheck]:
    """Compares the cached files of a model or dataset with the digests that the cache has them
    under; needs no network.

    Raises:
        UsageError: if it is not in the cache.
        IntegrityError: if a file is damaged or incomplete.
    """
    _refuse_paths(name.removeprefix(_DATASETS), revision)
    directory = _cached(name.removeprefix(_DATASETS), revision, only_data=name.startswith(_DATASETS))
    checked = CacheCheck()
    for file in sorted(path for path in directory.rglob("*") if not path.is_dir()):
        digest = file.readlink().name if file.is_symlink() else ""
        _compare(file, str(file.relative_to(directory)), digest, None, checked)
    if checked.damaged:
        fix = f"delete these files, and run `unisono download {name}` again"
        raise damage(name, checked, directory, fix)
    return directory, checked


def _cached(name: str, revision: str | None, *, only_data: bool) -> Path:
    cache = read_environment().hub_cache
    for kind in ("datasets",) if only_data else ("models", "datasets"):
        folder = cache / f"{kind}--{name.replace('/', '--')}"
        requested = revision or "main"
        ref = path_below(folder / "refs", requested)
        with contextlib.suppress(OSError, ValueError):  # it does not hold a commit
            commit = read_text(ref, most_bytes=4096).strip() if ref.is_file() else requested
            snapshot = path_below(folder / "snapshots", commit)
            if snapshot.is_dir():
                return snapshot
    raise UsageError.of(
        f"{name} is not in the cache" + (f" at {revision}" if revision else ""),
        where=str(cache),
        fix=f"`unisono download {name}` downloads it",
    )


def damage(name: str, checked: CacheCheck, directory: Path, fix: str) -> IntegrityError:
    """The error for damaged files."""
    return IntegrityError(
        *(
            Problem(f"{name}: {line}", str(directory), "its content is not what the hub lists", fix)
            for line in checked.damaged
        )
    )


def _compare(file: Path, name: str, digest: str, size: int | None, checked: CacheCheck) -> None:
    try:
        length = file.stat().st_size
    except OSError:
        checked.damaged.append(f"{name}: it is missing")
        return
    if size is not None and length != size:
        checked.damaged.append(f"{name}: it has {length} bytes, and should have {size}")
    elif not (is_known := _DIGEST.fullmatch(digest)):
        checked.unverified.append(name)
    elif digest_of(file, git=len(is_known[0]) == 40) != digest:
        checked.damaged.append(f"{name}: its content does not have the digest {digest[:12]}…")
    else:
        checked.verified += 1
        checked.bytes += length


def digest_of(file: Path, *, git: bool) -> str:
    """SHA-256 of a file's content; with `git` the SHA-1 of git's blob with it."""
    made = hashlib.sha1(usedforsecurity=False) if git else hashlib.sha256()
    if git:
        made.update(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            made.update(chunk)
    return made.hexdigest()


def _remove(file: Path) -> None:
    """Removes a cached file, and what it links to in the cache: its blob, and that in the store of
    all repositories.
    """
    cache = read_environment().hub_cache.resolve()
    with contextlib.suppress(OSError):
        while (file.parent.resolve() / file.name).is_relative_to(cache):
            following = file.parent / file.readlink() if file.is_symlink() else None
            file.unlink()
            if following is None:
                return
            file = following


# ---- errors


def _tried(
    ask: Callable[[], Any],
    name: str,
    revision: str | None,
    *,
    passes: type[Exception] | tuple[type[Exception], ...] = (),
) -> Any:
    """The answer of the hub; a failure that may pass is tried again.

    Args:
        passes: errors that are raised as they are.

    Raises:
        UnisonoError: the error for the user.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return ask()
        except passes:
            raise
        except Exception as error:  # huggingface_hub passes on errors of several packages
            if attempt == _ATTEMPTS - 1 or not _may_pass(error):
                raise hub_error(error, name, revision) from error
            time.sleep(_WAIT_S * 2**attempt)
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status == 429 or status >= 500
    # a cut connection; not a full disk
    return error_number(error) is None and not isinstance(error, UnisonoError)


def _status(error: Exception) -> int | None:
    """The HTTP status of an error, or of what caused it."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if response is not None:
            return int(response.status_code)
        seen = seen.__cause__ or seen.__context__
    return None


def hub_error(
    error: Exception, name: str, revision: str | None = None, *, writes: bool = False
) -> UnisonoError:
    """The error for the user; the token is never in it.

    Args:
        writes: whether it was to be written to.
    """
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RevisionNotFoundError

    if isinstance(error, UnisonoError):
        return error
    if error_number(error) is not None and (failure := storage_failure(error)) is not None:
        return failure
    hub, status = _hub(), _status(error)
    token = f"the token of {hub.token}" if hub.token else "no token"
    what, fix = f"{name} cannot be reached at {hub.endpoint}", "run the same command again later"
    why = one_line(redact(str(error)), limit=300)
    if isinstance(error, RevisionNotFoundError):
        what, why, fix = (
            f"{name} has no revision {revision}",
            "",
            "pass a branch, tag or commit with --revision",
        )
    elif isinstance(error, HFValidationError):
        what, fix = f"{name} is not a name of the hub", "it is NAME or OWNER/NAME, e.g. Qwen/Qwen3-0.6B"
    elif status in (401, 403, 404):
        why = f"the hub answers {status}; {token} was sent"
        what, fix = _denied(name, hub, status, writes=writes, gated=isinstance(error, GatedRepoError))
    elif status is not None:
        why = f"it answers {status}, after several attempts"
        if status == 429:
            fix = "wait some minutes, or set HF_TOKEN: anonymous requests are limited more"
    return ModelError.of(what, where=hub.endpoint, why=why, fix=fix)


def _denied(name: str, hub: Hub, status: int, *, writes: bool, gated: bool) -> tuple[str, str]:
    """What happened, and the fix, where the hub denies access."""
    if writes:
        fix = "use a token with write access to it, in HF_TOKEN, and check the owner's name"
        return f"{hub.endpoint} does not let you write to {name}", fix
    if gated:
        fix = f"accept its terms at {hub.endpoint}/{name}, and set HF_TOKEN to a token of that account"
        return f"access to {name} is restricted: it is gated", fix
    if status == 403:
        return (
            f"{hub.endpoint} does not allow access to {name}",
            "use a token with the right to read it, in HF_TOKEN",
        )
    fix = "check the spelling; for a private one set HF_TOKEN"
    return f"there is no {name} at {hub.endpoint}, or it is private", fix


def describe_selection(repo: RemoteRepo, selection: FileSelection) -> str:
    """One line: what will be downloaded."""
    skipped = f"; {len(selection.skipped)} not needed" if selection.skipped else ""
    return (
        f"{repo.kind} {repo.name}@{repo.commit[:12]}: {len(selection.files)} files,"
        f" {show_bytes(selection.bytes)}{skipped}"
    )

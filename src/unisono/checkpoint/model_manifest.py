"""The manifest of a final directory (adapter/ or model/ of a run, or an export): every file with its digest and those of its tensors.

It is stored in the directory itself, so that a copy of the directory can be verified, too. transformers, peft and vLLM ignore it. Unlike
a checkpoint's manifest it has no mac: nothing in such a directory is executed, and it is made to be shared.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from pydantic import field_validator

from unisono.checkpoint.manifest import FileEntry, ManifestError, Vouched, is_file_name
from unisono.checkpoint.verify import Damage, digest_file, explain_damage
from unisono.errors import IntegrityError, Problem
from unisono.files import open_plain, parse_json, read_bytes

MODEL_MANIFEST = "unisono_manifest.json"
_ADAPTER_SETTINGS = "adapter_config.json"
_BASE = "base_model_name_or_path"
# Files that users edit in a finished model; a change in any other file changes the weights or the tokenization.
_FREE_TO_EDIT = ("README.md", "generation_config.json")

Read = Callable[[Path], tuple[int, str]]
"""Returns the size of a file and the XXH3-128 of its bytes; raises OSError."""


class ModelManifest(Vouched):
    """All files of a final directory, by relative path."""

    adapter_settings: str = ""
    """The digest of adapter_config.json without `base_model_name_or_path`, which differs between machines."""

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            if not all(is_file_name(part) for part in name.split("/")) or name == MODEL_MANIFEST:
                raise ValueError(f"{name!r} cannot be a file of a model")
        return files


@dataclass(frozen=True)
class ModelCheck:
    """The result of comparing a directory with its manifest.

    Attributes:
        listed: whether it has a manifest; a damaged one counts.
        findings: the differences; `edited` ones are for information, all others are damage.
    """

    path: Path
    listed: bool
    findings: list[Damage] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        """Whether nothing is damaged."""
        return not any(finding.is_fatal for finding in self.findings)

    def refusal(self, *, restore: str) -> IntegrityError:
        """The error that refuses a damaged directory."""
        return IntegrityError(
            *(
                Problem(
                    f"{self.path.name}/{finding}",
                    str(self.path / finding.file),
                    f"{MODEL_MANIFEST} in this directory has the digest of every file as written",
                    f"{restore}; if the change is intended, delete {self.path / MODEL_MANIFEST}: the files are then not verified",
                )
                for finding in self.findings
                if finding.is_fatal
            )
        )


def write_model_manifest(directory: Path, known: Mapping[str, FileEntry]) -> None:
    """Writes the manifest of all files that are in a directory now. The caller syncs it.

    Args:
        known: by name, the files whose digests are known from writing them; all others are read.

    Raises:
        OSError: if the storage fails.
    """
    files = {}
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory).as_posix()
        if file.is_file() and name != MODEL_MANIFEST:
            files[name] = known.get(name) or _entry(file)
    settings = _settings_digest(directory / _ADAPTER_SETTINGS) if _ADAPTER_SETTINGS in files else ""
    (directory / MODEL_MANIFEST).write_bytes(
        ModelManifest(files=files, adapter_settings=settings).with_checksum().to_bytes()
    )


def _entry(file: Path) -> FileEntry:
    size, digest = read_digest(file)
    return FileEntry(bytes=size, xxh3_128=digest)


def read_model_manifest(directory: Path) -> ModelManifest | None:
    """The manifest of a directory; None if it has none.

    Raises:
        OSError: if it cannot be read.
        ManifestError: if it is damaged.
    """
    try:
        return ModelManifest.from_bytes(read_bytes(directory / MODEL_MANIFEST))
    except FileNotFoundError:
        return None


def read_digest(file: Path) -> tuple[int, str]:
    """The size of a file in bytes, and the XXH3-128 of its content, read now.

    Raises:
        OSError: if it is missing, unreadable, or not a regular file (a named pipe would wait for a writer).
    """
    with open_plain(file) as stream:
        return digest_file(stream.fileno())


def listed_files(directory: Path) -> list[Path]:
    """The files that `check_model` reads: those in the manifest that exist; none without a readable manifest."""
    try:
        manifest = read_model_manifest(directory)
    except (OSError, ManifestError):
        return []
    return [directory / name for name in manifest.files if (directory / name).is_file()] if manifest else []


def check_model(
    directory: Path, *, read: Read = read_digest, only: Callable[[str], bool] = lambda _name: True
) -> ModelCheck:
    """Compares the files of a directory with its manifest.

    Args:
        directory: a final directory, or any model; without a manifest nothing is compared.
        only: whether to check the file of this name.
    """
    try:
        manifest = read_model_manifest(directory)
    except OSError as error:
        return ModelCheck(
            directory,
            listed=True,
            findings=[Damage(MODEL_MANIFEST, f"it cannot be read: {error.strerror}", "manifest")],
        )
    except ManifestError as error:
        return ModelCheck(
            directory, listed=True, findings=[Damage(MODEL_MANIFEST, f"it is damaged: {error}", "manifest")]
        )
    if manifest is None:
        return ModelCheck(directory, listed=False)
    found = [_compare(directory, name, manifest, read) for name in manifest.files if only(name)]
    return ModelCheck(directory, listed=True, findings=[damage for damage in found if damage is not None])


def _compare(directory: Path, name: str, manifest: ModelManifest, read: Read) -> Damage | None:
    wanted, may_change = manifest.files[name], name in _FREE_TO_EDIT
    try:
        size, digest = read(directory / name)
    except FileNotFoundError:
        return None if may_change else Damage(name, "it is missing", "missing")
    except OSError as error:
        return Damage(name, f"it cannot be read: {error.strerror}", "content")
    if (size, digest) == (wanted.bytes, wanted.xxh3_128):
        return None
    if may_change:
        return Damage(name, "it was edited after it was written; the edited file is used", "edited")
    if name == _ADAPTER_SETTINGS and _settings_digest(directory / name) == manifest.adapter_settings:
        return Damage(name, f"its {_BASE} was edited; the rest is unchanged", "edited")
    return explain_damage(directory, name, wanted, FileEntry(bytes=size, xxh3_128=digest))


def _settings_digest(file: Path) -> str:
    """Of the values in adapter_config.json without the path of the base model; empty if it is not a JSON object."""
    try:
        value = parse_json(read_bytes(file))
    except (OSError, ValueError):
        return ""
    if not isinstance(value, dict):
        return ""
    value.pop(_BASE, None)
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())

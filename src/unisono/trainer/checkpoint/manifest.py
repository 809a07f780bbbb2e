"""The manifest of one checkpoint, and the user's key that signs it.

A manifest protects itself twice. `checksum` detects damage: a flipped bit, an edit by hand. `mac`
detects strangers: it is an HMAC with the user's own key, and a checkpoint without a valid one is
*foreign*, though not damaged.
"""

import hashlib
import hmac
import json
from pathlib import Path
from typing import Annotated, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from unisono.base.files import parse_json, path_below, read_bytes
from unisono.base.text import validation_words

MANIFEST = "manifest.json"


class ManifestError(ValueError):
    """The bytes are not a valid manifest; the text says why."""


class FileEntry(BaseModel):
    """One file of a checkpoint: its size, and the XXH3-128 digest of its content in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")
    host: str = ""
    """The host whose rank wrote it, if different from the manifest's holder. The file itself is on
    the holder's disk in either case.
    """
    tensors: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]] = {}
    """The XXH3-64 digest of each tensor's bytes, so that damage can be reported by tensor."""

    def describes(self, other: "FileEntry") -> bool:
        """Whether both have the same content, whichever host wrote it."""
        return (self.bytes, self.xxh3_128) == (other.bytes, other.xxh3_128)


class Vouched(BaseModel):
    """A list of files with their digests; its own checksum detects any changed byte in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, serialize_by_alias=True)

    schema_: Literal[1] = Field(default=1, alias="schema")
    files: dict[str, FileEntry]
    checksum: str = ""

    @property
    def total_bytes(self) -> int:
        """The total size of the files, without this one."""
        return sum(entry.bytes for entry in self.files.values())

    def with_checksum(self) -> Self:
        """A copy with its checksum."""
        return self.model_copy(update={"checksum": self.true_checksum()})

    def true_checksum(self) -> str:
        """The checksum of the present content."""
        return xxhash.xxh3_128_hexdigest(self._body("checksum"))

    def to_bytes(self) -> bytes:
        """The content of the file. The text is canonical, so that any different byte is damage."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what to_bytes wrote.

        Raises:
            ManifestError: if a single byte differs from what was written.
        """
        try:
            value = parse_json(data)
        except ValueError as error:
            raise ManifestError("it is not JSON") from error
        if isinstance(value, dict) and isinstance(value.get("schema"), int) and value["schema"] > 1:
            raise ManifestError(f"its schema {value['schema']} is from a newer version of unisono")
        try:
            vouched = cls.model_validate(value)
        except ValidationError as error:
            raise ManifestError(validation_words(error)) from error
        if vouched.checksum != vouched.true_checksum() or data != vouched.to_bytes():
            raise ManifestError("its checksum does not match its content")
        return vouched

    def _body(self, *without: str) -> bytes:
        """Canonical JSON: sorted keys, no whitespace, ASCII."""
        body = self.model_dump(mode="json", exclude=set(without))
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


class Manifest(Vouched):
    """Everything known about a checkpoint without reading its tensors."""

    run_id: str
    step: int = Field(ge=0)
    created: str
    """UTC, ISO 8601."""
    config_digest: str
    world_size: int = Field(ge=1)
    threads: int = Field(ge=1)
    holder: str
    """The head's host. All files are in its output_dir; without a shared disk, other nodes send
    theirs over the channel.
    """
    mac: str = ""

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            if not is_file_name(name) or name == MANIFEST:
                raise ValueError(f"{name!r} cannot be a file of a checkpoint")
        return files

    def signed(self, key: bytes) -> Self:
        """A copy with mac and checksum."""
        return self.model_copy(update={"mac": self._mac(key)}).with_checksum()

    def is_signed_by(self, key: bytes) -> bool:
        """Whether the mac was made with this key."""
        return hmac.compare_digest(self.mac, self._mac(key))

    def _mac(self, key: bytes) -> str:
        return hmac.new(key, self._body("mac", "checksum"), hashlib.sha256).hexdigest()


def is_file_name(name: str) -> bool:
    """Whether `name` is a valid file name in a checkpoint: no path, not hidden."""
    try:
        path_below(Path(), name, parts=1)
    except ValueError:
        return False
    return not name.startswith(".")


def manifest_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which has the digests of all files; empty where it cannot
    be read.
    """
    try:
        return hashlib.sha256(read_bytes(checkpoint / MANIFEST)).hexdigest()
    except OSError:
        return ""

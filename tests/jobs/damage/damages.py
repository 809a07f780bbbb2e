"""Damages a checkpoint in each of the ways that disks, copies and people do.

For tests/jobs/damage and bench/damage.py.
"""

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import safe_open

from unisono.trainer.checkpoint.manifest import MANIFEST, Manifest
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.checkpoint.verify import HEADER, Damage

How = Literal[
    "flipped bit", "zeroed page", "truncation", "missing file", "file of another step", "file of another run",
    "manifest without files", "half-deleted directory", "named pipe", "deep JSON",
]  # fmt: skip
OF_A_FILE: tuple[How, ...] = (
    "flipped bit",
    "zeroed page",
    "truncation",
    "missing file",
    "file of another step",
    "file of another run",
)
OF_A_DIRECTORY: tuple[How, ...] = ("manifest without files", "half-deleted directory")
IN_PLACE: tuple[How, ...] = ("named pipe", "deep JSON")
"""Something else in the place of a file: what waits for a writer, and what no recursion reads."""
POINTERS = ("latest", "latest_checkpointed_iteration.txt", "checkpoint")
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Injected:
    """A damage that was done.

    Attributes:
        how: in which way.
        path: the checkpoint.
        files: those that are hit, by name.
        tensors: those of the file that are hit, where its bytes were changed; HEADER where its
            header is.
    """

    how: How
    path: Path
    files: tuple[str, ...]
    tensors: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Specimen:
    """A run's checkpoints, and those of another run of the same shape.

    Attributes:
        root: the directory of checkpoints.
        other: that of the other run.
        key: the user's, under which both are signed.
        run_id: of the run.
    """

    root: Path
    other: Path
    key: bytes
    run_id: str

    def copy(self, folder: Path) -> Path:
        """The same checkpoints in a folder that is not there yet; as a copy may be damaged."""
        shutil.copytree(self.root, folder)
        return folder


def kind_of_file(name: str) -> str:
    """manifest, state, trainable or optimizer; and whether it is a shard."""
    kind = name.split(".")[0].split("-")[0]
    return f"{kind} shard" if ".shard-" in name else kind


def files_of(path: Path) -> list[str]:
    """The files of a checkpoint."""
    return sorted(file.name for file in path.iterdir())


def damage(specimen: Specimen, path: Path, name: str, how: How, chance: random.Random) -> Injected:
    """Does it; gives what was hit. `name` is the file, or the first to go."""
    files = files_of(path)
    if how == "manifest without files":
        gone = [file for file in files if file != MANIFEST]
    elif how == "half-deleted directory":
        gone = [name, *(file for file in files if file != name and chance.random() < 0.5)]
    elif how == "missing file":
        gone = [name]
    elif how in IN_PLACE:
        (path / name).unlink()
        os.mkfifo(path / name) if how == "named pipe" else (path / name).write_text("[" * 2000 + "]" * 2000)
        return Injected(how, path, (name,))
    else:
        return _rewritten(specimen, path, name, how, chance)
    for file in gone:
        (path / file).unlink()
    return Injected(how, path, tuple(gone))


def _rewritten(specimen: Specimen, path: Path, name: str, how: How, chance: random.Random) -> Injected:
    file = path / name
    before = file.read_bytes()
    changed = before
    while changed == before:  # a page may have been zero already
        changed = _changed(specimen, path, name, before, how, chance)
    places = _places(file)
    file.write_bytes(changed)
    hit = frozenset(name for name, begin, end in places if before[begin:end] != changed[begin:end])
    return Injected(how, path, (name,), frozenset({HEADER}) if HEADER in hit else hit)


def _changed(specimen: Specimen, path: Path, name: str, before: bytes, how: How, chance: random.Random) -> bytes:  # fmt: skip
    data = bytearray(before)
    match how:
        case "flipped bit":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case "zeroed page":
            start = chance.randrange(len(data)) // _PAGE_BYTES * _PAGE_BYTES
            data[start : start + _PAGE_BYTES] = bytes(len(data[start : start + _PAGE_BYTES]))
        case "truncation":
            del data[chance.randrange(len(data)) :]
        case "file of another step":
            others = [other for other in path.parent.glob("step-*") if other != path]
            return (chance.choice(others) / name).read_bytes()
        case _:
            return (specimen.other / path.name / name).read_bytes()
    return bytes(data)


def _places(file: Path) -> list[tuple[str, int, int]]:
    """Begin and end of the header and of each tensor in a file; nothing for files of other
    kinds.
    """
    if file.suffix != ".safetensors":
        return []
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    with safe_open(str(file), framework="np") as reader:
        names = list(reader.keys())
    spans = [(name, *header[name]["data_offsets"]) for name in names]
    return [(HEADER, 0, begin), *((name, begin + first, begin + last) for name, first, last in spans)]


@dataclass(frozen=True)
class Found:
    """What a start would do with damaged checkpoints.

    Attributes:
        findings: all that it was told of, by checkpoint.
        used: the checkpoint that it takes; None: it takes none.
        is_as_written: whether that holds, byte for byte, what was saved.
    """

    findings: dict[str, list[Damage]]
    used: str | None
    is_as_written: bool


def look(specimen: Specimen, root: Path) -> Found:
    """Has the store choose, as a start does."""
    findings: dict[str, list[Damage]] = {}

    def note(path: Path, finding: Damage) -> None:
        findings.setdefault(path.name, []).append(finding)

    found = CheckpointStore(root, key=specimen.key).newest_intact(note, run_id=specimen.run_id)
    if found is None:
        return Found(findings, None, True)
    original = specimen.root / found.path.name
    same = all(
        (found.path / file).read_bytes() == (original / file).read_bytes() for file in files_of(original)
    )
    return Found(findings, found.path.name, same)


def is_named(injected: Injected, found: Found) -> bool:
    """Whether a finding names the checkpoint, and a file that was hit or the manifest without which
    none can be judged.
    """
    named = {damage.file for damage in found.findings.get(injected.path.name, []) if damage.is_fatal}
    return bool(named & set(injected.files))


def names_its_tensors(injected: Injected, found: Found) -> bool:
    """Whether the finding names exactly the tensors that were hit, or the header; of a file that is
    gone there is none to name.
    """
    if injected.how in OF_A_DIRECTORY:
        return True
    (finding,) = (one for one in found.findings[injected.path.name] if one.file == injected.files[0])
    return finding.kind == "step" or injected.how in IN_PLACE or set(finding.tensors) == injected.tensors


def another_run(specimen_root: Path, folder: Path, key: bytes, chance: random.Random) -> Path:
    """Checkpoints of another run of the same shape: the same headers, other numbers, manifests of
    its own.
    """
    shutil.copytree(specimen_root, folder)
    for file in sorted(folder.glob("step-*/*")):
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            begin = 8 + int.from_bytes(data[:8], "little")
            file.write_bytes(data[:begin] + chance.randbytes(len(data) - begin))
        elif file.name == MANIFEST:
            manifest = Manifest.from_bytes(data).model_copy(
                update={"run_id": "another", "mac": "", "checksum": ""}
            )
            file.write_bytes(manifest.signed(key).to_bytes())
        else:
            file.write_bytes(data.replace(b'"step": ', b'"step": 1'))
    return folder

"""Installed packages without importing them, and digests of unisono's own code."""

import hashlib
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import unisono
from unisono.facts.machine import driver_version

# Packages that affect numerics or wire formats: compared between nodes one by one.
_COMPARED = (
    "python",
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "safetensors",
    "datasets",
    "pyarrow",
    "numpy",
    "triton",
    "unisono",
)
_NCCL = re.compile(r"^nvidia-nccl(-cu\d+)?$")
_CUDA_SUFFIX = re.compile(r"\+cu(\d+)(\d)$")


def package_versions() -> dict[str, str]:
    """Every installed distribution and its version, by normalised name; and Python's."""
    found = {"python": platform.python_version()}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), distribution.version)
    return dict(sorted(found.items()))


def versions_digest(versions: dict[str, str]) -> str:
    """A short digest of all versions."""
    return hashlib.sha256(repr(sorted(versions.items())).encode()).hexdigest()[:16]


def decisive_versions(packages: Mapping[str, str]) -> dict[str, str]:
    """What numbers and wire formats depend on: python, torch, cuda, nccl, driver and some packages. What is not here is left out.

    Args:
        packages: all installed distributions, as `package_versions` gives them.
    """
    found = {name: packages[name] for name in _COMPARED if name in packages}
    nccl = next((version for name, version in packages.items() if _NCCL.match(name)), None)
    parts = {"cuda": cuda_of(packages.get("torch", "")), "nccl": nccl, "driver": driver_version()}
    return found | {name: version for name, version in parts.items() if version}


def cuda_of(torch_version: str) -> str | None:
    """The CUDA that torch was built for, as `12.6`; None for one without.

    From the version's suffix (`+cu126`), else from the wheel's version.py, which is read, not imported.
    """
    suffix = _CUDA_SUFFIX.search(torch_version)
    if suffix:
        return f"{suffix[1]}.{suffix[2]}"
    if "+" in torch_version or not torch_version:
        return None
    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        said = re.search(
            r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return said[1] if said else None


def code_digests(root: Path | None = None) -> dict[str, str]:
    """A digest of each Python file of the package, by its path from the folder that holds it: `unisono/train/loop.py`.

    Not cached: the package is a megabyte, and a cached digest could be stale.

    Args:
        root: the package's folder; None is this one.
    """
    folder = root or Path(unisono.__file__).parent
    files = sorted(file for file in folder.rglob("*.py") if "__pycache__" not in file.parts)
    return {file.relative_to(folder.parent).as_posix(): _digest(file) for file in files}


def _digest(file: Path) -> str:
    try:
        content = file.read_bytes()
    except FileNotFoundError:  # listed, and gone since: the package is being changed
        return "gone"
    return hashlib.sha256(content).hexdigest()[:16]

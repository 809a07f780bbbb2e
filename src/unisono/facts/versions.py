"""The packages that are installed, without importing them."""

import hashlib
import platform
from importlib import metadata


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

"""What NCCL's own settings files say: a forgotten line there works like a variable that nobody sees."""

from pathlib import Path

from unisono.facts.secret import is_secret, names_secret

_SYSTEM = Path("/etc/nccl.conf")
_LIMIT_BYTES = 1 << 16


def read_nccl_files(*, named: str | None, home: Path | None = None, system: Path = _SYSTEM) -> dict[str, str]:
    """What is set in the user's file, then in the system's; as in NCCL the first that sets a name wins.

    Args:
        named: NCCL_CONF_FILE, which takes the place of ~/.nccl.conf.
        home: the user's home; None finds it out.
        system: the machine's file.
    """
    own = Path(named) if named else _home(home) / ".nccl.conf"
    return _read(system) | _read(own)


def _home(given: Path | None) -> Path:
    try:
        return given or Path.home()
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def _read(file: Path) -> dict[str, str]:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            text = stream.read(_LIMIT_BYTES)
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("#")[0].partition("=")
        name, value = name.strip(), value.strip()
        if equals and name and not names_secret(name) and not is_secret(value):
            found.setdefault(name, value)
    return found

"""Where each value of a config was written."""

from unisono.config.yaml_file import KeyPath

COMMAND_LINE = "command line"


class Places:
    """Key path: `train.yaml:7` or `command line`."""

    def __init__(self, lines: dict[KeyPath, int], name: str) -> None:
        self._name = name
        self._places = {key: f"{name}:{line}" for key, line in lines.items()}

    def of(self, key: KeyPath) -> str:
        """The place of a key, or of the nearest section around it, or the file."""
        for end in range(len(key), 0, -1):
            place = self._places.get(key[:end])
            if place is not None:
                return place
        return self._name

    def override(self, key: KeyPath) -> None:
        """Remembers that the command line gave this key, in place of all that the file had at it."""
        self._places = {known: place for known, place in self._places.items() if known[: len(key)] != key}
        for end in range(1, len(key) + 1):
            self._places.setdefault(key[:end], COMMAND_LINE)

    def dotted(self) -> dict[str, str]:
        """The places of values, not of the sections around them; keys as `batch.micro`."""
        sections = {key[:-1] for key in self._places if isinstance(key[-1], str)}
        return {".".join(map(str, key)): place for key, place in self._places.items() if key not in sections}

"""Which tests go to the same process when several run side by side (`pytest -n`): those of a file, files that share dear runs, some rooms."""

from xdist.scheduler import LoadFileScheduling

_TOGETHER = {
    "tests/damage/test_user_path.py": "tests/damage/test_damages.py",
    "tests/launch/test_trust.py": "tests/launch/test_changed_settings.py",
    "tests/ranks/test_resume.py": "tests/ranks/test_equality.py",
}
"""A file, and the other with which it goes: session fixtures make their runs once in a process."""
_ROOMS = ("tests/ray/", "tests/slurm/")
"""All files of such a room go together: two clusters at a time would be more than a small machine can carry."""
_LONG = ("tests/examples/test_demo.py", *_ROOMS, "tests/ranks/test_equality.py", "tests/ranks/test_resume.py")
"""What takes a process the longest by itself; it begins first, and the others are done beside it."""


def is_long(nodeid: str) -> bool:
    """Whether a test belongs to what begins first."""
    return nodeid.startswith(_LONG)


class Sharing(LoadFileScheduling):
    """Gives out whole files, in the order of their collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        room = next((room for room in _ROOMS if file.startswith(room)), None)
        return room or _TOGETHER.get(file, file)

"""Which tests go to the same process when several run side by side (`pytest -n`): those of a file, and files that share dear runs."""

from xdist.scheduler import LoadFileScheduling

_TOGETHER = {
    "tests/damage/test_user_path.py": "tests/damage/test_damages.py",
    "tests/launch/test_trust.py": "tests/launch/test_changed.py",
    "tests/ranks/test_resume.py": "tests/ranks/test_equality.py",
}
"""A file, and the other with which it goes: session fixtures make their runs once in a process."""


class Sharing(LoadFileScheduling):
    """Gives out whole files, in the order of their collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _TOGETHER.get(file, file)

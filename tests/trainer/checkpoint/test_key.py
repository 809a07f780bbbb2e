"""The user's key. Run: pytest tests/trainer/checkpoint/test_key.py"""

import subprocess
import sys
from pathlib import Path

import pytest

from unisono.base.errors import UnfitError
from unisono.base.user_key import KEY_FILE, user_key

ASK = (
    "import sys; from pathlib import Path; from unisono.trainer.checkpoint.manifest import user_key;"
    " print(user_key(Path(sys.argv[1])).hex())"
)


def test_the_key_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "settings"
    key = user_key(folder)
    assert len(key) == 32
    assert user_key(folder) == key
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [KEY_FILE]


def test_processes_that_ask_at_once_get_one_key(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK, str(tmp_path / "settings")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    user_key(tmp_path)
    (tmp_path / KEY_FILE).chmod(0o644)
    with pytest.raises(UnfitError, match="readable by others"):
        user_key(tmp_path)


def test_a_damaged_key_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_text("not hex")
    (tmp_path / KEY_FILE).chmod(0o600)
    with pytest.raises(UnfitError, match="damaged") as caught:
        user_key(tmp_path)
    assert "delete it" in caught.value.problems[0].fix


def test_a_folder_that_cannot_be_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnfitError) as caught:
        user_key(tmp_path / "file" / "settings")
    assert "XDG_CONFIG_HOME" in caught.value.problems[0].fix

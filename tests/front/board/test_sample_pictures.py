"""The pictures of samples: which are given, and what never is.

Run: .venv/bin/python -m pytest tests/front/board/test_sample_pictures.py
"""

import base64
import io
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from PIL import Image

from tests.front.board.boards import RunningBoard, board_of
from tests.front.board.made_runs import make_run
from unisono.front.board.page import runs_file

GOOD, DRAWN, UNNAMED, LINKED, FAKE, LARGE, MISSING = (f"{digit:x}" * 32 + ".jpg" for digit in range(7))
ODD = "../../config.yaml"


def jpeg(color: str = "red", size: tuple[int, int] = (40, 20)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, "JPEG")
    return stream.getvalue()


def make_run_with_pictures(root: Path) -> Path:
    """A run whose samples name pictures of all kinds."""
    make_run(root)
    folder = root / "samples" / "thumbnails"
    folder.mkdir(parents=True)
    for name in (GOOD, DRAWN, UNNAMED):
        (folder / name).write_bytes(jpeg())
    outside = root.parent / "outside.jpg"
    outside.write_bytes(jpeg())
    (folder / LINKED).symlink_to(outside)
    (folder / FAKE).write_bytes(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    (folder / LARGE).write_bytes(jpeg() + bytes(1 << 20))
    named = [GOOD, LINKED, FAKE, LARGE, MISSING, ODD, 7]
    common = {
        "kind": "sample",
        "time": 1e9,
        "step": 50,
        "prompt": "what is this?",
        "text": "a",
        "reference": "b",
    }
    events = [common | {"pictures": named, "drawn": DRAWN}, common | {"pictures": []}]
    with (root / "events" / "rank-00000.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in events)
    return root


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBoard]:
    root = tmp_path_factory.mktemp("runs")
    with board_of(make_run_with_pictures(root / "one"), make_run(root / "two")) as made:
        yield made


def picture(board: RunningBoard, path: str, *, cookie: bool = True) -> tuple[int, str | None, bytes]:
    """Status, type and body of a path."""
    board.ask("/")  # it gets the cookie
    connection = HTTPConnection("127.0.0.1", board.port, timeout=20)
    connection.request("GET", path, headers={"Cookie": board.cookie} if cookie else {})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.getheader("content-type"), body


def test_pictures_that_samples_name_are_given(board: RunningBoard) -> None:
    (first, second) = board.json("/api/runs/one/samples")["evaluations"][0]["samples"]
    assert first["pictures"] == [GOOD, LINKED, FAKE, LARGE, MISSING]
    assert (first["drawn"], second["drawn"]) == ([DRAWN], [])
    for name in (GOOD, DRAWN):
        assert picture(board, f"/api/runs/one/pictures/{name}") == (200, "image/jpeg", jpeg())


def test_nothing_else_is_given(board: RunningBoard) -> None:
    for name in (
        UNNAMED, LINKED, FAKE, LARGE, MISSING, "..%2f..%2fconfig.yaml", "%2fetc%2fpasswd", "config.yaml", "x" * 300,
    ):  # fmt: skip
        assert picture(board, f"/api/runs/one/pictures/{name}")[0] == 404, name
    assert picture(board, f"/api/runs/two/pictures/{GOOD}")[0] == 404
    assert picture(board, f"/api/runs/none/pictures/{GOOD}")[0] == 404
    assert picture(board, f"/api/runs/one/pictures/{GOOD}", cookie=False)[0] == 401


def test_the_file_has_them_inside(tmp_path: Path) -> None:
    text = runs_file([make_run_with_pictures(tmp_path / "one")], key=b"")[1]

    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    inline = data["runs"][0]["regions"]["samples"]["inline"]
    assert inline.keys() == {GOOD, DRAWN}
    assert base64.b64decode(inline[GOOD].partition("base64,")[2]) == jpeg()

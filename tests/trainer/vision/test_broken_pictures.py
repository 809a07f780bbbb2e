"""Pictures that are broken, missing or odd: each is named with its file and the reason before
anything starts, or read as it should be.

Run: pytest tests/trainer/vision/test_broken_pictures.py
"""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.trainer.vision.broken import BROKEN, ODD, PNG
from tests.trainer.vision.conftest import Gallery
from unisono.base.errors import DataError
from unisono.trainer.data import PictureSource
from unisono.trainer.data.pictures.decoder import Broken, Decoded, DecoderProcess, decode_all
from unisono.trainer.data.pictures.decoding import decoding, upright_rgb
from unisono.trainer.data.pictures.store import read_pictures

pytestmark = pytest.mark.processes  # pictures are decoded in them


def _row(*images: str, text: str = "") -> dict[str, Any]:
    question = text or "<image>" * len(images) + "what is this?"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "a square"}]
    return {"messages": messages, "images": list(images)}


def _write(folder: Path, rows: list[Mapping[str, Any]], files: Mapping[str, bytes]) -> str:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def _data(file: str, **more: Any) -> dict[str, Any]:
    return {"data": {"train": file, **more}, "duration": "1 steps", "batch": {"global": 1, "micro": 1}}


def test_every_broken_picture_is_named_with_its_line_and_the_reason(gallery: Gallery, tmp_path: Path) -> None:
    files = {name: make() for name, (make, _) in BROKEN.items()}
    names = [*files, "missing.png", "folder.png"]
    (tmp_path / "folder.png").mkdir()
    file = _write(tmp_path, [_row("good.png"), *map(_row, names)], {**files, "good.png": PNG})

    plan = gallery.plan("llava", **_data(file, on_bad_row="skip"))
    notes = json.loads((Path(plan.output_dir) / "data.json").read_text())

    reasons = {note["line"]: note["why"] for note in notes["rows"]}
    words = {name: pattern for name, (_, pattern) in BROKEN.items()}
    words |= {"missing.png": "there is no such file", "folder.png": "cannot be read"}
    assert len(words) == 32
    for line, name in enumerate(names, 2):
        assert name in reasons[line]
        assert re.search(words[name], reasons[line]), (name, reasons[line])
    assert notes["total"]["bad"] == 32
    assert notes["total"]["pictures"] == {"used": 1, "resized": 0, "missing": 1, "broken": 31, "tokens": 16}
    gallery.alone(plan)


def test_a_broken_picture_ends_the_start_with_file_and_line(gallery: Gallery, tmp_path: Path) -> None:
    file = _write(tmp_path, [_row("good.png"), _row("half.png")], {"good.png": PNG, "half.png": PNG[:80]})

    with pytest.raises(DataError) as caught:
        gallery.plan("llava", **_data(file))

    (problem,) = caught.value.problems
    assert problem.where == f"{file}:2"
    assert "half.png" in problem.why
    assert "on_bad_row: skip" in problem.fix


def test_odd_pictures_are_read_upright_in_rgb(gallery: Gallery, tmp_path: Path) -> None:
    files = {name: make() for name, (make, _) in ODD.items()}
    file = _write(tmp_path, [_row(name) for name in files], files)

    plan = gallery.plan("llava", **_data(file))

    pictures = {one.name: one for one in read_pictures(Path(plan.data.cache_dir))}
    assert {name: (one.width, one.height) for name, one in pictures.items()} == {
        name: size for name, (_, size) in ODD.items() if name in pictures
    }
    assert set(files) - set(pictures) <= {"wrong-suffix.png"}, "pictures of the same bytes are one"
    assert all(one.pixels().mode == "RGB" for one in pictures.values())
    assert pictures["alpha.png"].pixels().getpixel((0, 0)) == (255, 255, 255)
    left, right = (pictures["mirrored.jpg"].pixels().getpixel((x, 32)) for x in (25, 70))
    assert left[0] > 200 > left[1]
    assert right[0] > 200 > right[1]


def test_a_decoder_that_dies_takes_no_other_picture_with_it(tmp_path: Path) -> None:
    """A file that grows beyond the bound of bytes while the process has little memory."""
    (tmp_path / "good.png").write_bytes(PNG)
    large = tmp_path / "large.png"
    with large.open("wb") as stream:
        stream.truncate((1 << 28) + 2)

    bad, good = decode_all(
        [
            PictureSource(str(large), None, "large.png"),
            PictureSource(str(tmp_path / "good.png"), None, "good.png"),
        ],
        processes=2,
    )

    assert isinstance(bad, Broken)
    assert "more than 256 MiB" in bad.why
    assert isinstance(good, Decoded)


_DECODER = "unisono.trainer.data.pictures.decoder"


@pytest.mark.parametrize(("name", "is_good"), [("SIGKILL", True), ("SIGSEGV", False)])
def test_a_decoder_that_is_killed_is_started_again(tmp_path: Path, name: str, *, is_good: bool) -> None:
    """A picture may cause a SIGSEGV, which makes it bad; a SIGKILL is from outside."""
    (tmp_path / "good.png").write_bytes(PNG)
    source = PictureSource(str(tmp_path / "good.png"), None, "good.png")

    with contextlib.closing(DecoderProcess()) as decoder:
        assert isinstance(decoder.decode(source), Decoded)
        (child,) = children_of(os.getpid(), _DECODER)
        os.kill(child, getattr(signal, name))
        first, again = decoder.decode(source), decoder.decode(source)

    assert isinstance(again, Decoded)
    assert first == (again if is_good else Broken("decoding it ended its process (SIGSEGV, exit code -11)"))


@pytest.mark.parametrize("often", [1, 4])
def test_a_preparation_whose_decoders_are_killed_ends_and_names_the_picture(
    gallery: Gallery, tmp_path: Path, often: int
) -> None:
    file = _write(tmp_path, [_row("a.png"), _row("b.png")], {"a.png": PNG, "b.png": PNG + b" "})
    killed: list[int] = []
    is_over = threading.Event()

    def kill_decoders() -> None:
        while len(killed) < often and not is_over.wait(0.001):
            for child in children_of(os.getpid(), _DECODER):
                if child not in killed:
                    os.kill(child, signal.SIGKILL)
                    killed.append(child)

    killer = threading.Thread(target=kill_decoders)
    killer.start()
    try:
        if often == 1:
            assert gallery.plan("llava", **_data(file)).data.ledger["pictures"] == 2
        else:
            with pytest.raises(DataError) as caught:
                gallery.plan("llava", **_data(file))
            first, second = caught.value.problems[:2]
            assert (first.where, second.where) == (f"{file}:1", f"{file}:2")
            why = "the process that decoded it was killed 2 times (SIGKILL, exit code -9)"
            assert first.why == f"the picture a.png cannot be used: {why}"
            assert second.why == f"the picture b.png cannot be used: {why}"
    finally:
        is_over.set()
        killer.join()
    assert len(killed) == often


def children_of(parent: int, word: str) -> list[int]:
    """Processes that this one started, with a word in their command line."""
    pids = []
    for file in Path(f"/proc/{parent}/task").glob("*/children"):  # a thread has its own
        with contextlib.suppress(OSError):  # it has ended
            listed = file.read_text().split()
            pids += [int(pid) for pid in listed if word in Path(f"/proc/{pid}/cmdline").read_text()]
    return pids


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (_row("a.png", text="what is this?") | {"images": ["a.png", "a.png"]}, None),
        (_row("a.png", text="<image> and <image>"), "more places"),
        (_row("a.png", "a.png", text="<image> alone"), "2 pictures, and 1 place"),
        (_row(text="<image> of nothing"), "has no picture"),
        (_row("https://example.com/a.png"), "example.com is not among the hosts of data.image_hosts"),
        (_row("data:image/png;base64,@@@"), "not valid base64"),
        (_row("data:image/png,raw"), "not base64"),
        ({**_row("a.png"), "videos": ["a.mp4"]}, "it has 1 video, and no places for them"),
        ({**_row("a.png"), "audios": ["a.wav"]}, "a recording in the column audios"),
    ],
    ids=["no-place", "one-too-few", "one-too-many", "none", "url", "base64", "raw", "video", "recording"],
)  # fmt: skip
def test_places_and_pictures_must_match(
    gallery: Gallery, tmp_path: Path, row: Mapping[str, Any], why: str | None
) -> None:
    file = _write(tmp_path, [_row("a.png"), row], {"a.png": PNG})

    if why is None:
        plan = gallery.plan("llava", **_data(file))
        assert any("as in TRL" in warning for warning in plan.data.warnings)
        return
    with pytest.raises(DataError) as caught:
        gallery.plan("llava", **_data(file))
    assert caught.value.problems[0].where == f"{file}:2"
    assert why in str(caught.value.problems[0].why)


@pytest.mark.parametrize("too_long", ["cut", "split", "keep-answer", "balanced"])
def test_a_picture_is_never_cut(gallery: Gallery, tmp_path: Path, too_long: str) -> None:
    file = _write(tmp_path, [_row("a.png"), _row(*["a.png"] * 4)], {"a.png": PNG})

    with pytest.raises(DataError) as caught:
        gallery.plan("llava", **_data(file, too_long=too_long, max_length=64))
    (problem,) = caught.value.problems
    assert problem.where == f"{file}:2"
    assert "a picture is never cut" in problem.why


def test_a_text_behind_the_pictures_is_cut_as_configured(gallery: Gallery, tmp_path: Path) -> None:
    row = _row("a.png", text="<image>" + "what is this? " * 40)
    answered = {**row, "messages": [*row["messages"][:1], {"role": "assistant", "content": "a " * 90}]}
    short = _row("a.png") | {
        "messages": [_row("a.png")["messages"][0], {"role": "assistant", "content": "a " * 90}]
    }
    file = _write(tmp_path, [short, answered], {"a.png": PNG})

    plan = gallery.plan("llava", **_data(file, too_long="cut", max_length=64, on_bad_row="skip"))

    assert plan.data.ledger["cut"] == 1
    assert plan.data.train.longest_row == 64


def test_larger_pictures_are_reduced_and_counted(gallery: Gallery, tmp_path: Path) -> None:
    file = _write(tmp_path, [_row("a.png"), _row("b.png")], {"a.png": PNG, "b.png": _saved((30, 20))})

    plan = gallery.plan("llava", **_data(file, pixels={"max": 1500}))

    first, second = read_pictures(Path(plan.data.cache_dir))
    assert (first.width, first.height, first.resized) == (47, 31, True), "LLaMA-Factory's arithmetic"
    assert (second.width, second.height, second.resized) == (30, 20, False)
    ledger = json.loads((Path(plan.output_dir) / "data.json").read_text())["total"]["pictures"]
    assert ledger["resized"] == 1


def _saved(size: tuple[int, int]) -> bytes:
    import io

    out = io.BytesIO()
    Image.new("RGB", size, "blue").save(out, "PNG")
    return out.getvalue()


def test_a_picture_that_changed_is_prepared_again_and_named_in_mid_run(
    gallery: Gallery, tmp_path: Path
) -> None:
    file = _write(tmp_path, [_row("a.png")], {"a.png": PNG})
    plan = gallery.plan("llava", **_data(file))

    (tmp_path / "a.png").write_bytes(_saved((40, 40)))
    again = gallery.plan("llava", **_data(file))

    assert "the picture a.png has changed" in again.data.cache_reason
    assert read_pictures(Path(again.data.cache_dir))[0].width == 40
    assert again.data.digest != plan.data.digest
    gallery.alone(again)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"the picture a\.png of .*rows\.jsonl:1 cannot be read any more"):
        gallery.alone(again)


def test_a_decoded_picture_has_the_size_that_was_reported() -> None:
    for make, size in ODD.values():
        with decoding(make()) as image:
            assert upright_rgb(image).size == size

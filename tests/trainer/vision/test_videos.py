"""Videos in rows are frames, one after the other, for models without tokens of videos.

Run: pytest tests/trainer/vision/test_videos.py
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import needs
from tests.trainer.vision.conftest import Gallery
from unisono.base.errors import DataError
from unisono.trainer.data.pictures import film
from unisono.trainer.data.pictures.decoding import BadPictureError
from unisono.trainer.data.pictures.film import FrameRequest, keep_frames, sampled
from unisono.trainer.data.pictures.store import read_pictures
from unisono.trainer.data.token_table import TokenTable, read_picture_numbers

pytestmark = pytest.mark.processes  # videos are decoded in them

_FRAMES = 12
_TURNS = ("<video>what happens?", "it gets brighter")


def _frame(number: int) -> Image.Image:
    return Image.new("RGB", (64, 48), (20 * number, 20 * number, 20 * number))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same film of 12 frames in 3 seconds as a GIF, a WebP, a directory, and pictures."""
    folder = tmp_path_factory.mktemp("videos")
    frames = [_frame(number) for number in range(_FRAMES)]
    for name in ("film.gif", "film.webp"):
        frames[0].save(
            folder / name, save_all=True, append_images=frames[1:], duration=250, loop=0, lossless=True
        )
    (folder / "film").mkdir()
    for number, frame in enumerate(frames):
        frame.save(folder / "film" / f"frame_{number}.png")  # frame_10 is after frame_2
    return folder


def _row(videos: Any, *turns: Any, **more: Any) -> dict[str, Any]:
    contents = turns or _TURNS
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(contents)]
    return {"messages": messages, **({} if videos is None else {"videos": videos}), **more}


def _plan(gallery: Gallery, folder: Path, row: dict[str, Any], family: str = "llava", **data: Any) -> Any:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    sections = {"train": str(file), **data}
    return gallery.plan(family, data=sections, batch={"global": 1, "micro": 1}, duration="1 steps")


def _seen(plan: Any) -> tuple[list[int], list[int]]:
    """The tokens of the first row, and the brightness of each of its pictures."""
    table = Path(plan.data.cache_dir)
    pictures = read_pictures(table)
    numbers = read_picture_numbers(table)[0]
    ids = TokenTable.open(table, "train").row(0)[0].tolist()
    return ids, [round(float(np.asarray(pictures[number].pixels()).mean())) for number in numbers]


def _as_pictures(gallery: Gallery, folder: Path, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    names = [f"film/frame_{number}.png" for number in numbers]
    turns = ("<image>" * len(names) + "what happens?", _TURNS[1])
    return _seen(_plan(gallery, folder, _row(None, *turns, images=names)))


_LISTED = [f"film/frame_{number}.png" for number in range(_FRAMES)]
FORMS: dict[str, dict[str, Any]] = {
    "gif": _row(["film.gif"]),
    "webp": _row("film.webp"),
    "directory": _row(["film"]),
    "list of frames": _row([_LISTED]),
    "part": _row(None, [{"type": "video", "video": "film.gif"}, {"type": "text", "text": "what happens?"}], _TURNS[1]),
    "part of frames": _row(
        None, [{"type": "video", "video": _LISTED}, {"type": "text", "text": "what happens?"}], _TURNS[1]
    ),
    "part with the column": _row(["film.gif"], [{"type": "video"}, {"type": "text", "text": "what happens?"}], _TURNS[1]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_video_is_its_sampled_frames_as_pictures(gallery: Gallery, folder: Path, form: str) -> None:
    wanted = _as_pictures(gallery, folder, [0, 3, 7, 11])

    plan = _plan(gallery, folder, FORMS[form], frames={"fps": None, "max": 4})

    assert _seen(plan) == wanted
    assert wanted[1] == [0, 60, 140, 220]
    assert plan.data.ledger["pictures"] == 4
    (warning,) = [line for line in plan.data.warnings if "with videos" in line]
    assert warning.startswith("rows with videos: 1; LlavaProcessor has no tokens for videos")


def test_frames_of_a_second_are_those_of_llamafactory(gallery: Gallery, folder: Path) -> None:
    """Its rule: max(1, min(frames, most, ⌊seconds · fps⌋)), evenly from the first to the last one."""
    for fps, most, count in ((2.0, 16, 6), (2.0, 5, 5), (0.1, 16, 1), (100.0, 99, _FRAMES)):
        plan = _plan(gallery, folder, _row(["film.gif"]), frames={"fps": fps, "max": most})
        indices = np.linspace(0, _FRAMES - 1, count).astype(np.int32).tolist()
        assert _seen(plan)[1] == [20 * index for index in indices]
        assert sampled(_FRAMES, seconds=3.0, fps=fps, most=most) == indices


def test_a_run_trains_on_pictures_and_videos_and_never_cuts_one(gallery: Gallery, folder: Path) -> None:
    turns = ("<image>and <video>: what?", "it gets brighter")
    row = _row(["film.gif"], *turns, images=["film/frame_11.png"])

    plan = _plan(gallery, folder, row, frames={"fps": None, "max": 2})
    assert _seen(plan)[1] == [220, 0, 220]
    gallery.alone(plan)

    with pytest.raises(DataError) as caught:
        _plan(gallery, folder, row, frames={"fps": None, "max": 2}, max_length=40, too_long="cut")
    assert "a picture is never cut" in caught.value.problems[0].why


def test_rows_of_a_template_of_llamafactory_have_the_same_frames(gallery: Gallery, folder: Path) -> None:
    plan = _plan(gallery, folder, _row(["film.gif"]), template="lf:llava", frames={"max": 2})

    ids, brightness = _seen(plan)
    assert brightness == [0, 220]
    assert plan.data.ledger["pictures"] == 2
    mark = max(set(ids), key=ids.count)
    assert ids.count(mark) == 2 * 16  # tokens of each picture


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_families_without_tokens_of_videos_get_pictures(gallery: Gallery, folder: Path, family: str) -> None:
    plan = _plan(gallery, folder, _row(["film.gif"]), family, frames={"max": 2}, max_length=1024)

    assert _seen(plan)[1] == [0, 220]
    gallery.alone(plan)


def test_a_video_that_changed_is_sampled_again_at_the_next_start(gallery: Gallery, tmp_path: Path) -> None:
    frames = [_frame(number) for number in range(4)]

    def save(shown: Sequence[Image.Image]) -> None:
        shown[0].save(tmp_path / "film.gif", save_all=True, append_images=list(shown[1:]), duration=500)

    save(frames)
    assert _seen(_plan(gallery, tmp_path, _row(["film.gif"])))[1] == [0, 20, 40, 60]
    assert _plan(gallery, tmp_path, _row(["film.gif"])).data.cache_hit
    save(frames[:2])

    plan = _plan(gallery, tmp_path, _row(["film.gif"]))

    assert not plan.data.cache_hit
    assert "the video film.gif has changed" in plan.data.cache_reason
    assert _seen(plan)[1] == [0, 20]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (_row(["none.gif"]), "the video none.gif cannot be used: No such file or directory"),
    "empty": (_row(["empty"]), "the directory has no .png"),
    "text": (_row(["text.mp4"]), "it is not a GIF, WebP, MP4, MOV, MKV, WebM or AVI video"),
    "playlist": (_row(["list.m3u8"]), "it is not a GIF, WebP, MP4"),
    "pipe": (_row(["pipe.gif"]), "the video pipe.gif cannot be used"),
    "truncated": (_row(["half.gif"]), "the video half.gif cannot be used: it is truncated or damaged"),
    "one too many": (_row(["film.gif"], "what?", "it"), "it has 1 video, and no places for them"),
    "places": (_row(["film.gif"], "<video><video>?", "it"), "it has 1 video, and more places for them"),
    "url": (_row(["http://127.0.0.1/film.mp4"]), "127.0.0.1 is not among the hosts"),
    "sampling": (
        _row(None, [{"type": "video", "video": "film.gif", "fps": 1.0}], "it"),
        "a video of a part has fps, which is not read",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_video_makes_its_row_bad(gallery: Gallery, folder: Path, name: str) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "text.mp4").write_text("no video")
    if not (folder / "pipe.gif").exists():
        os.mkfifo(folder / "pipe.gif")  # nothing may wait for a writer
    (folder / "list.m3u8").write_text("#EXTM3U\nfile:///etc/passwd\n")
    data = (folder / "film.gif").read_bytes()
    (folder / "half.gif").write_bytes(data[: len(data) // 2])
    row, why = BAD[name]

    with pytest.raises(DataError) as caught:
        _plan(gallery, folder, row)

    (problem,) = caught.value.problems
    assert problem.where.endswith("rows.jsonl:1")
    assert why in problem.why


def test_models_with_tokens_of_videos_are_refused_by_name(gallery: Gallery, folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        _plan(gallery, folder, _row(["film.gif"]), "qwen3_vl")

    assert "Qwen3VLProcessor has tokens of its own for videos" in caught.value.problems[0].why


def _write_film(file: Path, container: str, codec: str) -> None:
    import av

    with av.open(str(file), "w", format=container) as out:
        stream = out.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(_FRAMES):
            for packet in stream.encode(av.VideoFrame.from_image(_frame(number))):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)


@pytest.mark.parametrize(
    ("name", "container", "codec"),
    [("film.mp4", "mp4", "mpeg4"), ("film.mkv", "matroska", "mpeg4"), ("film.avi", "avi", "mpeg4")],
)
def test_video_files_are_read_with_pyav(
    gallery: Gallery, folder: Path, name: str, container: str, codec: str
) -> None:
    needs.package("av")
    _write_film(folder / name, container, codec)

    plan = _plan(gallery, folder, _row([name]), frames={"fps": 2.0, "max": 16})

    ids, brightness = _seen(plan)
    indices = np.linspace(0, _FRAMES - 1, 6).astype(np.int32).tolist()
    assert ids == _as_pictures(gallery, folder, indices)[0]
    assert np.allclose(brightness, [20 * index for index in indices], atol=6), "a codec loses a little"


def test_a_truncated_video_file_is_a_bad_row(gallery: Gallery, folder: Path) -> None:
    needs.package("av")
    _write_film(folder / "whole.avi", "avi", "mpeg4")
    data = (folder / "whole.avi").read_bytes()
    (folder / "cut.avi").write_bytes(data[: int(len(data) * 0.6)])

    with pytest.raises(DataError) as caught:
        _plan(gallery, folder, _row(["cut.avi"]))

    assert "the video cut.avi cannot be used: it is truncated" in caught.value.problems[0].why


def test_video_files_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "film.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(64))
    monkeypatch.setattr(film, "find_spec", lambda _: None)

    with pytest.raises(BadPictureError, match=r"pip install 'unisono\[video\]'"):
        keep_frames(FrameRequest(str(tmp_path / "film.mp4"), None, 4, str(tmp_path)))

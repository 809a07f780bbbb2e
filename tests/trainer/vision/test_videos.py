"""Videos in rows are frames, one after the other, for models without tokens of videos; for others
see test_video_tokens.

Run: pytest tests/trainer/vision/test_videos.py
"""

import json
import os
import re
import struct
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
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
from unisono.trainer.data.pictures.film import FrameRequest, KeptFrames, keep_frames, sampled
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


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="they are read with torchvision")
def test_models_with_tokens_of_videos_need_torchvision(gallery: Gallery, folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        _plan(gallery, folder, _row(["film.gif"]), "qwen3_vl")

    (problem,) = caught.value.problems
    assert "Qwen3VLProcessor reads videos with torchvision, which is not installed" in problem.why
    assert "pip install 'unisono[vision]'" in str(problem.fix)


def test_frames_have_bounds_of_their_own(gallery: Gallery, folder: Path) -> None:
    turns = ("<image>and <video>: what?", "it gets brighter")
    row = _row(["film"], *turns, images=["film/frame_11.png"])
    frames = {"max": 2, "pixels": {"max": 768}}

    plan = _plan(gallery, folder, row, frames=frames, pixels={"max": 1000})

    sizes = [(one.width, one.height) for one in read_pictures(Path(plan.data.cache_dir))]
    assert sizes == [(36, 27), (32, 24), (32, 24)]


def _write_film(file: Path, container: str, codec: str, **more: Any) -> None:
    """The film, or other `frames`, at `times` in milliseconds; with `options` of the container and
    `sound`.
    """
    import av

    frames = more.get("frames", [_frame(number) for number in range(_FRAMES)])
    with av.open(str(file), "w", format=container, options=more.get("options", {})) as out:
        stream = out.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        if "times" in more:
            stream.codec_context.time_base = Fraction(1, 1000)
        sound = out.add_stream("pcm_s16le", rate=16000) if more.get("sound") else None
        out.start_encoding()
        for number, image in enumerate(frames):
            frame = av.VideoFrame.from_image(image)
            if "times" in more:
                frame.pts, frame.time_base = more["times"][number], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
        if sound is not None:
            silence = np.zeros((1, 16000), dtype=np.int16)
            wave = av.AudioFrame.from_ndarray(silence, format="s16", layout="mono")
            wave.sample_rate, wave.pts = 16000, 0
            out.mux([*sound.encode(wave), *sound.encode()])


def _kept(file: Path, *, fps: float | None = None, most: int = 99) -> KeptFrames:
    return keep_frames(FrameRequest(str(file), fps, most, str(file.parent / "kept")))


def test_the_rotation_of_a_phone_is_applied(tmp_path: Path) -> None:
    """In an MP4 file it is a matrix of the track: what was filmed upright is stored on its side."""
    needs.package("av")
    image = Image.new("RGB", (64, 48), (0, 0, 0))
    image.paste((250, 250, 250), (0, 0, 16, 12))  # at the top left
    _write_film(tmp_path / "film.mp4", "mp4", "mpeg4", frames=[image] * 3)
    data = bytearray((tmp_path / "film.mp4").read_bytes())
    matrix = data.index(b"tkhd") + 44

    for entries, turned in (
        ((0, 1, 0, -1, 0, 0), -90),
        ((-1, 0, 0, 0, -1, 0), 180),
        ((0, -1, 0, 1, 0, 0), 90),
    ):
        data[matrix : matrix + 24] = struct.pack(">6i", *(entry << 16 for entry in entries))
        file = tmp_path / f"turned{turned}.mp4"
        file.write_bytes(data)
        frame = Image.open(_kept(file).files[0])
        expected = image.rotate(turned, expand=True)  # counterclockwise
        assert frame.size == expected.size
        assert np.abs(np.asarray(frame).astype(int) - np.asarray(expected)).mean() < 6


@pytest.mark.parametrize(("container", "name"), [("mp4", "film.mp4"), ("matroska", "film.mkv")])
def test_frames_of_a_variable_rate_have_their_times(tmp_path: Path, container: str, name: str) -> None:
    needs.package("av")
    times = [0, 100, 200, 1000, 3000, 3100, 3200, 3300, 3400, 5000, 5100, 6000]
    _write_film(tmp_path / name, container, "mpeg4", times=times)

    kept = _kept(tmp_path / name)

    assert kept.times == pytest.approx([time / 1000 for time in times])
    assert kept.seconds == pytest.approx(6.25, abs=0.3), "how long the last one lasts is not in each file"
    assert len(_kept(tmp_path / name, fps=1.0).files) == 6


def test_a_film_that_was_trimmed_without_encoding_it_again_is_whole(tmp_path: Path) -> None:
    """As phones do: an edit list names the part that is shown."""
    needs.package("av")
    import av

    _write_film(tmp_path / "film.mp4", "mp4", "mpeg4")
    source = av.open(str(tmp_path / "film.mp4"))
    options = {"avoid_negative_ts": "disabled"}
    with source, av.open(str(tmp_path / "trimmed.mp4"), "w", options=options) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None and packet.pts is not None and packet.duration is not None:
                packet.pts, packet.dts = (at - 5 * packet.duration for at in (packet.pts, packet.dts))
                packet.stream = stream
                out.mux(packet)

    kept = _kept(tmp_path / "trimmed.mp4")

    shown = [float(np.asarray(Image.open(file)).mean()) for file in kept.files]
    assert np.allclose(shown, [20 * number for number in range(5, _FRAMES)], atol=6)
    assert kept.seconds == pytest.approx(1.75)


DAMAGED: dict[str, tuple[str, dict[str, Any], float, str]] = {
    "mp4, index at its end": ("mp4", {}, 0.3, "it is truncated or damaged: Invalid data found"),
    "mp4, index at its end, little missing": ("mp4", {}, 0.6, "it has no pictures"),
    "mp4, index first": (
        "mp4", {"options": {"movflags": "faststart"}}, 0.8, "it is truncated: it has 7 frames, in 1.75 of 3.00 s",
    ),
    "mkv": ("matroska", {}, 0.6, "it is truncated: it has 5 frames, in 1.25 of 3.00 seconds"),
    "mkv with sound": ("matroska", {"sound": True}, 0.05, "it is truncated"),
    "avi": ("avi", {}, 0.95, "it is truncated or damaged: Invalid data found"),
    "mkv without frames": ("matroska", {"frames": []}, 1.0, "it is truncated or damaged: End of file"),
    "mp4 without frames": ("mp4", {"frames": []}, 1.0, "it has no pictures"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_missing_of_a_video_is_named(tmp_path: Path, name: str) -> None:
    needs.package("av")
    container, more, share, why = DAMAGED[name]
    file = tmp_path / "film"
    _write_film(file, container, "mpeg4", **more)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])

    with pytest.raises(BadPictureError, match=re.escape(why)):
        _kept(file)


def test_a_file_of_sound_alone_is_a_bad_row(gallery: Gallery, folder: Path) -> None:
    needs.package("av")
    import av

    with av.open(str(folder / "sound.mkv"), "w", format="matroska") as out:
        stream = out.add_stream("pcm_s16le", rate=16000)
        wave = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono")
        wave.sample_rate = 16000
        out.mux([*stream.encode(wave), *stream.encode()])

    with pytest.raises(DataError) as caught:
        _plan(gallery, folder, _row(["sound.mkv"]))

    assert (
        "the video sound.mkv cannot be used: it has no pictures, only sound" in caught.value.problems[0].why
    )


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

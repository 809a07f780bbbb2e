"""Folders of pictures: what is read, what is refused and why, and the sizes that pictures get.

Run: pytest tests/trainer/diffusion/test_folders.py
"""

import io
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests import needs
from tests.trainer.diffusion.conftest import Studio
from tests.trainer.diffusion.making import write_pictures
from unisono.base.errors import DataError, IntegrityError
from unisono.trainer.config.sections import DiffusionSection
from unisono.trainer.families.pictures.picture_folders import (
    bucket_sizes,
    probe,
    read_folder,
    read_pixels,
    with_bucket,
)

needs.package("diffusers")
Image = needs.package("PIL.Image")

SECTION = DiffusionSection()


def _png(picture: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, format="PNG", **options)
    return stream.getvalue()


def _jpeg(picture: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, format="JPEG", **options)
    return stream.getvalue()


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _bomb(side: int) -> bytes:
    """A PNG of side × side pixels in a few kilobytes."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    lines = zlib.compress(b"\0" * (side + 1) * 64)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", lines) + _chunk(b"IEND", b"")


def _broken() -> dict[str, bytes]:
    """Thirty broken pictures of all kinds, by name."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    png, jpeg, webp = _png(noise), _jpeg(noise), io.BytesIO()
    noise.save(webp, format="WEBP", lossless=True)
    found = {
        "empty.png": b"",
        "empty.jpg": b"",
        "text.png": b"hello",
        "html.jpg": b"<html>404</html>",
        "zeros.webp": bytes(999),
    }
    for share in (10, 30, 50, 80, 95):
        found[f"cut-{share}.png"] = png[: len(png) * share // 100]
        found[f"cut-{share}.webp"] = webp.getvalue()[: len(webp.getvalue()) * share // 100]
    for share in (5, 40, 90):
        found[f"cut-{share}.jpg"] = jpeg[: len(jpeg) * share // 100]
    found |= {
        f"flipped-{i}.png": png[:i] + bytes([png[i] ^ 255]) + png[i + 1 :] for i in (0, 17, 30, 100, 2000)
    }
    found |= {"bomb.png": _bomb(30_000), "larger-bomb.png": _bomb(60_000)}
    found["chunk.png"] = png[:8] + _chunk(b"IHDR", b"\0" * 3) + png[8:]
    found["text-bomb.png"] = png[:33] + _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27))) + png[33:]
    found["no-data.png"] = png[:33] + _chunk(b"IEND", b"")
    found["gif.png"] = b"GIF89a" + bytes(100)
    found["tiff.jpg"] = b"II*\0" + bytes(100)
    assert len(found) == 30, len(found)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "pictures" / "1_all"
    place.mkdir(parents=True)
    Image.new("RGB", (64, 48), (200, 10, 10)).save(place / "good.png")
    (place / "good.txt").write_text("a good one")
    return place


def _read(folder: Path, **more: Any) -> Any:
    return read_folder(
        str(folder.parent), SECTION, source=0, is_prior=False, key="data.train", decoded={}, **more
    )


def test_thirty_broken_pictures_are_named_with_their_reason(folder: Path) -> None:
    for name, data in _broken().items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("a caption")
    found = _read(folder)
    assert [picture.path.name for picture in found.pictures] == ["good.png"]
    assert {Path(lost.name).name for lost in found.lost} == set(_broken())
    assert {lost.what for lost in found.lost} == {"bad"}
    assert all(lost.why for lost in found.lost)
    assert "bomb" in next(lost.why for lost in found.lost if lost.name.endswith("/bomb.png"))


def test_broken_pictures_take_no_more_memory_than_the_largest_honest_one(folder: Path) -> None:
    code = (
        "import re, sys; from unisono.trainer.config.sections import DiffusionSection\nfrom"
        " unisono.trainer.families.pictures.picture_folders import need_pillow, read_folder\nneed_pillow(); import"
        " PIL.PngImagePlugin, PIL.JpegImagePlugin, PIL.WebPImagePlugin\npeak = lambda: 1024 *"
        " int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\nbefore = peak();"
        " read_folder(sys.argv[1], DiffusionSection(), source=0, is_prior=False, key='', decoded={});"
        " print(peak() - before)"
    )

    def measure() -> int:
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder.parent)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    Image.new("RGB", (4000, 4000)).save(folder / "large.png")
    (folder / "large.txt").write_text("large")
    honest = measure()
    for name, data in _broken().items():
        (folder / name).write_bytes(data)
    assert honest > 4000 * 4000 * 3 // 2
    assert measure() <= 2 * honest


def test_links_captions_and_other_files_have_their_reasons(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    Image.new("RGB", (64, 64)).save(outside)
    (folder / "link.png").symlink_to(outside)
    (folder / "link.txt").write_text("outside")
    (folder / "inside.png").symlink_to(folder / "good.png")
    (folder / "inside.caption").write_text("inside")
    (folder / "linked-folder").symlink_to(tmp_path)
    (folder / "dangling.png").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe.png")
    Image.new("RGB", (64, 64)).save(folder / "silent.png")
    (folder / "anything.gif").write_bytes(b"GIF89a")
    (folder.parent / "loose").mkdir()
    Image.new("RGB", (64, 64)).save(folder.parent / "loose" / "x.png")
    found = _read(folder)
    assert sorted(picture.path.name for picture in found.pictures) == ["good.png", "inside.png"]
    reasons = {Path(lost.name).name: (lost.what, lost.why) for lost in found.lost}
    assert "symlink out of the folder" in reasons["link.png"][1]
    assert "symlink out of the folder" in reasons["linked-folder"][1]
    assert "cannot be followed" in reasons["dangling.png"][1]
    assert "cannot be read" in reasons["pipe.png"][1]
    assert "no caption" in reasons["silent.png"][1]
    assert reasons["anything.gif"][0] == "dropped"
    assert "number of repeats" in reasons["x.png"][1]


def test_captions_come_from_files_metadata_and_folders(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    for folder in ("3_cat", "2_dog"):
        (root / folder).mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(root / folder / "a.png")
    (root / "3_cat" / "a.txt").write_text("\ufeff a cat, sitting \nsecond line")
    (root / "metadata.jsonl").write_text(
        "not json\n" + "[" * 100_000 + '\n{"file_name": "2_dog/a.png", "text": "a dog"}\n'
    )
    Image.new("RGB", (64, 64)).save(root / "2_dog" / "b.png")
    section = DiffusionSection(folder_captions=True)
    found = read_folder(str(root), section, source=0, is_prior=False, key="", decoded={})
    assert {p.relative: (p.caption, p.repeats) for p in found.pictures} == {
        "3_cat/a.png": ("a cat, sitting", 3), "2_dog/a.png": ("a dog", 2), "2_dog/b.png": ("dog", 2),
    }  # fmt: skip


def test_an_empty_caption_is_bad_and_lines_after_the_first_are_counted(folder: Path) -> None:
    for name, caption in (
        ("empty", ""),
        ("blank", " \n\n"),
        ("lines", "a red house\non a hill\n\nwith three cats\n"),
    ):
        Image.new("RGB", (64, 64)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(caption)
    Image.new("RGB", (64, 64)).save(folder / "table.png")
    (folder / "metadata.jsonl").write_text('{"file_name": "table.png", "text": " "}\n')
    found = _read(folder)
    read = {p.path.name: (p.caption, p.unread_lines) for p in found.pictures}
    assert read == {"good.png": ("a good one", 0), "lines.png": ("a red house", 2)}
    bad = {Path(lost.name).name: lost.why for lost in found.lost}
    assert bad == {
        "empty.png": "its caption in empty.txt is empty",
        "blank.png": "its caption in blank.txt is empty",
        "table.png": "its caption in metadata.jsonl is empty",
    }


def test_every_file_of_a_folder_is_used_or_accounted_for(folder: Path) -> None:
    red = Image.new("RGB", (64, 64), (250, 0, 0))
    for name in ("photo.jfif", "photo2.JPE"):
        (folder / name).write_bytes(_jpeg(red))
        (folder / name).with_suffix(".txt").write_text("red")
    others = {
        "alone.txt": "a caption without a picture of its name",
        "good.caption": "its picture has its caption in another file",
        "good.npz": ".npz files are neither pictures nor captions",
        "README": "such files are neither pictures nor captions",
        "metadata.jsonl": "its pictures have captions in other files",
        "._good.png": "its name begins with a dot",
        "photo.avif": ".avif files are not read; save it as PNG, JPEG or WebP",
        "moving.gif": ".gif files are not read; save it as PNG, JPEG or WebP",
    }
    for name in others:
        (folder / name).write_text("x")
    (folder / "moving.txt").write_text("the caption of a file that is dropped belongs to it")
    (folder.parent / ".checkpoints").mkdir()
    (folder.parent / ".checkpoints" / "good.png").write_bytes(b"")
    found = _read(folder)
    assert sorted(p.path.name for p in found.pictures) == ["good.png", "photo.jfif", "photo2.JPE"]
    lost = {Path(one.name).name: one.why for one in found.lost}
    assert lost == others | {".checkpoints": "its name begins with a dot"}
    assert {one.what for one in found.lost} == {"dropped"}


def _pixels(path: Path, data: bytes, size: tuple[int, int]) -> Any:
    path.write_bytes(data)
    width, height, digest = probe(path, {})
    return (width, height), read_pixels(path, digest, size)


def test_pictures_of_all_modes_become_upright_rgb(tmp_path: Path) -> None:
    picture = Image.new("RGB", (64, 32), (250, 0, 0))
    picture.paste((0, 0, 250), (32, 0, 64, 32))  # the right half is blue
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    size, pixels = _pixels(tmp_path / "turned.jpg", _jpeg(picture, exif=exif, quality=95), (32, 64))
    assert size == (32, 64)
    assert pixels[8, 16, 0] > 200  # red is above
    assert pixels[56, 16, 2] > 200

    clear = Image.new("RGBA", (32, 32), (0, 255, 0, 0))
    clear.paste((0, 255, 0, 255), (0, 0, 16, 32))
    _, pixels = _pixels(tmp_path / "alpha.png", _png(clear), (32, 32))
    assert pixels[5, 30].tolist() == [255, 255, 255]  # transparent is white
    assert pixels[5, 5].tolist() == [0, 255, 0]

    _, pixels = _pixels(
        tmp_path / "cmyk.jpg", _jpeg(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), quality=95), (32, 32)
    )
    assert pixels[16, 16, 0] > 200
    assert pixels[16, 16, 1] < 60

    stream = io.BytesIO()
    clear.save(stream, format="WEBP", lossless=True)
    _, pixels = _pixels(tmp_path / "clear.webp", stream.getvalue(), (32, 32))
    assert pixels[5, 30].tolist() == [255, 255, 255]
    assert pixels[5, 5].tolist() == [0, 255, 0]

    deep = Image.fromarray(np.full((32, 32), 128 * 257, dtype=np.uint16))
    _, pixels = _pixels(tmp_path / "deep.png", _png(deep), (32, 32))
    assert pixels[3, 3].tolist() == [128, 128, 128]

    for mode, color in (("L", 77), ("LA", (77, 255)), ("1", 1), ("P", 3)):
        _, pixels = _pixels(tmp_path / f"{mode}.png", _png(Image.new(mode, (32, 32), color)), (16, 16))
        assert pixels.shape == (16, 16, 3)


def test_buckets_keep_about_the_resolutions_area_and_the_nearest_ratio() -> None:
    sizes = bucket_sizes((512, 512), SECTION)
    assert (512, 512) in sizes
    assert (768, 320) in sizes
    assert all(width * height <= 512 * 512 and width % 64 == height % 64 == 0 for width, height in sizes)
    assert all(min(size) >= 256 for size in sizes)


def test_a_picture_that_would_be_enlarged_too_much_is_bad(folder: Path) -> None:
    (found,) = _read(folder).pictures
    with pytest.raises(Exception, match="too small: 64 × 48"):
        with_bucket(found, bucket_sizes((512, 512), SECTION), (512, 512), SECTION)


def test_ledger_lists_every_file_and_bad_ones_are_refused_unless_skipped(
    studio: Studio, tmp_path: Path, pictures_dir: Path
) -> None:
    place = tmp_path / "p" / "1_all"
    place.mkdir(parents=True)
    for file in (pictures_dir / "1_other").iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    (place / "broken.png").write_bytes(b"no picture")
    (place / "broken.txt").write_text("x")
    with pytest.raises(DataError, match=r"broken\.png"):
        studio.plan("diffusion", data={"train": str(place.parent)})
    plan = studio.plan("diffusion", data={"train": str(place.parent), "on_bad_row": "skip"})
    ledger = json.loads((Path(plan.output_dir) / "data.json").read_text())
    assert (ledger["total"]["rows"], ledger["total"]["used"], ledger["total"]["bad"]) == (5, 4, 1)
    assert {row["what"] for row in ledger["rows"]} == {"used", "bad"}
    assert len(ledger["rows"]) == 5
    assert any("pixels" in row["why"] for row in ledger["rows"])


def test_cut_captions_and_unread_caption_lines_are_in_the_ledger(studio: Studio, tmp_path: Path) -> None:
    captions = {
        "a": "a red thing",
        "long": ", ".join(f"tag{i}" for i in range(60)),
        "lines": "a red house\nwith three cats",
    }
    place = tmp_path / "p" / "1_thing"
    place.mkdir(parents=True)
    for number, (name, caption) in enumerate(captions.items()):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(place / f"{name}.png")
        (place / f"{name}.txt").write_text(caption)
    plan = studio.plan("diffusion", data={"train": str(place.parent)})
    ledger = json.loads((Path(plan.output_dir) / "data.json").read_text())
    rows = {Path(row["file"]).name: row for row in ledger["rows"]}
    assert {name: row["what"] for name, row in rows.items()} == {
        "a.png": "used",
        "long.png": "cut",
        "lines.png": "used",
    }
    assert (ledger["total"]["used"], ledger["total"]["cut"]) == (3, 1)
    length = re.search(
        r"its caption has (\d+) tokens, of which the text encoder reads 75$", rows["long.png"]["why"]
    )
    assert length is not None
    assert ledger["total"]["tokens_cut"] == int(length[1]) - 75 > 0
    assert rows["lines.png"]["why"].endswith("; 1 more lines of its caption file are not read")
    cut, lines = plan.data.warnings
    assert cut.startswith("1 captions are cut, e.g. of ")
    assert lines.startswith(
        "1 caption files have more than one line, and only the first is read, as in sd-scripts"
    )
    whole = studio.plan("diffusion", data={"train": str(place.parent)}, diffusion={"max_tokens": 225})
    assert whole.data.ledger["cut"] == int(int(length[1]) > 225)


def test_a_new_file_that_is_not_used_is_in_the_ledger_of_the_next_start(
    studio: Studio, tmp_path: Path
) -> None:
    place = write_pictures(tmp_path / "p" / "1_own", ["grey"], ((56, 24),))
    for dropped in (0, 1):
        plan = studio.plan("diffusion", data={"train": str(place.parent)})
        assert plan.data.ledger["dropped"] == dropped
        (place / "moving.gif").write_bytes(b"GIF89a")


def test_a_damaged_entry_of_the_cache_is_computed_again(studio: Studio) -> None:
    first = studio.plan("diffusion")
    files = sorted((studio.folder / "cache" / "pictures" / "latents").rglob("*.safetensors"))
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    again = studio.plan("diffusion")
    assert (first.data.digest, again.data.cache_hit) == (again.data.digest, False)
    assert "1 latents" in again.data.cache_reason
    assert re.search(r", \d[\d.]* [kM]?B on disk$", again.data.cache_reason)


def test_an_entry_that_is_damaged_after_the_start_ends_the_run(studio: Studio, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures" / "1_own", ["grey"], ((56, 24),)).parent
    plan = studio.plan("diffusion", data={"train": str(folder)}, duration="2 steps", batch={"global": 1, "micro": 1})  # fmt: skip
    (digest,) = [xxhash.xxh3_128(file.read_bytes()).hexdigest() for file in folder.rglob("*.png")]
    (entry,) = (studio.folder / "cache" / "pictures" / "latents").rglob(f"{digest}*.safetensors")
    data = bytearray(entry.read_bytes())
    data[-3] ^= 1
    entry.write_bytes(data)
    with pytest.raises(IntegrityError, match="cache of pictures is damaged"):
        studio.alone(plan)
    assert studio.plan("diffusion", data={"train": str(folder)}).data.cache_hit is False

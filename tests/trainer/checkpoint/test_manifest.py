"""Properties of a manifest. Run: pytest tests/trainer/checkpoint/test_manifest.py"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.checkpoint.manifest import FileEntry, Manifest, ManifestError

KEY = b"k" * 32
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True).filter(
    lambda name: name != "manifest.json"
)
ENTRIES = st.builds(
    FileEntry, bytes=st.integers(0, 2**60), xxh3_128=st.integers(0, 2**128 - 1).map(lambda n: f"{n:032x}")
)
MANIFESTS = st.builds(
    Manifest,
    run_id=st.text(st.characters(codec="utf-8"), max_size=20), step=st.integers(0, 10**12), created=st.just("2026-01-01T00:00:00+00:00"),
    config_digest=st.text("0123456789abcdef", max_size=32), world_size=st.integers(1, 1024), threads=st.integers(1, 512),
    holder=st.text(st.characters(codec="utf-8"), max_size=20), files=st.dictionaries(NAMES, ENTRIES, max_size=4),
).map(lambda manifest: manifest.signed(KEY))  # fmt: skip


@given(MANIFESTS)
def test_what_is_written_reads_back_and_is_ours(manifest: Manifest) -> None:
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.is_signed_by(KEY)
    assert not again.is_signed_by(b"x" * 32)


@given(MANIFESTS, st.data())
def test_any_flipped_bit_is_found(manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray(manifest.to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ManifestError):
        Manifest.from_bytes(bytes(raw))


@given(MANIFESTS, st.data())
def test_any_truncation_is_found(manifest: Manifest, data: st.DataObject) -> None:
    raw = manifest.to_bytes()
    with pytest.raises(ManifestError):
        Manifest.from_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_in_plain_words(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(data)


def _signed(**changes: object) -> Manifest:
    return Manifest.model_validate(
        {
            "run_id": "r", "step": 1, "created": "", "config_digest": "", "world_size": 1, "threads": 1, "holder": "h", "files": {},
            **changes,
        }
    ).signed(KEY)  # fmt: skip


def test_who_changes_the_step_and_fix_the_checksum_is_still_a_stranger() -> None:
    forged = _signed().model_copy(update={"step": 2})
    forged = forged.model_copy(update={"checksum": forged.true_checksum()})
    assert not Manifest.from_bytes(forged.to_bytes()).is_signed_by(KEY)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".hidden", "", "manifest.json", "a\nb"])
def test_a_file_name_cannot_lead_out_of_the_directory(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a file"):
        _signed(files={name: {"bytes": 1, "xxh3_128": "0" * 32}})


def test_a_newer_schema_is_named() -> None:
    with pytest.raises(ManifestError, match="newer version"):
        Manifest.from_bytes(b'{"schema": 2}')

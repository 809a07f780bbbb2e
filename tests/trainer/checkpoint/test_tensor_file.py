"""Files of tensors, and whole tensors out of parts.

Run: pytest tests/trainer/checkpoint/test_tensor_file.py
"""

import json
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.trainer.checkpoint.states import part_of
from unisono.base.errors import IntegrityError
from unisono.trainer.checkpoint.state import CheckpointReader, bytes_of, dtype_name
from unisono.trainer.checkpoint.writer import (
    STATE,
    TensorPart,
    file_bytes,
    group_file,
    state_text,
    write_tensor_file,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
MANY = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES, st.integers(0, 2**31)), max_size=6)
SEVERAL = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(50).to(dtype)


def _fresh(folder: Path) -> Path:
    found = folder / f"f{len(list(folder.iterdir()))}"
    found.mkdir()
    return found


@SEVERAL
@given(MANY)
def test_safetensors_reads_the_same_bits_and_digests_match_the_file(
    tmp_path: Path, many: list[tuple[torch.dtype, tuple[int, ...], int]]
) -> None:
    tensors = {f"t{n}.weight": _tensor(*one) for n, one in enumerate(many)}
    path = _fresh(tmp_path) / "a.safetensors"
    parts = [part_of(name, tensor) for name, tensor in tensors.items()]
    entry = write_tensor_file(path, parts, metadata={"format": "pt"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bytes(bytes_of(found[name])) == bytes(bytes_of(tensor))
        assert entry.tensors[name] == xxhash.xxh3_64_hexdigest(bytes(bytes_of(tensor)))
    content = path.read_bytes()
    assert (entry.bytes, entry.xxh3_128) == (len(content), xxhash.xxh3_128_hexdigest(content))
    assert file_bytes(parts, metadata={"format": "pt"}) == entry.bytes


def test_a_part_is_read_when_its_turn_comes_and_not_before(tmp_path: Path) -> None:
    alive: list[str] = []

    def part(name: str) -> TensorPart:
        def read() -> memoryview:
            alive.append(name)
            return memoryview(bytes(4))

        return TensorPart(name, "F32", (1,), read)

    seen: list[int] = []
    write_tensor_file(
        tmp_path / "a.safetensors", [part("a"), part("b")], on_bytes=lambda n: seen.append(len(alive))
    )
    assert alive == ["a", "b"]
    assert seen[-2:] == [1, 2]  # the first was written before the second was asked for


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([TensorPart("a", "F32", (2,), lambda: memoryview(bytes(4)))], "a has 4 bytes instead of 8"),
        ([TensorPart("a", "U8", (1,), lambda: memoryview(b"1"))] * 2, "a occurs twice"),
    ],
)
def test_a_part_that_is_not_what_it_reported_is_refused(
    tmp_path: Path, parts: list[TensorPart], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        write_tensor_file(tmp_path / "a.safetensors", parts)


def _write_parts(folder: Path, whole: dict[str, torch.Tensor], cuts: list[int]) -> None:
    """Each tensor cut along its first dimension at `cuts`, one file a piece, as shards write it."""
    shards = len(cuts) + 1
    for shard in range(shards):
        parts = []
        for name, tensor in whole.items():
            ends = [0, *(min(cut, len(tensor)) for cut in sorted(cuts)), len(tensor)]
            piece = tensor[ends[shard] : ends[shard + 1]].contiguous()
            if piece.numel():
                offsets = (ends[shard],) + (0,) * (tensor.ndim - 1)
                shape = tuple(tensor.shape)
                parts.append(
                    TensorPart(name, dtype_name(piece.dtype), tuple(piece.shape), lambda p=piece: bytes_of(p),  # type: ignore[misc]
                               shape, offsets)
                )  # fmt: skip
        write_tensor_file(folder / group_file("trainable", shard, shards), parts)
    (folder / STATE).write_bytes(state_text(["trainable"], {"step": 3}, shards=shards))


@SEVERAL
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 4), st.sampled_from(DTYPES)), min_size=1, max_size=4
    ),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_parts_are_read_as_the_whole_however_they_are_cut(
    tmp_path: Path, sizes: list[tuple[int, int, torch.dtype]], cuts: list[int]
) -> None:
    whole = {f"w{n}": _tensor(dtype, (rows, columns), n) for n, (rows, columns, dtype) in enumerate(sizes)}
    folder = _fresh(tmp_path)
    _write_parts(folder, whole, cuts)
    reader = CheckpointReader(folder)
    assert reader.values == {"step": 3}
    assert reader.groups["trainable"].keys() == whole.keys()
    for name, tensor in whole.items():
        assert reader.groups["trainable"][name].shape == tuple(tensor.shape)
        assert bytes(bytes_of(reader.tensor("trainable", name))) == bytes(bytes_of(tensor))


def _two_shards(folder: Path) -> None:
    _write_parts(folder, {"w": torch.arange(12.0).reshape(4, 3)}, [2])


def test_a_missing_file_of_a_shard_is_reported(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    (tmp_path / group_file("trainable", 1, 2)).unlink()
    with pytest.raises(IntegrityError, match="cannot be read"):
        CheckpointReader(tmp_path)


def test_parts_that_do_not_make_the_whole_are_refused(tmp_path: Path) -> None:
    """As where one shard's file is there twice: the digests would say so first."""
    _two_shards(tmp_path)
    first, second = (tmp_path / group_file("trainable", shard, 2) for shard in (0, 1))
    second.write_bytes(first.read_bytes())
    with pytest.raises(IntegrityError, match="the parts of w do not cover the tensor"):
        CheckpointReader(tmp_path)


def test_more_shards_than_were_written_are_missed(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    document = json.loads((tmp_path / STATE).read_text())
    (tmp_path / STATE).write_text(json.dumps({**document, "shards": 3}))
    with pytest.raises(IntegrityError):
        CheckpointReader(tmp_path)

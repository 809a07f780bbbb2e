"""Reads a model's files without torch: JSON, templates, headers of weight files, and weights in one
pass.
"""

import json
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, Any

import xxhash

from unisono.base.errors import ModelError, Problem
from unisono.base.files import (
    MOST_BYTES,
    SETTINGS_BYTES,
    TEMPLATE_BYTES,
    kind_of,
    open_plain,
    parse_json,
    path_below,
    read_bytes,
    read_text,
)
from unisono.base.text import one_line

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 32 << 20  # bytes: 200,000 tensors. JSON may need fifty times its size in memory
_MOST_DIMS = 64  # of torch's tensors
_LARGEST = 2**63
_LENGTH_BYTES = 8
_BLOCK_BYTES = 1 << 20  # stays in the cache between the digest and the search for NaN
_SHOWN = 8
_TOKENIZER_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SETTINGS_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "processor_config.json", "preprocessor_config.json"),
    "chat_template.json",
)
_VOCABULARY_FILES = (
    *(INDEX, "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
_MOST = (
    dict.fromkeys(_SETTINGS_FILES, SETTINGS_BYTES)
    | dict.fromkeys(_VOCABULARY_FILES, MOST_BYTES)
    | {"chat_template.jinja": TEMPLATE_BYTES, "model.safetensors": None, "adapter_model.safetensors": None}
)
"""The files of a model's directory that unisono, transformers, tokenizers and peft open, with their
largest size; None: any.
"""

# Bits per item; items of F4 and F6 share bytes.
_ITEM_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
# Unsigned type of the same width, exponent bits, and mantissa bits. An exponent of all ones is
# infinity if the mantissa is 0, else NaN.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0x007F_FFFF),
    "F16": ("<u2", 0x7C00, 0x03FF),
    "BF16": ("<u2", 0x7F80, 0x007F),
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a safetensors file: its name, dtype and shape, and where in the file its bytes
    begin and end.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0


@dataclass
class WeightContents:
    """The result of one pass over a weight file.

    Attributes:
        bytes: its size.
        digest: the XXH3-128 of its bytes in hex.
        tensors: the XXH3-64 of each tensor's bytes in hex; empty unless requested.
        odd: "NaN" or "infinity", whichever is found first, for each tensor with such values.
    """

    bytes: int
    digest: str
    tensors: dict[str, str] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the weights, all of which exist.

    Raises:
        ModelError: if there are none, or a file of the index is missing.
    """
    index = directory / INDEX
    if index.is_file():
        return indexed_files(index)
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if single.exists():
        raise ModelError.of(
            "model.safetensors is not a file",
            where=str(single),
            why="a directory or a device is in its place",
            fix="copy or download the weights again",
        )
    if list(directory.glob("*.bin")) or list(directory.glob("*.pt")):
        raise ModelError.of(
            "the weights are pickled files",
            where=str(directory),
            why="loading a pickle can run arbitrary code",
            fix=(
                "convert them once to safetensors (transformers: model.save_pretrained), if you trust their"
                " source"
            ),
        )
    raise ModelError.of(
        "the model has no weights",
        where=str(directory),
        why="there is neither model.safetensors nor its index",
        fix="copy the weights, or set model.weights: random to train from scratch",
    )


def indexed_files(index: Path) -> list[Path]:
    """The weight files that an index lists, in order.

    Raises:
        ModelError: if it is damaged, lists a file elsewhere, or files are missing.
    """
    value = read_json_object(index, fix="copy it again")
    files = value.get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ModelError.of(
            "the index of the weights does not map tensors to files",
            where=str(index),
            why="weight_map must be an object of tensor names and file names",
            fix="copy it again",
        )
    try:
        paths = [path_below(index.parent, name, parts=1) for name in sorted(set(files.values()))]
    except ValueError as error:
        raise ModelError.of(
            f"in the index of the weights {error}",
            where=str(index),
            why="weight files must be in the directory of the index",
            fix="copy it again",
        ) from error
    missing = [file.name for file in paths if not file.is_file()]
    if missing:
        raise ModelError.of(
            f"the model lacks {len(missing)} of {len(paths)} weight files: {', '.join(missing[:4])}",
            where=str(index.parent),
            why=f"{index.name} lists them",
            fix="copy or download the missing files",
        )
    return paths


def check_directory(directory: Path) -> None:
    """Refuses the directory of a model, a tokenizer or an adapter that a library could not open
    safely.

    It may hold a file for which the library would wait, or that it would read into memory without a
    limit.

    Raises:
        ModelError: with the file.
    """
    limits = {directory / name: most for name, most in _MOST.items()}
    limits |= dict.fromkeys(directory.glob("additional_chat_templates/*.jinja"), TEMPLATE_BYTES)
    for file, most in limits.items():
        try:
            status = file.stat()
        except OSError:  # missing, which its reader reports if it needs it
            continue
        what = f"is {kind_of(status.st_mode)}, not a regular file"
        if stat.S_ISREG(status.st_mode):
            if most is None or status.st_size <= most:
                continue
            what = f"has {status.st_size:,} bytes; the maximum is {most:,}"
        raise ModelError.of(f"{file.name} {what}", where=str(file), fix="copy or download it again")


ConfigJson = Mapping[str, object]  # config.json of a model


def read_json_object(file: Path, *, fix: str) -> dict[str, Any]:
    """The JSON object in a file of a model.

    Raises:
        ModelError: if it cannot be read or is not a JSON object.
        FileNotFoundError: if it does not exist.
    """
    data = b""
    try:
        data = read_bytes(file, most_bytes=_MOST.get(file.name) or SETTINGS_BYTES)
        value = parse_json(data)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError.of(
            f"{file.name} cannot be read",
            where=str(file),
            why=error.strerror or type(error).__name__,
            fix=fix,
        ) from error
    except ValueError as error:
        raise ModelError.of(
            f"{file.name} cannot be read", where=str(file), why=_why_no_json(data, error), fix=fix
        ) from error
    if not isinstance(value, dict):
        raise ModelError.of(f"{file.name} is not a JSON object", where=str(file), fix=fix)
    return value


def check_tokenizer_files(directory: Path) -> None:
    """Reads a tokenizer's JSON files and chat template, to refuse broken ones with a clear message.

    Raises:
        ModelError: with the file.
    """
    check_directory(directory)
    for name in _TOKENIZER_JSON:
        if (directory / name).is_file():
            read_json_object(
                directory / name, fix="copy it again, or set model.tokenizer to a different directory"
            )
    template = directory / "chat_template.jinja"
    try:
        read_text(template)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        why = (
            "it is not UTF-8 text"
            if isinstance(error, UnicodeDecodeError)
            else error.strerror or "it is not a file"
        )
        raise ModelError.of(
            "chat_template.jinja cannot be read",
            where=str(template),
            why=why,
            fix="copy it again, or set data.template",
        ) from error


def _why_no_json(data: bytes, error: ValueError) -> str:
    if not data.strip():
        return "it is empty"
    if data.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself (`git lfs pull` fetches it)"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: line {error.lineno}, column {error.colno}"
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def read_safetensors_header(file: Path) -> list[TensorHeader]:
    """The tensors of a safetensors file, in the order of the file; its size must match the header.

    Raises:
        ModelError: if it is incomplete, damaged or not a safetensors file.
    """
    size = file.stat().st_size
    with open_plain(file) as stream:
        start = stream.read(_LENGTH_BYTES)
        if start.startswith(b"version "):
            raise _damaged(
                file, "it is a Git LFS pointer, not the file itself", fix="fetch it with `git lfs pull`"
            )
        if len(start) < _LENGTH_BYTES:
            raise _damaged(file, "it is empty" if not start else f"it has only {size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > size:
            raise _damaged(file, "it is not a safetensors file, or its first bytes are damaged")
        if length > _HEADER_LIMIT:
            raise _damaged(file, f"its header has {length:,} bytes; the maximum is {_HEADER_LIMIT:,}")
        text = stream.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise _damaged(file, "its header is not JSON") from error
    tensors = _tensors(file, header, data=_LENGTH_BYTES + length)
    if not tensors:
        raise _damaged(file, "its header lists no tensors")
    end = tensors[-1].end
    if end != size:
        raise ModelError.of(
            (
                "a weight file is truncated"
                if size < end
                else "a weight file is longer than its header declares"
            ),
            where=str(file),
            why=f"it has {size} bytes; its header declares {end}",
            fix="copy or download it again",
        )
    return tensors


def _tensors(file: Path, header: Any, *, data: int) -> list[TensorHeader]:
    """The tensors of the header.

    Each must begin at the end of the previous one, and have the size of its shape.
    """
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = sorted((_tensor(file, name, entry, data) for name, entry in header.items()), key=_place)
    at = data
    for tensor in tensors:
        bits = prod(tensor.shape) * _ITEM_BITS[tensor.dtype]
        if tensor.begin != at or (tensor.end - tensor.begin) * 8 != bits:
            raise _damaged(file, f"in its header the size of {tensor.name} does not match shape and dtype")
        at = tensor.end
    return tensors


def _tensor(file: Path, name: str, entry: Any, data: int) -> TensorHeader:
    try:
        shape, (begin, end), dtype = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file, f"its header lacks dtype, shape or offsets of {name}") from error
    numbers = (*shape, begin, end)
    # Bounded, so that their product is computed at once.
    if len(shape) > _MOST_DIMS or not all(type(n) is int and 0 <= n < _LARGEST for n in numbers):
        raise _damaged(file, f"its header has an invalid shape or offset for {name}")
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise _damaged(
            file,
            f"in its header {name} has the dtype {one_line(str(dtype), limit=40)!r}, which safetensors does"
            " not support",
        )
    return TensorHeader(name, dtype, shape, data + begin, data + end)


def _place(tensor: TensorHeader) -> tuple[int, int]:
    return tensor.begin, tensor.end


def _damaged(file: Path, why: str, *, fix: str = "copy or download it again") -> ModelError:
    return ModelError.of("a weight file is damaged", where=str(file), why=why, fix=fix)


def read_contents(file: Path, *, tensors: bool = False) -> WeightContents:
    """Reads a weight file once: its digest, and which of its tensors have NaN or infinite
    values.

    Reading in blocks that stay in the cache saves more than the search costs: 0.08 s for 135
    million bfloat16 weights in memory, 0.22 s for float32 (the digest alone takes 0.06 and 0.15 s
    of these).

    Args:
        file: a safetensors file.
        tensors: whether to digest each tensor, so that damage can be located later.

    Raises:
        ModelError: if its header is damaged.
        OSError: if it cannot be read.
    """
    header = read_safetensors_header(file)
    total = xxhash.xxh3_128()
    contents = WeightContents(0, "")
    with open_plain(file) as stream:
        total.update(stream.read(header[0].begin))
        for tensor in header:
            digest = xxhash.xxh3_64() if tensors else None
            _read_tensor(stream, tensor, total, digest, contents)
            if digest is not None:
                contents.tensors[tensor.name] = digest.hexdigest()
        contents.bytes = stream.tell()
    contents.digest = total.hexdigest()
    return contents


def _read_tensor(
    stream: IO[bytes],
    tensor: TensorHeader,
    total: xxhash.xxh3_128,
    digest: xxhash.xxh3_64 | None,
    contents: WeightContents,
) -> None:
    left = tensor.end - tensor.begin
    while left and (block := stream.read(min(_BLOCK_BYTES, left))):
        total.update(block)
        if digest is not None:
            digest.update(block)
        if tensor.name not in contents.odd and (odd := _odd(block, tensor.dtype)):
            contents.odd[tensor.name] = odd
        left -= len(block)


def _odd(block: bytes, dtype: str) -> str:
    """`NaN` or `infinity` if a block of complete items has such a value; else an empty string."""
    if dtype not in _EXPONENTS:
        return ""
    import numpy as np  # lazy: the task that digests files for the agreement starts without it

    unsigned, exponent, mantissa = _EXPONENTS[dtype]
    items = np.frombuffer(block, dtype=unsigned)
    bits = items & items.dtype.type(exponent)
    if bits.max() != exponent:
        return ""
    return "NaN" if (items[bits == exponent] & items.dtype.type(mantissa)).any() else "infinity"


def odd_weights(odd: dict[Path, dict[str, str]]) -> ModelError:
    """The error for weight files with NaN or infinite values."""
    problems = [
        Problem(
            f"{name} contains {what}",
            str(file),
            "such a weight makes every loss NaN and every answer meaningless",
            "copy or download the weights again; if they come from a training run, use an earlier checkpoint"
            " of it",
        )
        for file, tensors in odd.items()
        for name, what in tensors.items()
    ]
    more = len(problems) - _SHOWN
    if more > 0:
        problems = [*problems[:_SHOWN], Problem(f"{more} more tensors have NaN or infinite values")]
    return ModelError(*problems)

"""What a model's files say, read without torch: parameters, shapes, sizes. Refuses files that are missing or torn."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from unisono.config.schema import RunConfig
from unisono.errors import ModelError
from unisono.files import read_bytes
from unisono.model.files import (
    odd_weights,
    read_contents,
    read_json_object,
    read_safetensors_header,
    weight_files,
)
from unisono.model.locate import locate_model
from unisono.plan.run_plan import ModelFacts
from unisono.text import one_line

Vouch = Callable[[Path, dict[str, tuple[int, str]]], None]
"""Is given a model's directory, and size and XXH3-128 of its files by their names; raises if they are not what they should be."""


def inspect_model(config: RunConfig, *, vouch: Vouch = lambda _directory, _digests: None) -> ModelFacts:
    """The figures of the config's model; downloads it first if it is a hub id. Reads its weights once.

    Args:
        config: of the run.
        vouch: called when all files are read, before numbers that are none are refused: damage makes such numbers.

    Raises:
        ModelError: if files are missing, torn, or do not belong together, or weights are NaN or infinite.
    """
    directory = locate_model(config.model.path, config.model.revision)
    settings = read_model_config(directory)
    text = settings.get("text_config", settings)
    if not isinstance(text, dict):
        raise ModelError.of(
            "text_config in config.json is no JSON object",
            where=str(directory / "config.json"),
            fix="copy it again",
        )
    if config.model.weights == "random":
        return _facts_from_config(directory, settings, text)
    files = weight_files(directory)
    headers = [header for file in files for header in read_safetensors_header(file)]
    contents = {file: read_contents(file) for file in files}
    digests = {"config.json": _digest_file(directory / "config.json")} | {
        file.name: (found.bytes, found.digest) for file, found in contents.items()
    }
    vouch(directory, digests)
    odd = {file: found.odd for file, found in contents.items() if found.odd}
    if odd:
        raise odd_weights(odd)
    matrices = [h.shape for h in headers if len(h.shape) == 2 and not is_embedding(h.name)]
    return ModelFacts(
        directory=str(directory),
        model_type=str(settings.get("model_type", "unknown")),
        parameters=sum(_count(h.shape) for h in headers),
        hidden_size=_whole(text, "hidden_size", "n_embd", "d_model"),
        layers=_whole(text, "num_hidden_layers", "n_layer", "num_layers"),
        intermediate_size=_whole(
            text, "intermediate_size", "n_inner", default=4 * _whole(text, "hidden_size", "n_embd", "d_model")
        ),
        vocab_size=_whole(text, "vocab_size"),
        linear_parameters=sum(_count(shape) for shape in matrices),
        linear_in_out=sum(sum(shape) for shape in matrices),
        weight_bytes=sum(file.stat().st_size for file in files),
        digest=_digest(digests),
    )


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json as a mapping.

    Raises:
        ModelError: if it is missing or no JSON object, or does not say the model's type.
    """
    file = directory / "config.json"
    try:
        settings = read_json_object(file, fix="copy it again")
    except FileNotFoundError:
        raise ModelError.of(
            f"{directory} has no config.json", where=str(file), fix="give a model in the Hugging Face layout"
        ) from None
    kind = settings.get("model_type")
    if not isinstance(kind, str):
        raise ModelError.of(
            "config.json does not say its model_type" if kind is None else f"model_type in config.json is {kind!r}", where=str(file),
            why="it is the name of the code in transformers that the weights are for", fix="copy config.json of the model again",
        )  # fmt: skip
    return settings


def _facts_from_config(directory: Path, settings: dict[str, Any], text: dict[str, Any]) -> ModelFacts:
    """Figures of a model that has no weights yet, by the shape of a Llama block; the worker counts them exactly."""
    hidden = _whole(text, "hidden_size", "n_embd", "d_model")
    layers = _whole(text, "num_hidden_layers", "n_layer", "num_layers")
    intermediate = _whole(text, "intermediate_size", "n_inner", default=4 * hidden)
    vocab = _whole(text, "vocab_size")
    heads = _whole(text, "num_attention_heads", "n_head", default=1)
    kv = hidden // heads * _whole(text, "num_key_value_heads", default=heads)
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate
    in_out = 4 * hidden + 2 * (hidden + kv) + 3 * (hidden + intermediate)
    embeddings = vocab * hidden * (1 if text.get("tie_word_embeddings", True) else 2)
    parameters = layers * (block + 2 * hidden) + embeddings + hidden
    return ModelFacts(
        directory=str(directory), model_type=str(settings.get("model_type", "unknown")), parameters=parameters, hidden_size=hidden,
        layers=layers, intermediate_size=intermediate, vocab_size=vocab, linear_parameters=layers * block,
        linear_in_out=layers * in_out, weight_bytes=0, digest=_digest({"config.json": _digest_file(directory / "config.json")}),
    )  # fmt: skip


def _whole(settings: dict[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = settings.get(name)
        if isinstance(value, int) and value > 0:
            return value
    if default is not None:
        return default
    raise ModelError.of(
        f"config.json of the model has no whole number as its {names[0]}", where=names[0],
        why=_why_no_number(settings, names), fix="use a causal language model in the Hugging Face layout",
    )  # fmt: skip


def _why_no_number(settings: dict[str, Any], names: tuple[str, ...]) -> str:
    there = [name for name in names if name in settings]
    if there:
        return f"{there[0]} is {one_line(repr(settings[there[0]]), limit=60)}"
    return "this is no language model that we can read, or an unknown type"


def is_embedding(name: str) -> bool:
    """Whether a tensor of this name turns tokens into vectors, or back; adapters leave these alone."""
    return any(word in name for word in ("embed", "wte", "wpe", "lm_head"))


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def _digest(digests: dict[str, tuple[int, str]]) -> str:
    """A digest of the names and contents of files."""
    total = hashlib.sha256()
    for name, (_, digest) in digests.items():
        total.update(f"{name} {digest}\n".encode())
    return total.hexdigest()[:32]


def _digest_file(file: Path) -> tuple[int, str]:
    data = read_bytes(file)
    return len(data), xxhash.xxh3_128_hexdigest(data)

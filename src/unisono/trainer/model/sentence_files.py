"""The files with which sentence-transformers loads an embedding model: modules.json, and the
settings of its modules.

Without torch. The names are those that its versions from 2 to 6 read.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.base.errors import ModelError
from unisono.base.files import objects_of, read_json, read_object, write_json
from unisono.trainer.config.heads import EmbedSection

MODULES = "modules.json"
_POOLING, _NORMALIZE = "1_Pooling", "2_Normalize"
_KINDS = ["Transformer", "Pooling", "Normalize"]
_MODES: Mapping[str, Literal["last", "mean"]] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
}
_FILES = (
    MODULES,
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    f"{_POOLING}/config.json",
)


def write_sentence_files(
    directory: Path, section: EmbedSection, *, hidden_size: int, max_length: int
) -> None:
    """Writes them beside a model or an adapter.

    Args:
        directory: of the model or adapter.
        section: of the config.
        hidden_size: of an embedding.
        max_length: most tokens of a text, which is cut there.

    Raises:
        OSError: if the storage fails.
    """
    kinds = {"": "Transformer", _POOLING: "Pooling"} | (
        {_NORMALIZE: "Normalize"} if section.normalize else {}
    )
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    for path in kinds:
        (directory / path).mkdir(exist_ok=True)
    write_json(directory / MODULES, modules)
    pooling = {
        "word_embedding_dimension": hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": section.pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_lasttoken": section.pooling == "last",
        "include_prompt": True,
    }
    write_json(directory / _POOLING / "config.json", pooling)
    write_json(
        directory / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
    )
    settings = {
        "prompts": {"query": section.query_prefix, "document": section.document_prefix},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine" if section.normalize else "dot",
    }
    write_json(directory / "config_sentence_transformers.json", settings)


def is_embedding_model(directory: Path) -> bool:
    """Whether a directory has such files."""
    return (directory / MODULES).is_file()


@dataclass(frozen=True)
class SentenceSettings:
    """How an embedding model is used.

    Attributes:
        section: pooling, normalization and prefixes.
        max_length: most tokens of a text.
    """

    section: EmbedSection
    max_length: int


def read_sentence_files(directory: Path) -> SentenceSettings:
    """The settings in a directory.

    Raises:
        ModelError: if a file is missing or damaged, or the model has other modules than these.
    """
    try:
        modules = objects_of(read_json(directory / MODULES))
    except (OSError, ValueError):
        modules = []
    kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
    pooling = read_object(directory / _POOLING / "config.json")
    modes = [
        name.removeprefix("pooling_mode_") for name in pooling if pooling[name] is True and "_mode" in name
    ]
    mode = str(pooling.get("pooling_mode", ",".join(modes)))  # one key since version 6
    if kinds not in (_KINDS[:2], _KINDS) or mode not in _MODES:
        raise ModelError.of(
            f"the embedding model has the modules {', '.join(kinds)}, and the pooling {mode}",
            where=str(directory / MODULES),
            why="embeddings are computed from the last token or the mean, with or without normalization",
            fix="load it with sentence_transformers.SentenceTransformer",
        )
    prompts = read_object(directory / "config_sentence_transformers.json").get("prompts")
    prompts = prompts if isinstance(prompts, dict) else {}
    length = read_object(directory / "sentence_bert_config.json").get("max_seq_length")
    section = EmbedSection(
        pooling=_MODES[mode],
        normalize=len(kinds) == len(_KINDS),
        query_prefix=str(prompts.get("query") or ""),
        document_prefix=str(prompts.get("document") or ""),
    )
    return SentenceSettings(section, length if isinstance(length, int) else 1 << 31)


def copy_sentence_files(source: Path, directory: Path) -> None:
    """Copies them to another directory, if there are any.

    Raises:
        OSError: if the storage fails.
    """
    if not is_embedding_model(source):
        return
    for name in _FILES:
        if (source / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, directory / name)
    if (source / _NORMALIZE).is_dir():
        (directory / _NORMALIZE).mkdir(exist_ok=True)

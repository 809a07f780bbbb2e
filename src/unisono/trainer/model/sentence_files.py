"""The files with which sentence-transformers loads an embedding model: modules.json, and the
settings of its modules.

Without torch. The names are those that its versions from 2 to 6 read.
"""

import shutil
from pathlib import Path

from unisono.base.files import write_json
from unisono.trainer.config.heads import EmbedSection

MODULES = "modules.json"
_POOLING, _NORMALIZE = "1_Pooling", "2_Normalize"
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

"""Finds the directory of a model or tokenizer (a path, `builtin:NAME`, a hub id), and reads without
torch what the model is.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import xxhash

from unisono.base.errors import ModelError
from unisono.base.files import path_below, read_bytes
from unisono.base.text import library_words, nearest, one_line
from unisono.guard.facts import read_environment
from unisono.guard.facts.environment import check_hub_answers, hub_silence, read_hub
from unisono.trainer.config.heads import REWARD, SequenceHead
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.file_settings import (
    ADAPTER_FILE,
    Quantization,
    dense_headers,
    find_adapters,
    quantization_of,
    refuse_training,
    stored_shapes,
)
from unisono.trainer.model.files import (
    ConfigJson,
    TensorHeader,
    WeightContents,
    check_directory,
    check_tokenizer_files,
    odd_weights,
    read_contents,
    read_json_object,
    read_safetensors_header,
    weight_files,
)
from unisono.trainer.plan.run_plan import ModelFacts

SCORE = "score"
"""The name that transformers gives the head of a decoder that classifies sequences."""
_BUILTIN = "builtin:"
_SHOWN_LABELS = 8
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""A tokenizer has at least one of these files."""
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MOST_LAYERS = 10_000  # no model has a thousand; each costs milliseconds before the first weight is read
_LARGEST = 2**31
_PACKED = ("U8", "I8", "I32")
_TIMES_HELD = 4  # a config may ask for this many times the weights in the files, as layers may share theirs
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")


def locate_model(path: str, revision: str | None = None, *, key: str = "model.path") -> Path:
    """The directory with the model's files; of a run with full fine-tuning, that of its result.

    `key` is where the config names it.

    Raises:
        ModelError: if there is no such directory or built-in model, or the hub does not provide it.
    """
    if path.startswith(_BUILTIN):
        return _builtin(path)
    directory = Path(path).expanduser()
    if (directory / "plan.json").is_file() and (directory / "model" / "config.json").is_file():
        directory /= "model"
    if directory.is_dir():
        check_directory(directory)
        if not (directory / "config.json").is_file() and not (directory / "adapter_config.json").is_file():
            raise ModelError.of(
                f"{path} is not a model directory",
                where=str(directory),
                why="there is no config.json in it",
                fix="pass the directory with config.json, the weights and the tokenizer",
            )
        return directory.resolve()
    if _is_path(path):
        raise ModelError.of(
            f"there is no model directory {path}",
            where=key,
            fix="check the path; relative paths start at the working directory",
        )
    return from_hub(path, revision, key=key)


def locate_tokenizer(config: RunConfig) -> Path:
    """The directory with the tokenizer's files: the model's own unless `model.tokenizer` is set.

    Raises:
        ModelError: as locate_model, or if the directory has no tokenizer, or a file of it cannot be
            read.
    """
    named = config.model.tokenizer
    directory = _tokenizer_directory(named) if named else _own_tokenizer(config)
    if not any((directory / name).is_file() for name in _TOKENIZER):
        raise ModelError.of(
            f"{directory} has no tokenizer",
            where="model.tokenizer" if named else "model.path",
            why=f"none of {', '.join(_TOKENIZER)} is in it",
            fix="set model.tokenizer to the directory or hub id of a tokenizer",
        )
    check_tokenizer_files(directory)
    return directory


def _own_tokenizer(config: RunConfig) -> Path:
    """The model's directory; one without a model is enough to show rows."""
    directory = Path(config.model.path).expanduser()
    if not (directory / "config.json").is_file() and any((directory / n).is_file() for n in _TOKENIZER):
        return directory.resolve()
    return locate_model(config.model.path, config.model.revision)


def _tokenizer_directory(named: str) -> Path:
    directory = Path(named).expanduser()
    return directory.resolve() if directory.is_dir() else locate_model(named)


def _builtin(path: str) -> Path:
    name = path.removeprefix(_BUILTIN)
    root = resources.files("unisono") / "builtin"
    with resources.as_file(root) as folder:
        known = (
            sorted(entry.name for entry in folder.iterdir() if (entry / "config.json").is_file())
            if folder.is_dir()
            else []
        )
        if name in known:
            return folder / name
    near = nearest(name, known)
    raise ModelError.of(
        f"there is no built-in model {name!r}",
        where="model.path",
        fix=(
            f"did you mean builtin:{near}?"
            if near
            else f"one of {', '.join(_BUILTIN + entry for entry in known)}"
        ),
    )


def is_hub_id(path: str) -> bool:
    """Whether a model's or tokenizer's name is a hub id: there is no such directory, and it does
    not have the form of a path.
    """
    return not (path.startswith(_BUILTIN) or Path(path).expanduser().is_dir() or _is_path(path))


def _is_path(path: str) -> bool:
    """Whether it can only be a path: a hub id is NAME or OWNER/NAME of letters, digits, `-`, `_`
    and `.`.
    """
    parts = path.split("/")
    return len(parts) > 2 or path.startswith((".", "/", "~")) or not all(parts)


def from_hub(path: str, revision: str | None, *, key: str, patterns: Sequence[str] = _DOWNLOADED) -> Path:
    """The directory of a hub id in the hub's cache, with the files of these patterns, downloaded if
    they are not there.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    folder = read_environment().hub_cache
    hub = read_hub(folder)
    silence = hub_silence(hub)
    check_hub_answers()
    fix = "set it to a branch, tag or commit of the model"
    try:
        path_below(folder, revision or "main")
    except ValueError as error:
        raise ModelError.of(
            f"{path} has no revision {revision!r}", where="model.revision", why=str(error), fix=fix
        ) from None
    try:
        return Path(
            snapshot_download(
                path, revision=revision, allow_patterns=list(patterns), local_files_only=bool(silence)
            )
        )
    except GatedRepoError as error:
        raise ModelError.of(
            f"access to {path} is restricted",
            where=key,
            why="the model is gated",
            fix="accept its terms on its page of the hub, and set HF_TOKEN in the environment",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError.of(
            f"{path} has no revision {revision!r}", where="model.revision", fix=fix
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError.of(
            f"{path} is neither a directory on this machine nor a visible model at {hub.endpoint}",
            where=key,
            why="it does not exist there, or it is private" + ("" if hub.token else ", and no token is set"),
            fix="check the spelling; for a private one set HF_TOKEN; for a directory write ./NAME",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError.of(
            f"{path} is neither a directory on this machine nor available from the hub",
            where=key,
            why=f"it is not in {folder}, and {silence or error}",
            fix=(
                f"unset {hub.offline}, or copy the hub's cache from a machine that has it"
                if hub.offline
                else (
                    "check the spelling and the network (a proxy is named by HTTPS_PROXY, a mirror by"
                    " HF_ENDPOINT); for a directory write ./NAME"
                )
            ),
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError.of(
            f"{path} is neither a directory on this machine nor available from the hub",
            where=key,
            why=library_words(error, library="huggingface_hub"),
            fix="check the spelling and the network; for a directory write ./NAME",
        ) from error


VerifyFiles = Callable[[Path, dict[str, tuple[int, str]]], None]
"""Called with a model's directory, and size and XXH3-128 of its files by name; raises if they are
not as expected.
"""


def inspect_model(
    config: RunConfig, *, verify_files: VerifyFiles = lambda _directory, _digests: None
) -> ModelFacts:
    """The figures of the config's model; downloads it first if it is a hub id.

    Reads its weights once.

    Args:
        config: of the run.
        verify_files: called after all files are read, before NaN and infinite weights are refused:
            damage can cause such values.

    Raises:
        ModelError: if files are missing, damaged, or do not belong together, or weights are NaN or
            infinite.
    """
    directory = locate_model(config.model.path, config.model.revision)
    settings = read_model_config(directory)
    _refuse_other_model(config, directory, settings)
    text = _with_layers(directory, settings.get("text_config", settings))
    quantized = quantization_of(config.model, directory, settings)
    refuse_training(config, directory, quantized)
    multimodal = multimodal_class(settings) is not None
    if multimodal:
        _refuse_multimodal(config, directory, quantized)
    if config.model.weights == "random":
        return _facts_from_config(directory, settings, text, quantized)
    files = weight_files(directory)
    headers = [header for file in files for header in read_safetensors_header(file)]
    others = 0
    if multimodal:
        others = sum(_count(header.shape) for header in headers)
        table = _token_table(text, headers)
        headers = _of_language_model(table, headers)
        others -= sum(_count(header.shape) for header in headers)
        text = {**_least_config(table, headers), **text}
    refuse_larger_config(directory, text, headers)
    if config.trains_head:  # the head of a language model is not loaded
        headers = [header for header in headers if header.name != "lm_head.weight"]
    contents = {file: read_contents(file) for file in files}
    digests = {"config.json": _digest_file(directory / "config.json")} | {
        file.name: (content.bytes, content.digest) for file, content in contents.items()
    }
    verify_files(directory, digests)
    if config.adapter is not None:
        contents |= _read_adapters(config, digests, verify_files)
    if config.preference.reference != "auto":
        contents |= _read_reference(config.preference.reference, text, digests, verify_files)
    odd = {file: content.odd for file, content in contents.items() if content.odd}
    if odd:
        raise odd_weights(odd)
    known = _quantized_facts(quantized)
    if quantized is not None and quantized.layout:
        shapes = stored_shapes(quantized, headers, str(directory))
        headers = dense_headers(headers, shapes)
        weights = sum(shape.outs * shape.ins for shape in shapes.values())
        known["linear_parameters"] = weights  # others, e.g. routers, are dense
        known["quantized_bits"] = sum(s.outs * s.ins * s.bits for s in shapes.values()) / weights
        known["quantized_bytes"] = sum(shape.bytes for shape in shapes.values()) / weights
    elif quantized is not None and quantized.stored:  # the shapes in its files are those of packed values
        facts = _facts_from_config(directory, settings, text, quantized)
        size = sum(file.stat().st_size for file in files)
        return facts.model_copy(update={"weight_bytes": size, "digest": _digest(digests)})
    matrices = [h.shape for h in headers if is_matrix(h)]
    return ModelFacts(
        directory=str(directory),
        model_type=str(settings.get("model_type", "unknown")),
        parameters=sum(_count(h.shape) for h in headers),
        hidden_size=_positive_int(text, *_HIDDEN),
        layers=_positive_int(text, *_LAYERS),
        intermediate_size=_positive_int(
            text, "intermediate_size", "n_inner", default=4 * _positive_int(text, *_HIDDEN)
        ),
        vocab_size=_positive_int(text, "vocab_size"),
        linear_parameters=sum(_count(shape) for shape in matrices),
        linear_in_out=sum(in_out(shape) for shape in matrices),
        other_parameters=others,
        weight_bytes=sum(file.stat().st_size for file in files),
        digest=_digest(digests),
        positions=_positions(text),
        has_plain_mlps=_has_plain_mlps(text, [header.name for header in headers]),
        norms_heads=any(".q_norm." in header.name for header in headers),
        ties_head=not config.trains_head and _ties_head(settings, text, headers),
    ).model_copy(update=known)


def _refuse_other_model(config: RunConfig, directory: Path, settings: ConfigJson) -> None:
    """Refuses a model for another task; the labels of a classifier are not known yet."""
    refuse_other_task(directory, settings, has_head=config.trains_head)
    if config.objective == REWARD:
        refuse_other_head(directory, settings, SequenceHead())


def _with_layers(directory: Path, text: ConfigJson) -> ConfigJson:
    """The part of config.json with a number of layers: that of transformers' class of the model
    type where it is stored otherwise, e.g. as a list of the layers' kinds.
    """
    if any(name in text for name in _LAYERS):
        return text
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    with contextlib.suppress(
        OSError, ValueError, LookupError, TypeError, AttributeError, StrictDataclassError
    ):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        return {**text, _LAYERS[0]: config.get_text_config(decoder=True).num_hidden_layers}
    return text


def _has_plain_mlps(text: ConfigJson, names: list[str]) -> bool:
    """Whether each layer has an MLP with gate and up, SiLU and no bias, by config.json and the
    names of the weights.
    """
    gates = sum(name.endswith((".mlp.gate_proj.weight", ".mlp.gate_proj.qweight")) for name in names)
    layers = _positive_int(text, *_LAYERS)
    return gates == layers and _is_silu(text) and not any(name.endswith(".gate_proj.bias") for name in names)


def _ties_head(settings: ConfigJson, text: ConfigJson, headers: list[TensorHeader]) -> bool:
    """Whether embedding and head share one matrix; what config.json leaves open depends on the
    model type, but files have no such head.
    """
    for part in (text, settings):
        if isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return not any(header.name.endswith(("lm_head.weight", "embed_out.weight")) for header in headers)


def _is_silu(text: ConfigJson) -> bool:
    return text.get("hidden_act", "silu") in ("silu", "swish")


def _quantized_facts(quantized: Quantization | None) -> dict[str, object]:
    if quantized is None:
        return {}
    return {
        "quantized": quantized.kind,
        "quantized_double": quantized.double,
        "quantized_embeddings": quantized.embeddings,
    }


def _read_adapters(
    config: RunConfig, digests: dict[str, tuple[int, str]], verify_files: VerifyFiles
) -> dict[Path, WeightContents]:
    """Reads the adapters that the config names, and adds their digests by config key."""
    by_file: dict[Path, WeightContents] = {}
    assert config.adapter is not None
    for adapter in find_adapters(config.adapter, has_head=config.trains_head):
        file = adapter.directory / ADAPTER_FILE
        by_file[file] = contents = read_contents(file)
        verify_files(adapter.directory, {ADAPTER_FILE: (contents.bytes, contents.digest)})
        what = f"{contents.digest} {adapter.kind} {adapter.rank} {adapter.scaling!r}"
        digests[f"{adapter.key} {ADAPTER_FILE}"] = (contents.bytes, what)
    return by_file


def _read_reference(
    named: str, text: ConfigJson, digests: dict[str, tuple[int, str]], verify_files: VerifyFiles
) -> dict[Path, WeightContents]:
    """Reads the weights of the reference of preference objectives, and adds their digests by config
    key.

    Raises:
        ModelError: if it has a different vocabulary than the model, whose tokens it has to read.
    """
    directory = locate_model(named, key="preference.reference")
    settings = read_model_config(directory)
    size, model_size = settings.get("text_config", settings).get("vocab_size"), text.get("vocab_size")
    if size != model_size:
        raise ModelError.of(
            f"the reference has {size} tokens, but the model has {model_size}",
            where=f"preference.reference: {named}",
            why="both must read the same tokens",
            fix="use a model of the same family, or set preference.reference: auto",
        )
    by_file = {file: read_contents(file) for file in weight_files(directory)}
    own_digests = {file.name: (contents.bytes, contents.digest) for file, contents in by_file.items()}
    own_digests["config.json"] = _digest_file(directory / "config.json")
    verify_files(directory, own_digests)
    digests |= {f"preference.reference {name}": value for name, value in own_digests.items()}
    return by_file


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json as a mapping.

    Raises:
        ModelError: if it is missing or is not a JSON object, or has no model type or impossible
            sizes.
    """
    file = directory / "config.json"
    try:
        settings = read_json_object(file, fix="copy it again")
    except FileNotFoundError:
        raise ModelError.of(
            f"{directory} has no config.json", where=str(file), fix="use a model in the Hugging Face layout"
        ) from None
    kind = settings.get("model_type")
    if not isinstance(kind, str):
        raise ModelError.of(
            "config.json has no model_type" if kind is None else f"model_type in config.json is {kind!r}",
            where=str(file),
            why="it selects the model's code in transformers",
            fix="copy config.json of the model again",
        )
    text = settings.get("text_config", {})
    if not isinstance(text, dict):
        raise ModelError.of(
            "text_config in config.json is not a JSON object", where=str(file), fix="copy it again"
        )
    for part in (settings, text):
        _refuse_odd_numbers(file, part)
    return settings


def _refuse_odd_numbers(file: Path, settings: ConfigJson) -> None:
    """Refuses sizes that no model has; some model types have a list of sizes, one for each
    layer.
    """
    for name in (*_HIDDEN, *_LAYERS, "num_attention_heads", "n_head", "vocab_size"):
        value, most = settings.get(name), _MOST_LAYERS if name in _LAYERS else _LARGEST
        if (
            value is not None
            and not isinstance(value, list)
            and not (type(value) is int and 0 < value < most)
        ):
            raise ModelError.of(
                f"{name} in config.json of the model must be a number from 1 to {most:,}",
                where=str(file),
                why=f"{name} is {one_line(repr(value), limit=60)}",
                fix="copy config.json of the model again",
            )


def refuse_larger_config(directory: Path, text: ConfigJson, headers: Sequence[TensorHeader]) -> None:
    """Refuses a config.json for a far larger model than the files hold: the rest would be
    allocated, and drawn at random.

    Args:
        directory: of the model.
        text: the part of its config.json that describes the language model.
        headers: of all its weights.

    Raises:
        ModelError: with the numbers.
    """
    hidden, layers = _positive_int(text, *_HIDDEN, default=1), _positive_int(text, *_LAYERS, default=1)
    inner, vocab, head = (
        _positive_int(text, name, default=1) for name in ("intermediate_size", "vocab_size", "head_dim")
    )
    heads = _positive_int(text, "num_attention_heads", "n_head", default=1)
    least = vocab * hidden + layers * hidden * max(hidden, inner, head * heads)
    # Packed integers hold up to four weights in a byte.
    held = sum(4 * (h.end - h.begin) if h.dtype in _PACKED else _count(h.shape) for h in headers)
    if least > _TIMES_HELD * held or layers > len(headers):
        raise ModelError.of(
            f"config.json belongs to a larger model: {layers:,} layers and at least {least:,} parameters",
            where=str(directory / "config.json"),
            why=f"the weight files have {len(headers):,} tensors, with at most {held:,} parameters",
            fix="use config.json and weights of the same model",
        )


def is_classifier(settings: ConfigJson) -> bool:
    """Whether config.json is that of a sequence classification model, as reward models are."""
    return any(name.endswith("ForSequenceClassification") for name in _architectures(settings))


def _architectures(settings: ConfigJson) -> list[str]:
    names = settings.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def refuse_other_task(directory: Path, settings: ConfigJson, *, has_head: bool) -> bool:
    """Whether the model in a directory is a reward model or another classifier already, with its
    head.

    Args:
        directory: of the model.
        settings: its config.json.
        has_head: whether it has to be one, or to become one.

    Raises:
        ModelError: if it is a classifier, and a language model is wanted; or if it cannot be a
            classifier.
    """
    where, classifies = str(directory / "config.json"), is_classifier(settings)
    if not has_head:
        if classifies:
            raise ModelError.of(
                f"{directory} is a reward model, or another classifier, not a language model",
                where=where,
                why=f"architectures is {', '.join(_architectures(settings))}",
                fix="use a language model, or set objective: reward or classify to train it further",
            )
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    name = "AutoModelForSequenceClassification"
    known = settings["model_type"] in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    own_code = settings.get("auto_map")
    if not known and not (isinstance(own_code, dict) and name in own_code):
        raise no_classifier(directory, str(settings["model_type"]), f"it has no {name} in transformers")
    return classifies


def refuse_other_head(directory: Path, settings: ConfigJson, head: SequenceHead) -> None:
    """Refuses a classifier whose head is not the one that is trained; a language model gets a new
    one.

    Args:
        directory: of the model.
        settings: its config.json.
        head: that is trained.

    Raises:
        ModelError: with the labels of both.
    """
    stored = stored_head(settings)
    if not is_classifier(settings) or (stored.outputs == head.outputs == 1):
        return
    where = str(directory / "config.json")
    if not head.labels:
        raise ModelError.of(
            f"the classifier in {directory} has {stored.outputs} labels",
            where=where,
            why="a reward is one value",
            fix="use a language model, or a classifier with one label",
        )
    if stored.labels != head.labels:
        raise ModelError.of(
            f"the classifier in {directory} has different labels than the rows",
            where=where,
            why=f"it has {_named(stored)}, and the rows have {_named(head)}",
            fix="set classify.labels to its labels in their order, or use a language model, which gets a new head",
        )


def _named(head: SequenceHead) -> str:
    names = [one_line(name, limit=40) for name in head.labels[:_SHOWN_LABELS]]
    more = f" and {len(head.labels) - len(names)} more" if len(head.labels) > len(names) else ""
    return ", ".join(names) + more if names else "one value without a label"


def stored_head(settings: ConfigJson) -> SequenceHead:
    """The head of a classifier by its config.json."""
    names, default = settings.get("id2label"), settings.get("num_labels")
    by_number = names if isinstance(names, dict) else {}
    outputs = len(by_number) or (default if isinstance(default, int) else 2)  # transformers' default
    if outputs == 1:
        return SequenceHead()
    labels = (str(by_number.get(str(number), f"LABEL_{number}")) for number in range(outputs))
    return SequenceHead(tuple(labels), settings.get("problem_type") == "multi_label_classification")


def adapter_head(directory: Path) -> SequenceHead:
    """The head of a classifier's adapter: by the config.json beside it, else by its own tensor."""
    if (directory / "config.json").is_file():
        return stored_head(read_model_config(directory))
    headers = read_safetensors_header(directory / ADAPTER_FILE)
    heads = [
        header.shape[0] for header in headers if header.name.endswith(f".{SCORE}.weight") and header.shape
    ]
    return stored_head({"num_labels": heads[0] if heads else 1})


def multimodal_class(settings: ConfigJson) -> str | None:
    """The class of a checkpoint with vision or audio parts beside its text model, by its
    config.json; None for others.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    name = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(str(settings["model_type"]))
    return name if "text_config" in settings and name in _architectures(settings) else None


def picture_processor(directory: Path) -> Path | None:
    """The directory of a model if it reads pictures: it has a vision part and a processor; else
    None.
    """
    settings = read_model_config(directory)
    names = ("processor_config.json", "preprocessor_config.json")
    has_files = any((directory / name).is_file() for name in names)
    return directory if has_files and multimodal_class(settings) is not None else None


def _refuse_multimodal(config: RunConfig, directory: Path, quantized: Quantization | None) -> None:
    """Refuses what is not done with a multimodal checkpoint.

    Raises:
        ModelError: with the key.
    """
    stored = quantized is not None and quantized.stored
    refusals = {
        f"objective: {config.objective}": (config.trains_head, "train a language model of text instead"),
        "model.weights: random": (config.model.weights == "random", "set model.weights: pretrained"),
        str(directory / "config.json"): (stored, "use the original files, which are not quantized"),
    }
    for where, (is_set, fix) in refusals.items():
        if is_set:
            raise ModelError.of(
                f"{directory} is a multimodal checkpoint",
                where=where,
                why="its vision and audio parts could not be kept in the result",
                fix=fix,
            )


def _token_table(text: ConfigJson, headers: list[TensorHeader]) -> TensorHeader | None:
    """The embedding of tokens among the tensors of a multimodal checkpoint: the largest with a row
    for each token, if config.json has their number.
    """
    tables = [h for h in headers if is_embedding(h.name) and len(h.shape) == 2 and "lm_head" not in h.name]
    fitting = [header for header in tables if header.shape[0] == text.get("vocab_size")]
    return max(fitting or tables, key=lambda header: _count(header.shape), default=None)


def _of_language_model(table: TensorHeader | None, headers: list[TensorHeader]) -> list[TensorHeader]:
    """The tensors of a multimodal checkpoint's language model: those beside its embedding, and the
    head.
    """
    prefix = ".".join([*table.name.split(".")[:-2], ""]) if table is not None else ""
    return [header for header in headers if header.name.startswith(prefix) or "lm_head" in header.name]


def _least_config(table: TensorHeader | None, headers: list[TensorHeader]) -> dict[str, object]:
    """What the config.json of a multimodal checkpoint may lack of its language model, by the shapes
    of its tensors.
    """
    layers = {match[1] for header in headers if (match := re.search(r"\.layers\.(\d+)\.", header.name))}
    sizes = dict(zip(("vocab_size", "hidden_size"), table.shape, strict=True)) if table is not None else {}
    return {**sizes, "num_hidden_layers": len(layers)}


def no_classifier(directory: Path, kind: str, why: str) -> ModelError:
    """The error for a model that cannot become a reward model or another classifier."""
    return ModelError.of(
        f"a model of type {kind} cannot become a reward model or classifier",
        where=str(directory / "config.json"),
        why=why,
        fix="use a decoder of another family, e.g. Llama or Qwen",
    )


def _facts_from_config(
    directory: Path,
    settings: ConfigJson,
    text: ConfigJson,
    quantized: Quantization | None,
) -> ModelFacts:
    """Estimated figures of a model whose weights are not read; the worker counts them exactly."""
    facts = facts_of_shape(text, model_type=str(settings.get("model_type", "unknown")))
    digest = _digest({"config.json": _digest_file(directory / "config.json")})
    known: dict[str, object] = {"directory": str(directory), "digest": digest, **_quantized_facts(quantized)}
    if quantized is not None and quantized.layout:
        size = (quantized.block[0] or 1) * (quantized.block[1] or facts.hidden_size)
        known |= {"quantized_bits": quantized.bits, "quantized_bytes": quantized.bits / 8 + 3 / size}
    return facts.model_copy(update=known)


def facts_of_shape(settings: ConfigJson, *, model_type: str = "llama") -> ModelFacts:
    """The figures of a decoder by its config.json alone, if its blocks are those of Llama.

    Raises:
        ModelError: if a number is missing.
    """
    hidden, layers = _positive_int(settings, *_HIDDEN), _positive_int(settings, *_LAYERS)
    intermediate = _positive_int(settings, "intermediate_size", "n_inner", default=4 * hidden)
    vocab = _positive_int(settings, "vocab_size")
    heads = _positive_int(settings, "num_attention_heads", "n_head", default=1)
    head = _positive_int(settings, "head_dim", default=hidden // heads)
    q, kv = head * heads, head * _positive_int(settings, "num_key_value_heads", default=heads)
    block = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * intermediate
    in_out = 2 * (hidden + q) + 2 * (hidden + kv) + 3 * (hidden + intermediate)
    embeddings = vocab * hidden * (1 if settings.get("tie_word_embeddings", True) else 2)
    return ModelFacts(
        directory="",
        model_type=model_type,
        parameters=layers * (block + 2 * hidden) + embeddings + hidden,
        hidden_size=hidden,
        layers=layers,
        intermediate_size=intermediate,
        vocab_size=vocab,
        linear_parameters=layers * block,
        linear_in_out=layers * in_out,
        weight_bytes=0,
        digest="",
        positions=_positions(settings),
        has_plain_mlps=_is_silu(settings)
        and not settings.get("mlp_bias")
        and not any("expert" in name for name in settings),
        norms_heads=model_type.startswith("qwen3"),  # there are no weights to look at
    )


def _positive_int(settings: ConfigJson, *names: str, default: int | None = None) -> int:
    for name in names:
        value = settings.get(name)
        if isinstance(value, int) and value > 0:
            return value
    if default is not None:
        return default
    raise ModelError.of(
        f"{names[0]} in config.json of the model is not a positive integer",
        where=names[0],
        why=_why_no_number(settings, names),
        fix="use a causal language model in the Hugging Face layout",
    )


def _positions(text: ConfigJson) -> int:
    """The positions that RoPE is scaled from: the original ones if it is already scaled."""
    for value in (text.get("rope_parameters"), text.get("rope_scaling"), text):
        if isinstance(value, dict):
            name = "max_position_embeddings" if value is text else "original_max_position_embeddings"
            if isinstance(value.get(name), int):
                return int(value[name])
    return 0


def _why_no_number(settings: ConfigJson, names: tuple[str, ...]) -> str:
    there = [name for name in names if name in settings]
    if there:
        return f"{there[0]} is {one_line(repr(settings[there[0]]), limit=60)}"
    return "it is not a supported language model"


def is_embedding(name: str) -> bool:
    """Whether a tensor of this name is an embedding or a head; adapters do not change these."""
    return any(word in name for word in ("embed", "wte", "wpe", "lm_head"))


def is_matrix(header: TensorHeader) -> bool:
    """Whether an adapter may change a tensor: the matrix of a linear layer, or those of experts."""
    is_large = len(header.shape) in (2, 3) and min(header.shape) > 1
    return (
        is_large and not is_embedding(header.name) and not header.name.endswith("bias")
    )  # experts have many


def in_out(shape: tuple[int, ...]) -> int:
    """Sum of in and out over the matrices of a tensor (out, in) or (experts, out, in)."""
    return _count(shape[:-2]) * sum(shape[-2:])


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def _digest(digests: dict[str, tuple[int, str]]) -> str:
    """The digest of file names and contents."""
    total = hashlib.sha256()
    for name, (_, digest) in digests.items():
        total.update(f"{name} {digest}\n".encode())
    return total.hexdigest()[:32]


def _digest_file(file: Path) -> tuple[int, str]:
    data = read_bytes(file)
    return len(data), xxhash.xxh3_128_hexdigest(data)

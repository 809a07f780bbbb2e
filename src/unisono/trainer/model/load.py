"""Loads a model with transformers, adds peft's adapter, and selects the trained parameters."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor

from unisono.base.errors import ModelError, Problem
from unisono.base.text import library_words, nearest
from unisono.trainer.config.heads import EMBED, SequenceHead
from unisono.trainer.config.model_sections import LANGUAGE, TrainOnlySection
from unisono.trainer.config.named_templates import named_template
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.adapter import BaseChanges, add_adapter
from unisono.trainer.model.directory import (
    SCORE,
    multimodal_class,
    no_classifier,
    read_model_config,
    refuse_larger_config,
    refuse_other_head,
    refuse_other_task,
)
from unisono.trainer.model.file_settings import refuse_training
from unisono.trainer.model.files import (
    check_directory,
    check_tokenizer_files,
    read_json_object,
    read_safetensors_header,
    weight_files,
)
from unisono.trainer.model.layers import scale_rope
from unisono.trainer.model.multimodal import (
    auto_class,
    count_trained,
    freeze_parts,
    release_parts,
    select_parts,
)
from unisono.trainer.model.quantization import (
    QuantizedLoad,
    count_parameters,
    packed_weights,
    quantized_load,
    scales_of,
    set_products,
    without_heap,
)

LIBRARY_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RuntimeError,
    ImportError,
    ArithmeticError,
    StrictDataclassError,
    SafetensorError,
)
"""Exceptions that transformers, peft and tokenizers raise for invalid files."""
_SHOWN = 4

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class LoadedModel:
    """A model that is ready for training.

    Attributes:
        model: the model to call and save: a peft model, or the transformers model itself.
        base: the transformers model.
        tokenizer: of transformers; None if rows are not text.
        trainable: the trained parameters by name, in the model's order; all float32.
        parameters: number of parameters, tied ones counted once.
        base_changes: how frozen weights in memory differ from their files.
        quantized_digest: of quantized weights with their scales; empty without any, and until
            training sets it.
        of_pictures: names of the trained parameters that rows without pictures do not reach; empty
            unless weights are sharded.
    """

    model: torch.nn.Module
    base: Any
    tokenizer: Any
    trainable: dict[str, torch.nn.Parameter]
    parameters: int
    base_changes: BaseChanges = field(default_factory=dict)
    quantized_digest: str = ""
    of_pictures: tuple[str, ...] = ()

    def collect_trainable(self) -> None:
        """Collects the trained parameters again, after sharding has replaced them."""
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def count_parts(self) -> dict[str, list[int]]:
        """Trained and all parameters of each part of a vision-language model; empty for others, and
        without its vision part in memory.
        """
        return count_trained(self.model, self.base)

    @property
    def has_score(self) -> bool:
        """Whether it gives values of a row instead of logits for a token: transformers'
        sequence classification.
        """
        return isinstance(getattr(self.base, SCORE, None), torch.nn.Module)

    @property
    def trainable_parameters(self) -> int:
        """The number of trained values."""
        return sum(parameter.numel() for parameter in self.trainable.values())


def load_for_training(
    config: RunConfig,
    *,
    directory: Path,
    tokenizer_directory: Path,
    dtype: str,
    device: torch.device,
    head: SequenceHead | None = None,
    keeps_parts: bool = False,
) -> LoadedModel:
    """Loads the model with its adapter, and with the head of a reward model or classifier.

    Frozen weights are in `dtype`, trained ones in float32.

    With `keeps_parts` a multimodal model has the parts that rows of text do not need; they are
    frozen.

    The caller must seed torch's global generator: it draws the initial weights of an adapter or a
    random model.

    Raises:
        ModelError: if the files do not match each other, or the config does not match the model.
    """
    tokenizer = load_tokenizer(tokenizer_directory, trust_remote_code=config.model.trust_remote_code)
    named = named_template(config.data.template)
    if named is not None:
        named.adapt(tokenizer)
    full = config.adapter is None
    quantized = quantized_load(config, directory, dtype=dtype, device=device)
    refuse_training(config, directory, quantized.how if quantized else None)
    base = load_base(
        directory,
        dtype=torch.float32 if full else DTYPES[dtype],
        quantized=quantized,
        random=config.model.weights == "random",
        trust_remote_code=config.model.trust_remote_code,
        adjust=partial(_adjust, config),
        head=head,
        keeps_parts=keeps_parts,
    )
    grown = _fit_vocabulary(base, tokenizer, grow=config.model.resize_vocabulary)
    if head is not None or config.objective == EMBED:
        set_pad_token(base, tokenizer)
    base.config.use_cache = False
    base.to(device)
    model, changes = base, BaseChanges()
    parts = tuple(config.train_parts) if keeps_parts else LANGUAGE
    if config.adapter is not None:
        model, changes = add_adapter(
            base, config.adapter, seed=config.seed, grown=grown, head=SCORE if head else None, parts=parts
        )
    else:
        if keeps_parts:
            select_parts(base, parts)
        _freeze(base, config.freeze)
        if config.objective == EMBED:
            _freeze_unused_head(base)
        if config.train_only is not None:
            _train_only(base, config.train_only)
            if head is not None:
                getattr(base, SCORE).requires_grad_(True)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trainable.values():
        parameter.data = parameter.data.float()
    if not trainable:
        raise ModelError.of(
            "no parameter is left to train",
            where="freeze" if config.freeze else "train_only",
            why="its patterns match every parameter" if config.freeze else "it names no parameter",
            fix=(
                "use narrower patterns"
                if config.freeze
                else "set train_only.layers, or name modules in train_only.extra"
            ),
        )
    return LoadedModel(model, base, tokenizer, trainable, count_parameters(model), changes)


def _freeze_unused_head(base: Any) -> None:
    """Freezes the head of a model whose logits are not used, unless it shares the embedding's
    matrix.
    """
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        head.requires_grad_(False)


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a directory.

    Raises:
        ModelError: if its files cannot be read.
    """
    from transformers import AutoTokenizer

    check_tokenizer_files(directory)
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises a plain Exception for an invalid tokenizer.json
        if type(error) is not Exception and not isinstance(error, LIBRARY_ERRORS):
            raise
        raise ModelError.of(
            "the tokenizer cannot be loaded",
            where=str(directory),
            why=library_words(error),
            fix="copy tokenizer.json and tokenizer_config.json again, or set model.tokenizer",
        ) from error


def _adjust(config: RunConfig, settings: Any) -> None:
    if config.model.rope is not None:
        scale_rope(settings, config.model.rope, max_length=config.data.max_length)


def load_base(
    directory: Path,
    *,
    dtype: torch.dtype,
    random: bool = False,
    trust_remote_code: bool = False,
    adjust: Callable[[Any], None] = lambda _settings: None,
    head: SequenceHead | None = None,
    quantized: QuantizedLoad | None = None,
    keeps_parts: bool = False,
) -> Any:
    """The transformers model of a directory, with all weights found and of the right shape.

    A reward model or classifier made of a language model has a new head `score`, drawn from torch's
    global generator. A multimodal model lacks the parts that rows of text do not need.

    Args:
        directory: of the model.
        dtype: of the weights in memory.
        random: draw the weights instead of reading them.
        trust_remote_code: whether the model's own Python code may run.
        adjust: changes the model's config before the model is made from it.
        head: load sequence classification with this head instead of a causal language model.
        quantized: how its linear layers are quantized; the model is on that device then.
        keeps_parts: keep all parts of a multimodal model, frozen.

    Raises:
        ModelError: with the type, the file or the tensors that are wrong.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # the front shows the progress
    check_directory(directory)
    _refuse_unknown_type(directory, trust_remote_code=trust_remote_code)
    stored = read_model_config(directory)
    has_score = refuse_other_task(directory, stored, has_head=head is not None)
    if head is not None:
        refuse_other_head(directory, stored, head)
    if not random:  # refuses damaged files with unisono's messages instead of those of safetensors
        headers = [header for file in weight_files(directory) for header in read_safetensors_header(file)]
        refuse_larger_config(directory, stored.get("text_config", stored), headers)
    generation = directory / "generation_config.json"
    if generation.is_file():
        read_json_object(generation, fix="copy it again, or delete it: the model works without it")
    try:
        settings = AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
        adjust(settings)
        set_head(settings, head)
        auto = auto_class(stored, has_head=head is not None)
        if random:
            model = auto.from_config(settings, trust_remote_code=trust_remote_code)
            _check_head(directory, model, head)
            return model.to(dtype)
        loading = quantized.options(directory, settings) if quantized else {}
        with (
            _quiet() if head else contextlib.nullcontext(),  # the missing head is no news
            without_heap() if quantized else contextlib.nullcontext(),
        ):
            model, info = auto.from_pretrained(
                str(directory),
                config=settings,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # otherwise the error has neither tensor nor shapes; refused below
                **loading,
            )
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing about the files
        raise
    except LIBRARY_ERRORS as error:
        raise _load_error(directory, error) from error
    _check_head(directory, model, head)
    if head is not None and not has_score:
        info["missing_keys"] = set(info["missing_keys"]) - {f"{SCORE}.weight"}
    _refuse_gaps(directory, info)
    if head is None and multimodal_class(stored) is not None:
        freeze_parts(model) if keeps_parts else release_parts(model)
    if quantized is not None:
        set_products(model, quantized, where=str(directory))
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context without warnings of transformers."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def set_head(settings: Any, head: SequenceHead | None) -> None:
    """Describes a head in a model's config, of transformers."""
    for name, value in ({} if head is None else head.settings).items():
        setattr(settings, name, value)


def _check_head(directory: Path, model: Any, head: SequenceHead | None) -> None:
    """Refuses a classifier whose head is not one matrix, as that of encoders."""
    score: Any = getattr(model, SCORE, None)
    if head is not None and (type(score) is not torch.nn.Linear or score.bias is not None):
        why = f"the head of {type(model).__name__} is not one matrix `{SCORE}` for the last token"
        raise no_classifier(directory, model.config.model_type, why)


def set_pad_token(base: Any, tokenizer: Any) -> None:
    """Sets in model and tokenizer the token that fills up batches; transformers scores the last
    other token of each row.

    Raises:
        ModelError: if the tokenizer has no such token.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError.of(
                "the tokenizer has neither a padding nor an end-of-sequence token",
                where="model.tokenizer",
                why="transformers needs one to find the last token of a row",
                fix="set pad_token in tokenizer_config.json",
            )
        tokenizer.pad_token = tokenizer.eos_token
    # Not before the model is made: it would give the row of this token in the embedding no
    # gradient.
    base.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def odd_parameters(model: torch.nn.Module) -> list[str]:
    """Names of the parameters with NaN or infinite values; of sharded parameters this rank's part
    is checked.
    """
    odd = []
    packed = packed_weights(model)
    numbers = {name: p for name, p in model.named_parameters() if name not in packed}
    for name, parameter in {**numbers, **scales_of(model)}.items():
        values = parameter.detach()
        if isinstance(values, DTensor):
            values = values.to_local()
        if values.is_floating_point() and values.dtype.itemsize > 1 and values.numel():
            # Both are NaN if any value is; it needs no mask of the tensor's size.
            low, high = torch.aminmax(values)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                odd.append(name)
    return odd


def outline_base(directory: Path, *, trust_remote_code: bool, head: SequenceHead | None) -> Any:
    """The transformers model of a directory on the meta device: its modules and shapes, without
    weights.

    Raises:
        ModelError: if transformers does not make a model of its config.json.
    """
    from transformers import AutoConfig

    _refuse_unknown_type(directory, trust_remote_code=trust_remote_code)
    auto = auto_class(read_model_config(directory), has_head=head is not None)
    try:
        settings = AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
        set_head(settings, head)
        with torch.device("meta"):
            return auto.from_config(settings, trust_remote_code=trust_remote_code)
    except LIBRARY_ERRORS as error:
        raise _load_error(directory, error) from error


def _refuse_unknown_type(directory: Path, *, trust_remote_code: bool) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    settings = read_model_config(directory)
    kind = settings.get("model_type")
    if kind in CONFIG_MAPPING_NAMES:
        return
    if "auto_map" in settings:
        if trust_remote_code:
            return
        raise ModelError.of(
            f"the model type {kind!r} needs Python code from the model's directory",
            where=str(directory / "config.json"),
            why="such code runs with your permissions",
            fix="read the code, and if you trust it set model.trust_remote_code: true",
        )
    near = nearest(str(kind), list(CONFIG_MAPPING_NAMES))
    raise ModelError.of(
        f"unknown model type {kind!r}",
        where=str(directory / "config.json"),
        why="the installed version of transformers does not support it",
        fix=(f"did you mean {near!r}? If not: " if near else "") + "pip install --upgrade transformers",
    )


def _load_error(directory: Path, error: Exception) -> ModelError:
    settings = read_model_config(directory)
    if isinstance(error, KeyError) and error.args:  # a lookup table of transformers lacks the entry
        for key, value in settings.items():
            if error.args[0] in (value.values() if isinstance(value, dict) else [value]):
                return ModelError.of(
                    f"transformers does not support {error.args[0]!r} ({key} in config.json)",
                    where=str(directory / "config.json"),
                    fix=(
                        "copy config.json of the model again, or pip install --upgrade transformers if the"
                        " model is newer"
                    ),
                )
    return ModelError.of(
        "the model cannot be loaded",
        where=str(directory),
        why=library_words(error),
        fix="check that config.json belongs to the weights",
    )


def _refuse_gaps(directory: Path, info: dict[str, Any]) -> None:
    """Refuses missing tensors and tensors of the wrong shape: transformers initializes them
    randomly, and only warns.
    """
    files = {
        header.name: file for file in weight_files(directory) for header in read_safetensors_header(file)
    }
    problems: list[Problem] = []
    misfits = sorted(info.get("mismatched_keys", ()))
    for name, shape, required in misfits[:_SHOWN]:
        more = (
            f", and {len(misfits) - _SHOWN} more tensors have the wrong shape"
            if len(misfits) > _SHOWN
            else ""
        )
        problems.append(
            Problem(
                f"{name} has the shape {tuple(shape)}, but config.json requires {tuple(required)}"
                + more * (not problems),
                str(files.get(name, directory)),
                f"{directory / 'config.json'} belongs to a different model, or was changed",
                "use config.json and weights of the same model",
            )
        )
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (" …" if len(missing) > _SHOWN else "")
        names = ", ".join(sorted({file.name for file in files.values()}))
        problems.append(
            Problem(
                f"{len(missing)} tensors of the model are missing from its files: {shown}",
                str(directory),
                f"searched {names}; the tensors would be initialized randomly",
                "copy or download the weights again",
            )
        )
    if problems:
        raise ModelError(*problems)


def _fit_vocabulary(base: Any, tokenizer: Any, *, grow: bool) -> bool:
    """Refuses, or resizes the embedding for, a tokenizer with more tokens than the embedding has
    rows; whether it was resized.
    """
    rows = base.get_input_embeddings().weight.shape[0]
    tokens = len(tokenizer)
    if tokens <= rows:
        return False
    if not grow:
        raise ModelError.of(
            f"the tokenizer does not match the model: it has {tokens} tokens, but the model has {rows}",
            where="model.tokenizer",
            why="the embedding has no row for the other tokens",
            fix="use the model's own tokenizer, or set model.resize_vocabulary: true",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers explains at length that the new rows start at the mean
        base.resize_token_embeddings(tokens)
    return True


def _freeze(base: torch.nn.Module, patterns: list[str]) -> None:
    for pattern in patterns:
        matching = [p for name, p in base.named_parameters() if re.search(pattern, name)]
        if not matching:
            names = ", ".join(name for name, _ in list(base.named_parameters())[:4])
            raise ModelError.of(
                f"no parameter matches {pattern!r}", where="freeze", fix=f"parameter names are e.g. {names}"
            )
        for parameter in matching:
            parameter.requires_grad_(False)


def _train_only(base: Any, section: TrainOnlySection) -> None:
    """Freezes everything but some modules of some layers, and some modules outside of the layers.

    Raises:
        ModelError: if there is no module of a given name, or layers cannot be spread evenly.
    """
    layers = _stack_of_layers(base)
    chosen = chosen_layers(list(layers), section)
    trained: list[torch.nn.Module] = []
    if section.modules == "all":
        trained += chosen
    else:
        inside = [(name, m) for layer in chosen or list(layers) for name, m in layer.named_modules() if name]
        modules = _modules_named(section.modules, inside, where="train_only.modules")
        trained += modules if chosen else []
    in_layers = set(layers.modules())
    outside = [
        (name, m)
        for name, m in base.named_modules()
        if name and m not in in_layers and layers not in m.modules()
    ]
    trained += _modules_named(section.extra, outside, where="train_only.extra")
    base.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)


def chosen_layers(layers: list[torch.nn.Module], section: TrainOnlySection) -> list[torch.nn.Module]:
    """The layers that a section names.

    Raises:
        ModelError: if they cannot be spread evenly.
    """
    count = section.layers
    if not section.spread:
        return layers[-count:] if count > 0 else layers[:-count]
    if len(layers) % count != 0:
        raise ModelError.of(
            f"{len(layers)} layers are not {count} groups of the same size",
            where="train_only.layers",
            why="train_only.spread trains the last layer of each group",
            fix="set it to a divisor of the number of layers",
        )
    return layers[len(layers) // count - 1 :: len(layers) // count]


def _stack_of_layers(base: Any) -> torch.nn.ModuleList:
    """The model's list of blocks: the one with the most parameters, as layers may have lists of
    their own.
    """
    lists = [module for module in base.modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        raise ModelError.of(
            "the model has no list of layers",
            where="train_only.layers",
            fix="use `freeze` with patterns of parameter names",
        )
    return max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))


def _modules_named(
    names: list[str], modules: list[tuple[str, torch.nn.Module]], *, where: str
) -> list[torch.nn.Module]:
    """The modules with these names: a name is one part of the dotted name, or several at its
    end.
    """
    selected: list[torch.nn.Module] = []
    for suffix in names:
        matching = [module for name, module in modules if f".{name}".endswith(f".{suffix}")]
        if not matching:
            ends = sorted({name.rpartition(".")[2] for name, _ in modules})
            near = nearest(suffix, ends)
            raise ModelError.of(
                f"there is no module {suffix!r}",
                where=where,
                fix=f"did you mean {near!r}?" if near else f"one of {', '.join(ends[:12])}",
            )
        selected += matching
    return selected


def uses_dropout(loaded: LoadedModel) -> bool:
    """Whether the model draws random numbers in training."""
    # A model's `attention_dropout` is applied without a module of its own. The denoiser of an image
    # model has no config.
    modules = (m.p for m in loaded.model.modules() if isinstance(m, torch.nn.Dropout))
    settings = getattr(loaded.base, "config", None)
    return max(modules, default=0) > 0 or (getattr(settings, "attention_dropout", 0) or 0) > 0

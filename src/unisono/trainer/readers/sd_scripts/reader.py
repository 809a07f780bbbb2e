"""From a configuration of sd-scripts (TOML, as LoRA-Scripts writes it, or a script with its
command) to our config, with the fate of each key.

`keys.toml` has all keys. A dataset file (`dataset_config`) is read, too.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from unisono.base.errors import ConfigError, Problem
from unisono.base.files import SETTINGS_BYTES, read_text
from unisono.trainer.config.optimizers import OPTIMIZERS
from unisono.trainer.config.schedules import from_sd_scripts
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import DiffusionSection
from unisono.trainer.config.translation import Translation
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces, parse_value
from unisono.trainer.readers.key_table import Draft, Values
from unisono.trainer.readers.reading import with_effect
from unisono.trainer.readers.sd_scripts.command import flat, is_script, read_script
from unisono.trainer.readers.sd_scripts.datasets import DatasetFile, locate, read_dataset_file, read_toml
from unisono.trainer.readers.sd_scripts.keys import KEYS, PAGE, TOOL, read_mapping, resolved

_OTHER_MODELS = {
    "chroma": "Chroma",
    "flux": "FLUX",
    "sd3": "Stable Diffusion 3",
    "lumina": "Lumina",
    "hunyuan": "HunyuanImage",
    "anima": "Anima",
}
_OTHER_KEYS = {
    "t5xxl": "FLUX or Stable Diffusion 3",
    "ae": "FLUX",
    "clip_l": "FLUX or Stable Diffusion 3",
    "clip_g": "Stable Diffusion 3",
}
_MOST_LINES = 1000


class SdScripts(Translation):
    """A file of sd-scripts in our terms; it is always for training, and its own count of steps
    depends on its buckets.
    """

    def notes(self, variables: Collection[str] = ()) -> list[str]:
        """What people are told once, with the variables of accelerate."""
        line = (
            f"{self.name} is a file of sd-scripts: {self.count('carried')} keys carried,"
            f" {self.count('translated')} translated; {PAGE} lists what happens to each key"
        )
        set_here = sorted(name for name in variables if name.startswith("ACCELERATE_"))
        ignored = f"ignored: {', '.join(set_here)} of accelerate; `--nproc N` starts N ranks"
        return [line, *self.ignored(), *([ignored] if set_here else []), *self.warnings]


def recognizes(raw: Mapping[str, object], path: Path) -> bool:
    """Whether a config is one of sd-scripts: a TOML file, or a script that trains with it."""
    del raw
    return path.suffix.lower() == ".toml" or is_script(path)


def to_config(
    raw: Mapping[str, object], lines: Mapping[KeyPath, int], path: Path, overrides: tuple[str, ...]
) -> SdScripts:
    """The file in our terms; its `problems` are not raised.

    Raises:
        ConfigError: if it cannot be read, or is for another kind of model.
    """
    del raw, lines
    return read_sd_scripts(path, overrides)


def read_sd_scripts(path: Path, overrides: tuple[str, ...] = ()) -> SdScripts:
    """A file of sd-scripts in our terms; its `problems` are not raised.

    Raises:
        ConfigError: if it cannot be read, or is for another kind of model.
    """
    is_preset = False
    if is_script(path):
        script = read_script(path)
        raw, lines = script.raw, script.lines
    else:
        whole, places_of = read_toml(path)
        if "datasets" in whole:
            raise _not_the_main_file(path)
        raw, lines = flat(whole), {key[-1:]: line for key, line in places_of.items()}
        about = whole.get("metadata")
        is_preset = isinstance(about, dict)
        _refuse_other_models({**raw, **about} if isinstance(about, dict) else raw, path)
    _refuse_other_models(raw, path)
    places = KeyPlaces(lines, str(path))
    ours = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if "." in key or not equals or (key not in KEYS and key in RunConfig.model_fields):
            ours.append(text)
            continue
        meant = resolved(key)
        raw = {name: old for name, old in raw.items() if meant is None or resolved(name) is not meant}
        raw[key] = parse_value(value, name="command line")
        places.override((key,))
    reading = read_mapping(raw, places, str(path))
    values = Values(reading.values, reading.places, str(path), KEYS)
    draft = Draft(values, str(path), verb="train", tool=TOOL)
    draft.config["objective"] = "diffusion"
    problems = _missing(values, is_preset=is_preset)
    _fill_model(draft)
    file = _fill_data(draft, path)
    _fill_training(draft, file)
    _fill_output(draft, path)
    fates = [*reading.fates, *file.fates]
    return SdScripts(
        name=str(path),
        values=draft.values,
        keys=[with_effect(fate, draft.values, "train", draft.fates) for fate in fates],
        config=draft.config,
        origins=draft.origins,
        names=draft.names,
        places=reading.places,
        warnings=[*file.warnings, *draft.warnings],
        problems=[*problems, *reading.problems, *file.problems, *draft.problems],
        our_overrides=tuple(ours),
    )


def _not_the_main_file(path: Path) -> ConfigError:
    return ConfigError.of(
        f"{path} is a dataset file of sd-scripts",
        where=str(path),
        why="it lists pictures, but does not name the model to train",
        fix=f'pass the file whose `dataset_config = "{path.name}"` names it',
    )


def _refuse_other_models(raw: Mapping[str, object], path: Path) -> None:
    """One sentence, whatever else the file says.

    Raises:
        ConfigError: for FLUX, SD3 and other models, and for modules of LyCORIS.
    """
    kinds = ("model_train_type", "model_type", "train_type", "network_module")
    words = " ".join(str(raw.get(key, "")) for key in kinds).lower()
    other = next((name for word, name in _OTHER_MODELS.items() if word in words), None)
    other = other or next((name for key, name in _OTHER_KEYS.items() if raw.get(key)), None)
    if other is not None:
        raise ConfigError.of(
            f"{path} is for {other}; unisono trains Stable Diffusion 1.x, 2.x and SDXL", where=str(path)
        )
    if "lycoris" in words:
        raise ConfigError.of(
            f'{path} trains a module of LyCORIS; unisono trains LoRA (network_module = "networks.lora")',
            where=str(path),
        )


def _fill_model(draft: Draft) -> None:
    values = draft.values
    draft.put("model.path", values["pretrained_model_name_or_path"] or "?", "pretrained_model_name_or_path")
    dtype = {"no": "float32", "bf16": "bfloat16", "fp16": "auto"}[values["mixed_precision"]]
    draft.put("model.dtype", dtype, "mixed_precision")
    if dtype == "auto":
        draft.warnings.append(
            "mixed_precision: fp16 needs loss scaling; here bfloat16 is used where the device has it, else"
            " float32"
        )
    module = values["network_module"]
    if module != "networks.lora":
        draft.refuse("network_module", "only plain LoRA is trained", 'set network_module = "networks.lora"')
    draft.put("adapter.kind", "lora", "network_module")
    draft.put("adapter.rank", values["network_dim"], "network_dim")
    draft.put("adapter.alpha", values["network_alpha"] or float(values["network_dim"]), "network_alpha")
    draft.put("adapter.dropout", values["network_dropout"] or 0.0, "network_dropout")
    text_lr = _text_lr(values["text_encoder_lr"])
    only_unet = values["network_train_unet_only"] or text_lr == 0
    draft.put(
        "adapter.targets", "unet" if only_unet else "unet+text", "network_train_unet_only", "text_encoder_lr"
    )
    if only_unet and values.is_set("text_encoder_lr"):
        draft.ignore("text_encoder_lr", "the text encoders are not trained")
    elif text_lr:
        draft.put("diffusion.text_lr", text_lr, "text_encoder_lr")
    prediction = "v_prediction" if values["v_parameterization"] else "auto"
    draft.put("diffusion.prediction", prediction, "v_parameterization")
    draft.put_if_set("diffusion.clip_skip", "clip_skip")
    length = values["max_token_length"]
    if length is not None:
        draft.put(
            "diffusion.max_tokens", 75 if length <= 75 else 150 if length <= 150 else 225, "max_token_length"
        )


def _missing(values: Values, *, is_preset: bool) -> list[Problem]:
    """A problem for each key without which nothing can be trained."""
    needed = [("pretrained_model_name_or_path", "there is no model to train")]
    if not values["dataset_config"]:
        needed.append(("train_data_dir", "there are no pictures to train on"))
    why = "it is a preset, which has only a part of the settings" if is_preset else ""
    fix = "write `{0} = …` into the file, or `{0}=…` behind it on the command line"
    return [Problem(what, values.name, why, fix.format(key)) for key, what in needed if not values[key]]


def _text_lr(value: Any) -> float | None:
    """One learning rate; SDXL's files may have a list of two."""
    number = value[0] if isinstance(value, list) and value else value
    try:
        return None if number is None or number == "" else float(number)
    except (TypeError, ValueError):
        return None


def _fill_data(draft: Draft, path: Path) -> DatasetFile:
    """The folders of pictures, and how they are read; gives the dataset file, which is empty where
    there is none.
    """
    draft.put("data.on_bad_row", "skip")
    file = DatasetFile()
    if draft.values["dataset_config"]:
        file = _fill_dataset_file(draft, path)
    else:
        values = draft.values
        draft.put("data.train", values["train_data_dir"] or "?", "train_data_dir")
        draft.put_if_set("diffusion.prior", "reg_data_dir")
        draft.put("diffusion.folder_captions", value=True)
        _put_settings(draft, _settings(draft, values))
        share = values["validation_split"]
        if share:
            draft.put("data.eval", _checked_share(draft, values), "validation_split")
    values = draft.values
    draft.put_if_set("diffusion.eval_seed", "validation_seed")
    draft.put_if_set("diffusion.noise_offset", "noise_offset")
    has_prior = "prior" in draft.config["diffusion"] or any(s.values["is_reg"] for s in file.subsets)
    if has_prior:
        draft.put("diffusion.prior_weight", values["prior_loss_weight"], "prior_loss_weight")
    elif "prior_loss_weight" in values.given:
        draft.ignore("prior_loss_weight", "there are no regularization pictures")
    if values["min_snr_gamma"]:
        draft.put("diffusion.min_snr_gamma", values["min_snr_gamma"], "min_snr_gamma")
    return file


_SETTINGS = {
    "resolution": "resolution", "caption_extensions": "caption_extension", "buckets": "enable_bucket",
    "min_side": "min_bucket_reso", "max_side": "max_bucket_reso", "bucket_step": "bucket_reso_steps",
    "upscale": "bucket_no_upscale", "shuffle_captions": "shuffle_caption",
    "tag_dropout": "caption_tag_dropout_rate", "keep_tokens": "keep_tokens",
    "caption_dropout": "caption_dropout_rate", "caption_prefix": "caption_prefix",
    "caption_suffix": "caption_suffix", "keep_tokens_separator": "keep_tokens_separator",
    "caption_separator": "caption_separator", "secondary_separator": "secondary_separator",
    "wildcards": "enable_wildcard", "flip": "flip_aug", "tag_warmup": "token_warmup_step",
    "tag_warmup_min": "token_warmup_min",
}  # fmt: skip
"""Our keys of what may differ between folders of pictures, and those of sd-scripts."""
_OFF_BY_DEFAULT = (
    "shuffle_captions",
    "tag_dropout",
    "keep_tokens",
    "caption_dropout",
    "caption_prefix",
    "caption_suffix",
    "keep_tokens_separator",
    "caption_separator",
    "secondary_separator",
    "wildcards",
    "flip",
    "tag_warmup",
    "tag_warmup_min",
)
"""Those that do nothing unless they are set to another value than their default."""


def _settings(draft: Draft, values: Values) -> dict[str, object]:
    """What `_SETTINGS` are for a folder; those that have no effect for it are omitted."""
    extension = values["caption_extension"]
    settings: dict[str, object] = {
        "resolution": _resolution(draft, values),
        "caption_extensions": [extension if extension.startswith(".") else f".{extension}"],
        "buckets": values["enable_bucket"],
    }
    if values["enable_bucket"]:
        settings |= {ours: values[_SETTINGS[ours]] for ours in ("min_side", "max_side", "bucket_step")}
        settings["upscale"] = not values["bucket_no_upscale"]
    for ours in _OFF_BY_DEFAULT:
        settings[ours] = values[_SETTINGS[ours]]
    if values["token_warmup_step"] > 0:
        settings["tag_warmup"] = _warmup(values["token_warmup_step"])
    else:
        settings |= {"tag_warmup": "0 steps", "tag_warmup_min": 1}
    return settings


def _put_settings(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Settings that hold for all pictures."""
    for ours, value in settings.items():
        if ours not in _OFF_BY_DEFAULT or value != DiffusionSection.model_fields[ours].default:
            section = "data" if ours == "resolution" else "diffusion"
            draft.put(f"{section}.{ours}", value, _SETTINGS[ours])


def _resolution(draft: Draft, values: Values) -> int | list[int]:
    """The side of a square, or width and height."""
    value = values["resolution"]
    if value is None:
        return 512
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    numbers = [str(part).strip() for part in parts]
    if not all(number.isdigit() and int(number) for number in numbers) or len(numbers) not in (1, 2):
        what = f"resolution: {value!r} is not a size"
        draft.problems.append(Problem(what, values.place("resolution"), "", 'write resolution = "512,512"'))
        return 512
    sides = [int(number) for number in numbers]
    return sides[0] if len(set(sides)) == 1 else sides


def _checked_share(draft: Draft, values: Values, *, most: float = 0.99) -> float:
    """`validation_split`, or a problem with it."""
    share = float(values["validation_split"])
    if not 0 <= share <= most:
        what = f"validation_split: {share:g} is not a share of the pictures"
        fix = (
            "set it to a share from 0 to 1, e.g. 0.1" if most == 1 else "set it to a share below 1, e.g. 0.1"
        )
        draft.problems.append(Problem(what, values.place("validation_split"), "", fix))
        return 0.1
    return share


def _fill_dataset_file(draft: Draft, path: Path) -> DatasetFile:
    """The sources and settings of a dataset file: what all subsets share in `diffusion`, what
    differs in `pictures` of a source.
    """
    file = read_dataset_file(locate(str(draft.values["dataset_config"]), path), draft.values)
    for key in ("train_data_dir", "reg_data_dir", "in_json"):
        if key in draft.values.given:
            draft.ignore(key, "as in sd-scripts: the dataset file lists the pictures")
    if not file.subsets:
        draft.put("data.train", "?", "dataset_config")
        draft.config.setdefault("diffusion", {})
        return file
    settings = [_settings(draft, subset.values) for subset in file.subsets]
    shares = [
        0.0 if subset.values["is_reg"] else _checked_share(draft, subset.values, most=1.0)
        for subset in file.subsets
    ]
    usual = settings[0]
    sources = []
    for subset, subset_settings, share in zip(file.subsets, settings, shares, strict=True):
        pictures: dict[str, object] = {"flat": True, "caption": subset.values["class_tokens"] or ""}
        if subset.values["is_reg"]:
            pictures["prior"] = True
        elif share:
            pictures["eval"] = share
        pictures |= {ours: value for ours, value in subset_settings.items() if value != usual.get(ours)}
        source: dict[str, object] = {"path": subset.values["image_dir"], "pictures": pictures}
        if subset.values["num_repeats"] != 1:
            source["weight"] = float(subset.values["num_repeats"])
        sources.append(source)
    main = draft.values
    first = file.subsets[0].values
    draft.values = Values(first.given, {**main.places, **first.places}, draft.name, KEYS)
    _put_settings(draft, usual)
    draft.put("data.train", sources, "dataset_config")
    return file


def _fill_training(draft: Draft, file: DatasetFile) -> None:
    values = draft.values
    draft.put("seed", values["seed"], "seed")
    _put_batch(draft, file)
    epochs = values["max_train_epochs"]
    duration = f"{epochs} epochs" if epochs else f"{values['max_train_steps']} steps"
    draft.put("duration", duration, "max_train_epochs", "max_train_steps")
    draft.put("memory.gradient_checkpointing", values["gradient_checkpointing"], "gradient_checkpointing")
    kind = values["optimizer_type"] or "AdamW"
    if kind.lower() not in OPTIMIZERS["adamw"].sd_scripts:
        draft.refuse("optimizer_type", "only AdamW is available", 'set optimizer_type = "AdamW"')
    draft.put("optim.kind", "adamw", "optimizer_type")
    if values["unet_lr"] == 0:
        draft.refuse("unet_lr", "the UNet is always trained", "remove it, or set it to a learning rate")
    draft.put("optim.lr", values["unet_lr"] or values["learning_rate"], "unet_lr", "learning_rate")
    draft.put("optim.weight_decay", 0.01, "optimizer_type")
    _put_optimizer_args(draft)
    _put_schedule(draft)
    draft.put("optim.max_grad_norm", values["max_grad_norm"] or None, "max_grad_norm")


def _put_schedule(draft: Draft) -> None:
    values = draft.values
    name, warmup = values["lr_scheduler"], values["lr_warmup_steps"]
    schedule = from_sd_scripts(name)
    assert schedule is not None  # the table of keys has only these
    ours, parameters = schedule
    draft.put("optim.schedule", ours, "lr_scheduler")
    draft.put("optim.schedule_start", 0)
    draft.put("optim.warmup", _warmup(warmup) if name != "constant" else "0 steps", "lr_warmup_steps")
    if name == "constant" and warmup:
        draft.ignore("lr_warmup_steps", "as in sd-scripts: `constant` has no warmup")
    for key, parameter in parameters.items():
        if parameter:
            value = values[key]
            draft.put(f"optim.{parameter}", max(1, value) if parameter == "cycles" else value, key)
        elif values.is_set(key):
            draft.refuse(key, f"{name} has no such setting here", "remove it")


def _warmup(amount: float) -> str:
    """A number of steps; below 1 a share of all."""
    return f"{100 * amount:g}%" if 0 < amount < 1 else f"{int(amount)} steps"


def _put_batch(draft: Draft, file: DatasetFile) -> None:
    """Pictures of a forward, and forwards of a step."""
    values = draft.values
    batch_size, forwards = values["batch_size"], 1
    per_rank = values["train_batch_size"] if batch_size is None else batch_size
    if len(set(file.batch_sizes)) > 1:
        per_rank, forwards = file.batch
        sizes = ", ".join(map(str, dict.fromkeys(file.batch_sizes)))
        draft.warnings.append(
            f"batch_size: the datasets have {sizes}; here each step has {per_rank * forwards} pictures, in"
            f" forwards of {per_rank}"
        )
    draft.put("batch.per_rank", per_rank, "batch_size", "train_batch_size")
    accumulate = values["gradient_accumulation_steps"] * forwards
    draft.put("batch.accumulate", accumulate, "gradient_accumulation_steps")


def _put_optimizer_args(draft: Draft) -> None:
    for text in draft.values["optimizer_args"] or []:
        name, _, value = text.partition("=")
        try:
            numbers = [float(part) for part in re.sub(r"[()\[\]\s]", "", value).split(",") if part]
        except ValueError:
            numbers = []
        if name.strip() in ("weight_decay", "eps") and len(numbers) == 1:
            draft.put(f"optim.{name.strip()}", numbers[0], "optimizer_args")
        elif name.strip() == "betas" and len(numbers) == 2:
            draft.put("optim.betas", numbers, "optimizer_args")
        else:
            draft.refuse("optimizer_args", f"{text} is not available", "use weight_decay, betas and eps")


def _fill_output(draft: Draft, path: Path) -> None:
    values = draft.values
    folder = values["output_dir"] or "output"
    draft.put(
        "output_dir", str(Path(folder) / (values["output_name"] or "last")), "output_name", "output_dir"
    )
    for unit in ("epochs", "steps"):
        every = values[f"save_every_n_{unit}"]
        if every:
            draft.put("checkpoint.every", f"{every} {unit}", f"save_every_n_{unit}")
    if values["save_last_n_epochs"]:
        draft.put("checkpoint.keep", values["save_last_n_epochs"], "save_last_n_epochs")
    trackers = {"all": ["tensorboard", "wandb"], None: []}.get(values["log_with"], [values["log_with"]])
    if values["log_with"] and values["logging_dir"]:
        draft.put("track", trackers, "log_with")
    prompts = _prompts(draft, path)
    drawn, measured = _period(values, "sample_every_n"), _period(values, "validate_every_n")
    if prompts and drawn:
        draft.put("diffusion.prompts", prompts, "sample_prompts", "prompt_file", "positive_prompts")
        draft.put("eval.every", drawn, "sample_every_n_steps", "sample_every_n_epochs")
        draft.put_if_set("diffusion.sample_steps", "sample_steps")
        draft.put_if_set("diffusion.guidance", "sample_cfg")
    if _holds_out(draft.config["data"]):
        measured = measured or "1 epochs"
        if prompts and drawn and drawn != measured:
            draft.warnings.append(
                f"samples are drawn when the held-out pictures are measured, every {measured}, not every"
                f" {drawn}"
            )
        draft.put("eval.every", measured, "validate_every_n_steps", "validate_every_n_epochs")


def _holds_out(data: Mapping[str, Any]) -> bool:
    """Whether pictures are held out."""
    sources = data["train"] if isinstance(data["train"], list) else []
    return "eval" in data or any(source["pictures"].get("eval") for source in sources)


def _period(values: Values, key: str) -> str | None:
    """`every N steps` or `epochs` of a pair of keys; the steps come first."""
    units = (unit for unit in ("steps", "epochs") if (values[f"{key}_{unit}"] or 0) > 0)
    return next((f"{values[f'{key}_{unit}']} {unit}" for unit in units), None)


def _prompts(draft: Draft, path: Path) -> list[str]:
    """The prompts of samples: one in the config, or one on each line of a file."""
    given = next((k for k in ("sample_prompts", "prompt_file", "positive_prompts") if draft.values[k]), None)
    if given is None:
        return []
    value = str(draft.values[given])
    file = next(
        (f for f in (Path(value), path.parent / value) if value.endswith(".txt") and f.is_file()), None
    )
    if file is None and value.endswith((".txt", ".json", ".toml")):
        draft.refuse(
            given,
            "there is no such text file with prompts",
            "give a .txt file with one prompt on a line, or a prompt",
        )
        return []
    try:
        text = read_text(file, most_bytes=SETTINGS_BYTES, errors="replace") if file else value
        lines = text.splitlines()[:_MOST_LINES] if file else [value]
    except OSError as error:
        draft.refuse(
            given, f"{file} cannot be read: {error.strerror or error}", "make it readable, or give a prompt"
        )
        return []
    prompts = [line.split(" --")[0].strip() for line in lines if not line.startswith("#")]
    return [prompt for prompt in prompts if prompt]

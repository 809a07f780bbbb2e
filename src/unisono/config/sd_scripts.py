"""From a configuration of sd-scripts (TOML, as LoRA-Scripts writes it) to our config, with the fate of each of its keys.

The manner is that of `config.llamafactory`, whose machinery it uses. `sd_scripts_keys.toml` has all keys. A dataset file (`dataset_config`)
is read, too.
"""

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from unisono.config.llamafactory import Reading, Translation, Verb, with_effect
from unisono.config.llamafactory_keys import Draft, Table, Values
from unisono.config.schema import RunConfig
from unisono.config.yaml_file import KeyPath, KeyPlaces, parse_value
from unisono.errors import ConfigError, Problem
from unisono.files import SETTINGS_BYTES, SOURCE_BYTES, read_given, read_text
from unisono.text import one_line

TOOL = "sd-scripts"
KEYS = Table("sd_scripts_keys.toml")
"""By name, in groups."""

_PAGE = "docs/reference/sd-scripts.md"
_UNKNOWN = ("it is neither of sd-scripts' train_network.py nor of LoRA-Scripts", _PAGE)
_OTHER_MODELS = {
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
_SUBSET = {"image_dir", "num_repeats", "is_reg", "class_tokens", "metadata_file"}


class SdScripts(Translation):
    """A file of sd-scripts in our terms."""

    @property
    def epoch_ends(self) -> str:
        """Empty: sd-scripts' own count of steps depends on its buckets, and is not known here."""
        return ""

    def fewer_steps(self, epochs: float, *, sequences: int, global_batch: int) -> str:
        """Empty, as well."""
        del epochs, sequences, global_batch
        return ""

    def refusals(self, verb: Verb) -> list[Problem]:
        """Empty: such a file is always for training."""
        del verb
        return []

    @property
    def lacks_config(self) -> bool:
        """Whether nothing can be said about the config."""
        return "data" not in self.config

    def notes(self, variables: Collection[str] = ()) -> list[str]:
        """What people are told once: what was carried, what was ignored, and what differs."""
        counts = {fate: sum(key.fate == fate for key in self.keys) for fate in ("carried", "translated")}
        ignored = [key.key for key in self.keys if key.fate == "ignored"]
        lines = [
            f"{self.name} is a file of sd-scripts: {counts['carried']} keys carried, {counts['translated']} translated; {_PAGE} lists what"
            " becomes of each key"
        ]
        if ignored:
            lines.append(f"ignored, since they change nothing here: {', '.join(ignored)}")
        found = sorted(name for name in variables if name.startswith("ACCELERATE_"))
        if found:
            lines.append(f"ignored: {', '.join(found)} of accelerate; `--nproc N` starts N ranks")
        return [*lines, *self.warnings]


def is_sd_scripts(path: Path) -> bool:
    """Whether a config is one of sd-scripts: a TOML file."""
    return path.suffix.lower() == ".toml"


def read_sd_scripts(path: Path, overrides: tuple[str, ...] = ()) -> SdScripts:
    """A file of sd-scripts in our terms; its `problems` are not raised.

    Raises:
        ConfigError: if it cannot be read, or is for another kind of model.
    """
    raw, lines = read_toml(path)
    raw = _flat(raw)
    _refuse_other_models(raw, path)
    places = KeyPlaces(lines, str(path))
    ours = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if "." in key or not equals or (key not in KEYS and key in RunConfig.model_fields):
            ours.append(text)
            continue
        raw[key] = parse_value(value, name="command line")
        places.override((key,))
    reading = Reading(places, str(path), keys=KEYS, tool=TOOL, unknown=_UNKNOWN)
    for key, value in raw.items():
        reading.read(key, value, is_secret=key in ("wandb_api_key", "huggingface_token") and bool(value))
    values = Values(reading.values, reading.places, str(path), KEYS)
    draft = Draft(values, str(path), verb="train", tool=TOOL)
    draft.config["objective"] = "diffusion"
    _fill_model(draft)
    _fill_data(draft, path)
    _fill_training(draft)
    _fill_output(draft, path)
    return SdScripts(
        name=str(path),
        values=draft.values,
        keys=[with_effect(fate, draft.values, "train", draft.fates) for fate in reading.fates],
        config=draft.config,
        origins=draft.origins,
        names=draft.names,
        places=reading.places,
        stage="",
        verb="train",
        warnings=draft.warnings,
        problems=[*reading.problems, *draft.problems],
        our_overrides=tuple(ours),
    )


def read_toml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """A TOML file, and the line of each of its keys that is written as `key = value`.

    Raises:
        ConfigError: if it cannot be read.
    """
    text = read_given(path, str(path), most_bytes=SOURCE_BYTES)
    if not isinstance(text, str):
        fault, where = text
        raise ConfigError.of(fault.what, where=where, why=fault.why, fix=fault.fix)
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(
            f"{path} cannot be read", where=str(path), why=one_line(str(error)), fix="fix the file"
        ) from error
    found: dict[KeyPath, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*"?([A-Za-z0-9_]+)"?\s*=', line)
        if match is not None:
            found.setdefault((match[1],), number)
    return raw, found


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys without the sections that they are in, as sd-scripts reads them."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def _refuse_other_models(raw: Mapping[str, Any], path: Path) -> None:
    """One sentence, whatever else the file says.

    Raises:
        ConfigError: for FLUX, SD3 and other models, and for modules of LyCORIS.
    """
    words = f"{raw.get('model_train_type', '')} {raw.get('network_module', '')}".lower()
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
    if not values["pretrained_model_name_or_path"]:
        draft.problems.append(
            Problem("there is no model to train", draft.name, "", "add `pretrained_model_name_or_path`")
        )
    draft.put("model.path", values["pretrained_model_name_or_path"] or "?", "pretrained_model_name_or_path")
    dtype = {"no": "float32", "bf16": "bfloat16", "fp16": "auto"}[values["mixed_precision"]]
    draft.put("model.dtype", dtype, "mixed_precision")
    if dtype == "auto":
        draft.warnings.append(
            "mixed_precision: fp16 needs loss scaling; here bfloat16 is used where the device has it, else float32"
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


def _text_lr(value: Any) -> float | None:
    """One learning rate; SDXL's files may have a list of two."""
    number = value[0] if isinstance(value, list) and value else value
    try:
        return None if number is None or number == "" else float(number)
    except (TypeError, ValueError):
        return None


def _fill_data(draft: Draft, path: Path) -> None:
    values = draft.values
    if values["dataset_config"]:
        _fill_dataset_file(draft, path)
    elif values["train_data_dir"]:
        draft.put("data.train", values["train_data_dir"], "train_data_dir")
        draft.put_if_set("diffusion.prior", "reg_data_dir")
    else:
        draft.problems.append(
            Problem("there are no pictures to train on", draft.name, "", "add `train_data_dir`")
        )
        draft.put("data.train", "?", "train_data_dir")
    values = draft.values  # with those of the dataset file
    _put_resolution(draft, values["resolution"])
    draft.put("data.on_bad_row", "skip")
    draft.put("diffusion.folder_captions", value=True)
    extension = values["caption_extension"]
    draft.put(
        "diffusion.caption_extensions",
        [extension if extension.startswith(".") else f".{extension}"],
        "caption_extension",
    )
    draft.put("diffusion.buckets", values["enable_bucket"], "enable_bucket")
    if values["enable_bucket"]:
        draft.put("diffusion.min_side", values["min_bucket_reso"], "min_bucket_reso")
        draft.put("diffusion.max_side", values["max_bucket_reso"], "max_bucket_reso")
        draft.put("diffusion.bucket_step", values["bucket_reso_steps"], "bucket_reso_steps")
        draft.put("diffusion.upscale", not values["bucket_no_upscale"], "bucket_no_upscale")
    for ours, key in (
        ("shuffle_captions", "shuffle_caption"),
        ("keep_tokens", "keep_tokens"),
        ("caption_dropout", "caption_dropout_rate"),
        ("noise_offset", "noise_offset"),
    ):
        draft.put_if_set(f"diffusion.{ours}", key)
    if values["reg_data_dir"] or "prior" in draft.config["diffusion"]:
        draft.put("diffusion.prior_weight", values["prior_loss_weight"], "prior_loss_weight")
    if values["min_snr_gamma"]:
        draft.put("diffusion.min_snr_gamma", values["min_snr_gamma"], "min_snr_gamma")


def _put_resolution(draft: Draft, value: Any) -> None:
    numbers = [
        str(part).strip()
        for part in (
            value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        )
    ]
    if value is None:
        draft.put("data.resolution", 512, "resolution")
    elif not all(number.isdigit() for number in numbers) or len(numbers) not in (1, 2):
        draft.refuse("resolution", "it is not a size", 'write resolution = "512,512"')
    else:
        sides = [int(number) for number in numbers]
        draft.put("data.resolution", sides[0] if len(set(sides)) == 1 else sides, "resolution")


def _fill_dataset_file(draft: Draft, path: Path) -> None:
    """The sources and settings of a dataset file."""
    name = str(draft.values["dataset_config"])
    file = Path(name).expanduser()
    if not file.is_file() and (path.parent / name).is_file():
        file = path.parent / name
    raw, lines = read_toml(file)
    places = KeyPlaces(lines, str(file))
    subsets = [
        {**{k: v for k, v in dataset.items() if k != "subsets"}, **subset}
        for dataset in raw.get("datasets", [])
        for subset in dataset.get("subsets", [])
    ]
    _read_settings(draft, {**raw.get("general", {})}, subsets, places, file)
    prior = [str(subset.get("image_dir", "?")) for subset in subsets if subset.get("is_reg")]
    sources = [
        {"path": str(subset.get("image_dir", "?")), "weight": float(subset.get("num_repeats", 1))}
        for subset in subsets
        if not subset.get("is_reg")
    ]
    if len(prior) > 1:
        what = f"{len(prior)} subsets are regularization pictures"
        draft.problems.append(Problem(what, str(file), "", "put them into one folder"))
    draft.put("data.train", sources or "?", "dataset_config")
    if prior:
        draft.put("diffusion.prior", prior[0], "dataset_config")


def _read_settings(
    draft: Draft, settings: dict[str, Any], subsets: list[dict[str, Any]], places: KeyPlaces, file: Path
) -> None:
    """Adds the settings of a dataset file to the draft. One that differs between its datasets is refused: a run has one value of each."""
    for subset in subsets:
        for key, value in subset.items():
            if key not in _SUBSET and settings.setdefault(key, value) != value:
                what = f"`{key}` differs between datasets"
                problem = Problem(what, places.of((key,)), "a run has one value", "train them in two runs")
                draft.problems.append(problem)
    reading = Reading(places, str(file), keys=KEYS, tool=TOOL, unknown=_UNKNOWN)
    for key, value in settings.items():
        reading.read(key, value, is_secret=False)
    draft.problems += reading.problems
    given = {**reading.values, **draft.values.given}
    where = {**reading.places, **draft.values.places}
    draft.values = Values(given, where, draft.name, KEYS)


def _fill_training(draft: Draft) -> None:
    values = draft.values
    draft.put("seed", values["seed"], "seed")
    draft.put(
        "batch.per_rank", values["batch_size"] or values["train_batch_size"], "batch_size", "train_batch_size"
    )
    draft.put("batch.accumulate", values["gradient_accumulation_steps"], "gradient_accumulation_steps")
    epochs = values["max_train_epochs"]
    duration = f"{epochs} epochs" if epochs else f"{values['max_train_steps']} steps"
    draft.put("duration", duration, "max_train_epochs", "max_train_steps")
    draft.put("memory.gradient_checkpointing", values["gradient_checkpointing"], "gradient_checkpointing")
    kind = values["optimizer_type"] or "AdamW"
    if kind.lower() not in ("adamw", "adamw8bit", "pagedadamw8bit", "pagedadamw"):
        draft.refuse("optimizer_type", "only AdamW is available", 'set optimizer_type = "AdamW"')
    draft.put("optim.kind", "adamw", "optimizer_type")
    draft.put("optim.lr", values["unet_lr"] or values["learning_rate"], "unet_lr", "learning_rate")
    draft.put("optim.weight_decay", 0.01, "optimizer_type")
    _put_optimizer_args(draft)
    schedule = values["lr_scheduler"]
    draft.put("optim.schedule", schedule.removesuffix("_with_warmup"), "lr_scheduler")
    draft.put("optim.schedule_start", 0)
    warmup = values["lr_warmup_steps"]
    text = f"{100 * warmup:g}%" if 0 < warmup < 1 else f"{int(warmup)} steps"
    draft.put("optim.warmup", text if schedule != "constant" else "0 steps", "lr_warmup_steps")
    if schedule == "constant" and warmup:
        draft.ignore("lr_warmup_steps", "as there: `constant` has no warmup")
    if schedule == "cosine_with_restarts":
        draft.put("optim.cycles", max(1, values["lr_scheduler_num_cycles"]), "lr_scheduler_num_cycles")
    if schedule == "polynomial":
        draft.put("optim.power", values["lr_scheduler_power"], "lr_scheduler_power")
    draft.put("optim.max_grad_norm", values["max_grad_norm"] or None, "max_grad_norm")


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
    period = next(
        (
            f"{values[f'sample_every_n_{u}']} {u}"
            for u in ("steps", "epochs")
            if values[f"sample_every_n_{u}"]
        ),
        None,
    )
    if prompts and period:
        draft.put("diffusion.prompts", prompts, "sample_prompts", "prompt_file", "positive_prompts")
        draft.put("eval.every", period, "sample_every_n_steps", "sample_every_n_epochs")
        draft.put_if_set("diffusion.sample_steps", "sample_steps")
        draft.put_if_set("diffusion.guidance", "sample_cfg")


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
    found = [line.split(" --")[0].strip() for line in lines if not line.startswith("#")]
    return [prompt for prompt in found if prompt]

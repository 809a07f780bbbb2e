"""Model, adapter and data of a LLaMA-Factory file, in our config.

What LLaMA-Factory does by default and we do not is written out, so that the config says all of it.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from unisono.base.errors import ConfigError, DataError, Problem
from unisono.base.files import read_object
from unisono.base.text import nearest
from unisono.trainer.readers.key_table import Draft
from unisono.trainer.readers.llamafactory.dataset_info import read_datasets
from unisono.trainer.readers.llamafactory.keys import PREFERENCE_STAGES
from unisono.trainer.readers.llamafactory.template import find_lf_template, template_names


def fill_model(draft: Draft) -> None:
    """The model and its dtype."""
    values = draft.values
    if values["model_name_or_path"] is None:
        problem = Problem(
            "the key `model_name_or_path` is missing", draft.name, "it has no default", "add it"
        )
        draft.problems.append(problem)
    draft.put("model.path", values["model_name_or_path"] or "?", "model_name_or_path")
    draft.put_if_set("model.revision", "model_revision")
    draft.put("model.dtype", _dtype(draft), "bf16", "fp16", "pure_bf16")
    if values["fp16"]:
        draft.warnings.append(
            "fp16: float16 needs loss scaling, which is not supported; model.dtype is auto: bfloat16 where"
            " the device has it, else float32"
        )
    if values["train_from_scratch"]:
        draft.put("model.weights", "random", "train_from_scratch")
    draft.put_if_set("model.resize_vocabulary", "resize_vocab")
    draft.put_if_set("model.embedding_noise", "neftune_noise_alpha")
    draft.put_if_set("model.trust_remote_code", "trust_remote_code")
    _rope(draft)
    if draft.verb == "train":
        _quantization(draft)


def _dtype(draft: Draft) -> str:
    """Without a key that says it a training is in float32, as LLaMA-Factory's on a CPU and its full
    fine-tuning.
    """
    values = draft.values
    if values["bf16"] or values["pure_bf16"]:
        return "bfloat16"
    return "auto" if values["fp16"] or not values["dataset"] else "float32"


def _rope(draft: Draft) -> None:
    kind = draft.values["rope_scaling"]
    if kind is not None:
        draft.put("model.rope", {"kind": kind, "factor": "auto"}, "rope_scaling")


def _quantization(draft: Draft) -> None:
    values = draft.values
    bits, method = values["quantization_bit"], values["quantization_method"]
    if bits is None:
        return
    if method != "bnb":
        draft.refuse("quantization_method", "weights are quantized by bitsandbytes", "use bnb, or remove it")
    elif bits not in (4, 8):
        draft.refuse("quantization_bit", "bitsandbytes has 4 and 8", "set it to 4 or 8")
    elif bits == 8:
        draft.put("model.quantize", "int8", "quantization_bit")
    else:
        draft.put("model.quantize", values["quantization_type"], "quantization_bit", "quantization_type")
        draft.put("model.quantize_double", values["double_quantization"], "double_quantization")


def fill_method(draft: Draft) -> None:
    """What is trained: an adapter, all weights, or some layers."""
    values = draft.values
    kind = values["finetuning_type"]
    if kind == "lora":
        _adapter(draft)
        return
    if kind == "oft":
        _oft(draft)
        return
    draft.put("adapter", None, "finetuning_type")
    if kind == "freeze":
        _train_only(draft)


def _oft(draft: Draft) -> None:
    values = draft.values
    draft.put("adapter.kind", "oft", "finetuning_type")
    if values["oft_rank"]:
        draft.refuse("oft_rank", "blocks are given by their size", "set oft_block_size, and remove it")
    draft.put("adapter.rank", values["oft_block_size"], "oft_block_size")
    draft.put("adapter.targets", _targets(values["oft_target"]), "oft_target")


def _targets(names: str | list[str]) -> str | list[str]:
    """Patterns for names as in PEFT: the whole name, or its end behind a dot."""
    if names in ("all", ["all"]):
        return "all-linear"
    return [rf"(^|\.){re.escape(name)}$" for name in names]


def _adapter(draft: Draft) -> None:
    values = draft.values
    kind = "dora" if values["use_dora"] else "rslora" if values["use_rslora"] else "lora"
    draft.put("adapter.kind", kind, "use_dora", "use_rslora")
    draft.put("adapter.rank", values["lora_rank"], "lora_rank")
    draft.put(
        "adapter.alpha", float(values["lora_alpha"] or 2 * values["lora_rank"]), "lora_alpha", "lora_rank"
    )
    draft.put("adapter.dropout", _dropout(draft), "lora_dropout")
    draft.put("adapter.targets", _targets(values["lora_target"]), "lora_target")
    if values["additional_target"]:
        draft.put("adapter.modules_to_save", values["additional_target"], "additional_target")
    if values["pissa_init"]:
        draft.put("adapter.init", "pissa", "pissa_init")
        steps = values["pissa_iter"]
        draft.put("adapter.init_steps", steps if steps >= 0 else None, "pissa_iter")
    _other_adapters(draft)
    if values["loraplus_lr_ratio"] is not None:
        draft.put("optim.lora_b_ratio", values["loraplus_lr_ratio"], "loraplus_lr_ratio")


def _dropout(draft: Draft) -> float:
    """None with the stages in which LLaMA-Factory switches all dropout off."""
    stage = draft.values["stage"]
    if stage not in ("dpo", "kto"):
        return float(draft.values["lora_dropout"])
    draft.ignore(
        "lora_dropout", f"LLaMA-Factory switches dropout off with stage: {stage}; adapter.dropout sets it"
    )
    return 0.0


def _other_adapters(draft: Draft) -> None:
    """Those that training begins with: all but the last are merged, and with create_new_adapter the
    last, too.
    """
    adapters = draft.values["adapter_name_or_path"] or []
    if not adapters or draft.verb != "train":
        return
    merged = adapters if draft.values["create_new_adapter"] else adapters[:-1]
    if merged:
        draft.put("adapter.merge", merged, "create_new_adapter", "adapter_name_or_path")
    if merged != adapters:
        draft.put("adapter.from", adapters[-1], "adapter_name_or_path")
        _as_stored(draft, _stored_settings(adapters[-1]))


def _as_stored(draft: Draft, stored: Mapping[str, object]) -> None:
    """Takes the shape of the adapter that is continued from its own settings, as LLaMA-Factory
    does; the file's keys do not count.
    """
    if not stored:
        return
    kind = "dora" if stored.get("use_dora") else "rslora" if stored.get("use_rslora") else "lora"
    shape = {
        "kind": kind,
        "rank": stored.get("r"),
        "alpha": stored.get("lora_alpha"),
        "dropout": stored.get("lora_dropout", 0.0),
        "modules_to_save": stored.get("modules_to_save") or [],
    }
    for name, value in shape.items():
        draft.put(f"adapter.{name}", value, "adapter_name_or_path")
    shape_keys = (
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_target",
        "use_dora",
        "use_rslora",
        "additional_target",
    )
    for key in shape_keys:
        draft.ignore(key, "the adapter in adapter_name_or_path has its own")


def _train_only(draft: Draft) -> None:
    values = draft.values
    draft.put("train_only.layers", values["freeze_trainable_layers"], "freeze_trainable_layers")
    if values["use_llama_pro"]:
        draft.put("train_only.spread", True, "use_llama_pro")
    modules = values["freeze_trainable_modules"]
    draft.put(
        "train_only.modules", "all" if modules in ("all", ["all"]) else modules, "freeze_trainable_modules"
    )
    if values["freeze_extra_modules"]:
        draft.put("train_only.extra", values["freeze_extra_modules"], "freeze_extra_modules")


def fill_data(draft: Draft) -> None:
    """The sources, and how their rows are encoded."""
    values = draft.values
    train = values["dataset"]
    sources = _sources(draft, train, "dataset")
    evaluated = _sources(draft, values["eval_dataset"], "eval_dataset")
    if train is None and draft.verb != "train":  # a file that predicts: its rows can still be previewed
        if evaluated:
            draft.put("data.train", evaluated, "eval_dataset")
    else:
        draft.put("data.train", sources or "?", "dataset", "dataset_dir", "max_samples")
        if evaluated:
            draft.put("data.eval", evaluated, "eval_dataset")
        elif values["val_size"]:
            size = values["val_size"]
            draft.put("data.eval", size if size < 1 else int(size), "val_size")
    if "data" in draft.config:
        _rows(draft)
        _mix(draft)
        _pictures(draft, [*sources, *evaluated])


def _sources(draft: Draft, names: list[str] | None, key: str) -> list[dict[str, object]]:
    if not names:
        return []
    values = draft.values
    limit = values["max_samples"]
    try:
        return read_datasets(
            names,
            values["dataset_dir"],
            where=values.place(key),
            file_where=values.place("dataset_dir") if "dataset_dir" in values.given else "",
            stage=values["stage"],
            max_samples=limit if limit is not None and limit > 0 else None,
        )
    except ConfigError as error:
        draft.problems += error.problems
        return []


_OF_PICTURES = (
    "image_max_pixels", "image_min_pixels", "media_dir",
    "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen",
    "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model",
)  # fmt: skip


def _videos(draft: Draft) -> None:
    """The frames of videos."""
    names = {"fps": "video_fps", "max": "video_maxlen"}
    names |= {"pixels.min": "video_min_pixels", "pixels.max": "video_max_pixels"}
    for ours, key in names.items():
        draft.put(f"data.frames.{ours}", draft.values[key], key)
    if draft.values["use_audio_in_video"]:
        draft.refuse("use_audio_in_video", "the sound of videos is not read", "set it to false")


def _pictures(draft: Draft, sources: list[dict[str, object]]) -> None:
    """The sizes of pictures and the trained parts, if a dataset has pictures or videos."""
    values = draft.values
    columns = [one for source in sources if isinstance(one := source.get("columns"), dict)]
    has_videos = any(one.get("videos") for one in columns)
    sees = has_videos or any(one.get("images") for one in columns)
    for key in _OF_PICTURES:
        of_videos = key.startswith("video_")
        if values.is_set(key) and not (has_videos if of_videos else sees):
            draft.ignore(key, "only with videos" if of_videos else "only with images")
    if not sees:
        return
    if has_videos:
        _videos(draft)
    for key in ("image_do_pan_and_scan", "crop_to_patches"):
        if values[key]:
            draft.refuse(key, "pictures are cut as the model's processor does by default", "set it to false")
    draft.put("data.pixels.min", values["image_min_pixels"], "image_min_pixels")
    draft.put("data.pixels.max", values["image_max_pixels"], "image_max_pixels")
    folder = values["media_dir"] or values["dataset_dir"]
    if folder != "ONLINE" and not folder.startswith("REMOTE:"):
        draft.put("data.media_dir", folder, "media_dir", "dataset_dir")
    frozen = {
        "language": "freeze_language_model",
        "projector": "freeze_multi_modal_projector",
        "vision": "freeze_vision_tower",
    }
    trained = [part for part, key in frozen.items() if not values[key]]
    if not trained:
        draft.refuse("freeze_language_model", "nothing is trained", "set it to false, or train another part")
        return
    draft.put("train_parts", trained, *frozen.values())
    if "projector" in trained and values["finetuning_type"] == "lora":
        draft.warnings.append(
            "freeze_multi_modal_projector: LLaMA-Factory adapts the projector; here it is trained in full"
        )


def _rows(draft: Draft) -> None:
    values = draft.values
    pretrain, is_preference = values["stage"] == "pt", values["stage"] in PREFERENCE_STAGES
    if values["template"] is not None:
        draft.put("data.template", f"lf:{values['template']}", "template")
        try:
            find_lf_template(values["template"])
        except DataError as error:
            why = error.problems[0].why.replace("lf:", "")
            near = nearest(values["template"], template_names())
            draft.refuse("template", why, f"did you mean `{near}`?")
    elif pretrain:  # texts with their end of sequence, and no other special token
        draft.put("data.template", "lf:empty")
    else:
        draft.warnings.append(
            f"{draft.name} names no template: rows are written with the tokenizer's own chat template"
        )
    packed = values["neat_packing"] or values["packing"] or (values["packing"] is None and pretrain)
    packs = values["neat_packing"] or bool(values["packing"])
    if is_preference and packed:
        packed = False  # LLaMA-Factory never packs pairs and rated rows
        draft.ignore("packing", "no effect with stage: rm, dpo and kto; data.packing=true packs them")
    # LLaMA-Factory takes one off where packing is asked for, and not where pretraining brings it.
    draft.put("data.max_length", values["cutoff_len"] - (1 if packs else 0), "cutoff_len")
    too_long = "balanced" if not pretrain else "split" if packed else "cut"
    draft.put("data.too_long", too_long, "cutoff_len")
    draft.put("data.on_bad_row", "skip")
    draft.put("data.packing", bool(packed), "neat_packing", "packing", "stage")
    if not pretrain:
        loss_on = (
            "all" if values["train_on_prompt"] else "last-answer" if values["mask_history"] else "answers"
        )
        draft.put("data.loss_on", loss_on, "train_on_prompt", "mask_history")
        if values["template"] is not None:
            keeps = values["enable_thinking"] and values["preserve_thinking"]
            thinking = "preserve" if keeps else values["enable_thinking"]
            draft.put("data.thinking", thinking, "enable_thinking", "preserve_thinking")
    if values["split_special_tokens"]:
        draft.put("data.control_tokens", "escape", "split_special_tokens")
    _default_system(draft)


def _default_system(draft: Draft) -> None:
    values = draft.values
    if values["default_system"] is None:
        return
    if values["stage"] == "pt":
        draft.ignore("default_system", "texts have no system message")
    elif values["template"] is None:
        draft.refuse(
            "default_system",
            "the tokenizer's own chat template has its own default",
            "add `template: NAME`, or put the system message into the rows",
        )
    else:
        draft.put("data.system", values["default_system"], "default_system")


def _mix(draft: Draft) -> None:
    values = draft.values
    if values["mix_strategy"] != "concat":
        draft.put("data.mix.strategy", values["mix_strategy"], "mix_strategy")
        if values["interleave_probs"]:
            draft.put("data.mix.probabilities", values["interleave_probs"], "interleave_probs")


def _stored_settings(adapter: str) -> dict[str, object]:
    """The settings of an adapter on this machine, or of that in a run; empty if there is none,
    which is refused when it is loaded.
    """
    for folder in (Path(adapter).expanduser(), Path(adapter).expanduser() / "adapter"):
        if settings := read_object(folder / "adapter_config.json"):
            return settings
    return {}

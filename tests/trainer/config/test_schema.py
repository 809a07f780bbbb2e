"""A config survives being written and read again; its digest is of what is learnt; every key is
described.

Run: pytest tests/config
"""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from unisono.front.cli.init import template_names, template_text
from unisono.trainer.config import RunConfig, config_digest
from unisono.trainer.config.limits import LIMITS, Limit, accepting_objectives
from unisono.trainer.config.sections import path_keys
from unisono.trainer.config.yaml_file import all_keys, describe_field, section_in, words_in

GOOD: dict[str, Any] = {"model": "m", "data": {"train": "d"}, "output_dir": "o"}


def make(**keys: Any) -> RunConfig:
    return RunConfig.model_validate({**GOOD, **keys})


def test_the_keys_that_name_files_are_declared_in_the_schema() -> None:
    marks = path_keys(RunConfig)
    optional = {"adapter.from", "adapter.merge", "preference.reference", "diffusion.prior"}
    inputs = {"model.path", "model.tokenizer", "data.train", "data.eval", "data.template", "data.media_dir"}
    assert set(marks) == optional | inputs | {
        "output_dir",
        "rewards.schema",
        "rewards.path",
        "eval.metrics.schema",
    }
    assert {key for key, mark in marks.items() if mark.shows_absence} == optional
    assert {key for key, mark in marks.items() if mark.is_output} == {"output_dir"}


@pytest.mark.parametrize("name", template_names())
def test_a_config_written_out_in_full_means_the_same(name: str) -> None:
    config = RunConfig.model_validate(yaml.safe_load(template_text(name)))
    body = config.model_dump(mode="json", by_alias=True)
    again = RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(body)))))
    assert again == config
    assert config_digest(again) == config_digest(config)


@pytest.mark.parametrize(
    "change",
    [
        {"output_dir": "p"},
        {"duration": "9 epochs"},
        {"restarts": 0},
        {"grace": "1 minute"},
        {"track": ["tensorboard"]},
    ],
)
def test_moving_prolonging_and_watching_leave_it_the_same_run(change: dict[str, Any]) -> None:
    assert config_digest(make(**change)) == config_digest(make())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1}, {"optim": {"lr": 1e-3}}, {"adapter": None}, {"adapter": {"rank": 8}}, {"data": {"train": "e"}},
        {"batch": {"global": 8}}, {"batch": {"micro": 1}}, {"objective": "pretrain"}, {"model": "n"},
    ],
)  # fmt: skip
def test_whatever_changes_what_is_learned_makes_a_different_run(change: dict[str, Any]) -> None:
    assert config_digest(make(**change)) != config_digest(make())


def test_a_default_that_is_written_out_is_the_same_run() -> None:
    assert config_digest(make(seed=0, optim={"lr": 2e-4}, adapter={"rank": 16})) == config_digest(make())


def test_the_short_form_of_a_model_is_the_long_one() -> None:
    assert make(model={"path": "m"}) == make()


def test_configs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"parallel": {"strategy": "fsdp"}}, "parallel.strategy: objective diffusion does not take fsdp"),
        ({"duration": "2M tokens"}, "duration: pictures have no tokens"), ({"eval": {"every": "1M tokens"}}, "eval.every: pictures"),
        ({"adapter": None}, "adapter: objective diffusion does not take null"), ({"adapter": {"kind": "dora"}}, "adapter.kind"), ({"adapter": {"init": "pissa"}}, "adapter.init"),
        ({"adapter": {"from": "a"}}, "adapter.from"), ({"model": {"path": "m", "quantize": "nf4"}}, "model.quantize"),
        ({"eval": {"exact_match": True}, "data": {"train": "d", "eval": 0.1}}, "eval.exact_match"), ({"optim": {"label_smoothing": 0.1}}, "optim.label_smoothing"),
        ({"data": {"train": [{"path": "d", "format": "alpaca"}]}}, "data.train"), ({"diffusion": {"text_lr": 1e-4}}, "diffusion.text_lr"),
        ({"objective": "sft", "data": {"train": "d", "resolution": 512}}, "data.resolution"),
        ({"objective": "sft", "adapter": {"targets": "unet"}}, "adapter.targets"), ({"objective": "sft", "diffusion": {"cache": False}}, "diffusion.cache"),
    ],
)  # fmt: skip
def test_keys_of_text_are_refused_for_pictures_and_the_other_way_round(
    change: dict[str, Any], key: str
) -> None:
    usual = {"objective": "diffusion", "adapter": {"targets": "unet"}}
    make(**usual)
    with pytest.raises(ValueError, match=re.escape(key)):
        make(**(usual | change))


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.key}-{limit.objectives[0]}")
def test_a_limit_says_why_and_which_objectives_take_the_value(limit: Limit) -> None:
    others = {
        "adapter.from": "a",
        "adapter.merge": ["a"],
        "adapter.modules_to_save": ["a"],
        "eval.exact_match": True,
        "eval.metrics": ["exact"],
    }
    others |= {"eval.samples": 1, "optim.label_smoothing": 0.1, "model.embedding_noise": 1.0}
    others["adapter.dropout"] = 0.1
    others["optim.router_loss"] = {"z_loss": 0.001}
    value = limit.values[0] if limit.values else others.get(limit.key) or _second_word(limit.key)
    first, _, key = limit.key.partition(".")
    section = {"mix": {"strategy": value}} if key == "mix.strategy" else {key: value} if key else value
    needed: dict[str, Any] = {"data": {"train": "d", "eval": 0.1}, "model": {"path": "m"}}
    changed = needed | {first: {**needed.get(first, {}), **section} if isinstance(section, dict) else section}
    accepting = accepting_objectives(limit.key, value)
    assert accepting
    assert not set(accepting) & set(limit.objectives)
    for objective in accepting:
        make(objective=objective, **changed, **_needed_by(objective))
    for objective in limit.objectives:
        with pytest.raises(
            ValueError, match=f"{re.escape(limit.key)}: objective {objective} does not"
        ) as error:
            make(objective=objective, **changed, **_needed_by(objective))
        assert f"; {limit.why}; " in str(error.value)
        assert f"(accepted by: {', '.join(accepting)})" in str(error.value)


_VLLM = {"engine": "vllm", "url": "http://127.0.0.1:8000"}


def _needed_by(objective: str) -> dict[str, Any]:
    return {"rewards": ["exact"]} if objective == "grpo" else {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rewards": []}, "rewards: without a reward"),
        ({"rewards": ["exat"]}, "rewards.0.use: there is no reward exat; did you mean `exact`?"),
        ({"rewards": [{"use": "exact", "pattern": "x"}]}, "rewards.0.pattern: exact does not use it"),
        ({"rewards": ["regex"]}, "rewards.0.pattern: regex needs it"),
        ({"rewards": ["model"]}, "rewards.0.path: model needs it"),
        ({"rewards": [{"use": "exact", "device": "cuda"}]}, "rewards.0.device: exact does not use it"),
        ({"batch": {"global": 12}}, "batch.global: 12 answers of a step are not whole groups of 8"),
        ({"batch": {"per_rank": 8}}, "batch.per_rank: answers of a step are counted over all ranks"),
        ({"rollout": {"group": 1}}, "rollout.group: an answer is compared with others"),
        ({"rollout": {"max_new_tokens": 1024}}, "rollout.max_new_tokens: 1024 leave no room"),
        ({"grpo": {"loss": "cispo", "dual_clip": 3.0}}, "grpo.dual_clip: cispo limits ratios"),
        (
            {"grpo": {"correction": "token_mask"}, "rollout": {"steps": 2}},
            "grpo.correction: with several steps for the same answers",
        ),
        ({"rollout": _VLLM | {"url": None}}, "rollout.url: engine vllm needs its address"),
        ({"rollout": {"url": "http://x"}}, "rollout.url: engine own does not use it"),
        ({"rollout": {"patience": "1 minute"}}, "rollout.patience: engine own does not use it"),
        ({"rollout": _VLLM | {"url": "ftp://x"}}, "'ftp://x' is not an http or https URL"),
        ({"rollout": _VLLM | {"url": "http://x?key=1"}}, "it has more than a host and a port"),
        ({"rollout": _VLLM | {"patience": "1 hour"}}, "'1 hour' is too long; write at most 25 minutes"),
        ({"rollout": _VLLM | {"temperature": 0.7, "top_k": 5}}, "rollout.temperature: vllm gives log-prob"),
        ({"rollout": _VLLM, "adapter": None}, "rollout.engine: vllm gets the weights as a LoRA adapter"),
        (
            {"rollout": _VLLM, "adapter": {"kind": "dora"}},
            "rollout.engine: vllm does not load adapters of kind",
        ),
        (
            {"rollout": _VLLM, "adapter": {"modules_to_save": ["lm_head"]}},
            "rollout.engine: vllm does not load whole modules",
        ),
        ({"duration": "1M tokens"}, "duration: the length of answers is not known in advance"),
        ({"objective": "sft"}, "rewards: objective sft does not use it"),
    ],
)
def test_rewards_and_rollouts_that_contradict_each_other_are_refused(
    change: dict[str, Any], problem: str
) -> None:
    usual = {"objective": "grpo", "rewards": ["exact"]}
    make(**usual)
    with pytest.raises(ValueError, match=re.escape(problem)):
        make(**(usual | change))


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"eval": {"metrics": ["exat"]}},
            "eval.metrics.0.use: there is no metric exat; did you mean `exact`?",
        ),
        ({"eval": {"metrics": ["model"]}}, "eval.metrics.0.use: there is no metric model"),
        ({"eval": {"metrics": ["regex"]}}, "eval.metrics.0.pattern: regex needs it"),
        ({"eval": {"metrics": [{"use": "exact", "weight": 2}]}}, "eval.metrics.0.weight"),
        ({"eval": {"metrics": ["m.py:loss"]}}, "eval.metrics.0: the name loss is taken"),
        ({"checkpoint": {"best": "rouge"}}, "checkpoint.best: rouge is not a metric of this run"),
        ({"objective": "dpo", "eval": {"metrics": ["exact"]}}, "eval.metrics: objective dpo does not use it"),
        (
            {"data": {"train": "x.jsonl"}, "eval": {"metrics": ["exact"]}},
            "eval.metrics: there is no evaluation data",
        ),
    ],
)
def test_metrics_that_cannot_be_measured_are_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(text)):
        make(**{"data": {"train": "x.jsonl", "eval": 4}, **sections})


def test_metrics_are_taken_and_written() -> None:
    metrics = ["exact", {"use": "length", "max": 5}, "m.py:f1"]
    config = make(data={"train": "x.jsonl", "eval": 4}, eval={"metrics": metrics}, checkpoint={"best": "f1"})
    assert config.best_metric == "f1"
    assert RunConfig.model_validate(config.model_dump(by_alias=True)).eval == config.eval


def test_a_server_that_samples_is_taken_and_written() -> None:
    rollout = make(objective="grpo", rewards=["exact"], rollout=_VLLM | {"url": "https://host:1/v/"}).rollout
    assert (rollout.url, rollout.patience) == ("https://host:1/v", "5 minutes")
    own = make(objective="grpo", rewards=["exact"])
    assert RunConfig.model_validate(own.model_dump(by_alias=True)).rollout == own.rollout


def _second_word(key: str) -> str:
    section: Any = RunConfig
    annotation: Any = None
    for part in key.split("."):
        annotation = section.model_fields[part].annotation
        section = section_in(annotation)
    return words_in(annotation)[1]


def test_every_key_reports_in_words_what_it_takes() -> None:
    assert {"model.path", "batch.global", "data.train.weight", "optim.lr"} <= set(all_keys(RunConfig))
    for name in all_keys(RunConfig):
        section: Any = RunConfig
        field = None
        for part in name.split("."):
            field = {f.alias or n: f for n, f in section.model_fields.items()}[part]
            section = section_in(field.annotation)
        assert field is not None
        words = describe_field(field)
        assert words
        assert "a value" not in words, name


def _lists_of_texts(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Key and a valid text of every list of texts in the schema."""
    for name, known in section.model_fields.items():
        key = f"{prefix}{known.alias or name}"
        inner = section_in(known.annotation)
        if inner is not None:
            yield from _lists_of_texts(inner, f"{key}.")
        text = _text_of_list(known.annotation)
        if text is not None:
            yield key, text


def _text_of_list(annotation: Any) -> str | None:
    if get_origin(annotation) is list:
        item = get_args(annotation)[0]
        if get_origin(item) is Annotated:
            item = get_args(item)[0]
        words = (
            [word for word in get_args(item) if isinstance(word, str)] if get_origin(item) is Literal else []
        )
        return words[0] if words else "proj" if item is str else None
    return next(
        (text for member in get_args(annotation) if (text := _text_of_list(member)) is not None), None
    )


LISTS = dict(_lists_of_texts(RunConfig))


def _with_value(key: str, value: object) -> RunConfig | str:
    """The config with a key, or its errors."""
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "x.jsonl"}, "output_dir": "o"}
    *sections, last = key.split(".")
    section = tree
    for name in sections:
        if name == "train" and last != "train":
            section[name] = [{"path": "x"}]  # a source has keys of its own
            section = section[name][0]
        else:
            section = section.setdefault(name, {})
    section[last] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        return "\n".join(item["msg"] for item in error.errors())


@pytest.mark.parametrize("key", LISTS)
def test_a_text_is_a_list_of_one_wherever_a_list_of_texts_is_taken(key: str) -> None:
    text = ".txt" if key.endswith("caption_extensions") else LISTS[key]
    assert _with_value(key, text) == _with_value(key, [text])


def test_the_lists_of_texts_are_found_in_the_schema() -> None:
    assert {"track", "adapter.targets", "adapter.modules_to_save", "data.ignore"} <= LISTS.keys()
    found = _with_value("track", "wandb")
    assert isinstance(found, RunConfig)
    assert found.track == ["wandb"]


def test_a_word_that_a_key_takes_itself_is_no_list() -> None:
    found = _with_value("adapter.targets", "all-linear")
    assert isinstance(found, RunConfig)
    assert found.adapter is not None
    assert found.adapter.targets == "all-linear"
    assert _with_value("data.train", "y.jsonl").data.train == "y.jsonl"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("data", "objective", "words"),
    [
        ({"template": "lf:qwen3"}, "sft", "cuts prompt and answer as LLaMA-Factory does; set it to balanced"),
        ({"loss_on": "all"}, "sft", "there is no prompt to cut"),
        ({}, "pretrain", "there is no prompt to cut"),
    ],
)
def test_keep_answer_needs_a_prompt_that_it_may_cut(data: dict[str, Any], objective: str, words: str) -> None:
    config = {"model": "m", "objective": objective, "output_dir": "o"}
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate(config | {"data": {"train": "x", "too_long": "keep-answer", **data}})
    for known in ("sft", "dpo", "kto"):
        RunConfig.model_validate(
            {**config, "objective": known, "data": {"train": "x", "too_long": "keep-answer"}}
        )

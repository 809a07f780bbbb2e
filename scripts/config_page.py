"""The page docs/reference/config.md in English and Chinese: every key of a config, from the schema,
the rules of a resume, and the names of keys in other tools.

Used by scripts/make_reference.py.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from key_names import About, about_keys, names_without_key, other_names
from key_types import type_of
from page_parts import Translate
from unisono.jobs.runs.config_changes import RULES, rule_of
from unisono.trainer.config.heads import CLASSIFY, EMBED
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import DIFFUSION, GRPO, USED, Section
from unisono.trainer.config.yaml_file import Takes, section_in

LABELS = {
    "en": {"type": "Type", "default": "Default", "example": "Example", "resume": "On a resume", "known": "Also known as", "required": "required",
           "section": "section", "or null": " or `null`", "below": "the values below", "with": ", with {}", "stop": ".", "colon": ": ", "join": ", ", "and": " · ",
           "in": " ({})", "allow": "only with `--allow {}`", "never": "cannot change", "may": "may change", "name": "name", "here": "what holds"},
    "zh": {"type": "类型", "default": "默认值", "example": "示例", "resume": "续训时", "known": "其他名称", "required": "必填",
           "section": "配置节", "or null": " 或 `null`", "below": "见下面各项", "with": "，同时设置 {}", "stop": "。", "colon": "：", "join": "、", "and": " · ",
           "in": "（{}）", "allow": "须加 `--allow {}`", "never": "不能改变", "may": "可以改变", "name": "名称", "here": "对应做法"},
}  # fmt: skip
"""Words of the page that are no sentences; sentences are in the catalogue of texts."""
SAMPLE = {"path": "builtin:tiny", "train": "train.jsonl", "output_dir": "runs/first"}
"""Values of required keys in the file of defaults."""
_DEEPEST = 6
_SETTLED = {
    "parallel.strategy", "device", "batch.micro", "memory.gradient_checkpointing",
}  # fmt: skip
"""Keys of which the plan has the value, and a different one changes rounding only."""


@dataclass(frozen=True)
class Entry:
    """A key of a config.

    Attributes:
        name: dotted.
        inner: the section that it holds.
    """

    name: str
    field: FieldInfo
    inner: type[Section] | None

    @property
    def is_like_another(self) -> bool:
        """Whether it only has the value of another key for one source of pictures."""
        return (self.field.description or "").startswith(f"like {DIFFUSION}.")


def entries(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[Entry]:
    """Every key in the order of the schema; those of data.eval are those of data.train."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = section_in(field.annotation)
        assert inner is None or issubclass(inner, Section)
        yield Entry(key, field, inner)
        if inner is not None and key != "data.eval":
            yield from entries(inner, f"{key}.")


def config_page(t: Translate, language: str) -> list[str]:
    """Every key of a config, names without a key, and a file of all defaults."""
    lines = [
        f"# {t('Configuration')}", "",
        t("A config is a YAML file; `unisono init` writes one to start from. Only `model`, `data.train` and `output_dir` are required."), "",
        f"- {t('In the file, keys are nested: `optim.lr` is `lr` below `optim`. On the command line, write `optim.lr=1.0e-4` behind the file; this overrides the file.')}",
        f"- {t('Unknown keys are refused, and the error shows the nearest known key. Relative paths start at the working directory.')}",
        f"- {t('To find a key by its name in LLaMA-Factory, TRL, transformers, axolotl, torchtune or sd-scripts, search this page for that name.')}",
        f"- {t('**On a resume** says whether a key may change when a run continues from a checkpoint; see [resume](../how-to/resume.md).')}", "",
        t("[All defaults as one file](#all-defaults) · [Names without a key](#names-without-a-key)"),
    ]  # fmt: skip
    alike = [entry for entry in entries() if entry.is_like_another]
    for entry in entries():
        if entry not in alike:
            lines += ["", *_entry(entry, t, language)]
            if entry.name == "data.train.pictures":
                lines += ["", *_alike(alike, t, language)]
    lines += ["", *_without_key(t, language), "", f"## {t('All defaults')}", ""]
    lines += [
        t(
            "Copy the keys that you change; a key that a file does not have takes the value below. `model.path`, `data.train` and `output_dir` are examples."
        ),
        "",
    ]
    return [*lines, "```yaml", *defaults_file(t), "```"]


def _entry(entry: Entry, t: Translate, language: str) -> Iterator[str]:
    label, about = LABELS[language], about_keys().get(entry.name, About())
    yield from (f"{'#' * min(entry.name.count('.') + 2, _DEEPEST)} `{entry.name}`", "")
    yield from (_meaning(entry, t, language), "")
    for name, text in (
        ("type", _type(entry, t, language)),
        ("default", _default(entry, label)),
        ("example", _example(entry, about, label)),
        ("resume", "" if entry.inner and entry.name not in RULES else _resume(entry.name, t, label)),
        ("known", _known(entry, about, language)),
    ):
        if text:
            yield f"- **{label[name]}**{label['colon']}{text}"


def _meaning(entry: Entry, t: Translate, language: str) -> str:
    """What the schema says, as sentences."""
    about_section = entry.inner is not None and entry.name not in ("data.train", "data.eval")
    texts = [_doc(entry.inner) if entry.inner and about_section else "", entry.field.description or ""]
    words = {*_words(entry.field.annotation), *_words_of_names(entry.field), "null", "true", "false", "auto"}
    words |= {"FILE.py:CLASS"} if entry.name in ("objective", "optim.kind") else set()
    words |= set(USED) if entry.name.startswith("preference.") else set()
    said = [sentence(t(text), words, language) for text in texts if text]
    if entry.name == "data.eval":
        said.append(t("A list holds sources with the same keys as in [`data.train`](#datatrain)."))
    return ("" if language == "zh" else " ").join(said)


def _words_of_names(field: FieldInfo) -> tuple[str, ...]:
    """The names that a field takes by a table."""
    return next((item.words for item in field.metadata if isinstance(item, Takes)), ())


def sentence(text: str, words: set[str], language: str) -> str:
    """A text with a capital letter and a full stop; the values of which it says the meaning as
    code: `null: …`.
    """
    word = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    several = rf"(?:{word})(?:(?:, |、)(?:{word}))*"
    source = r" ?[(（]arXiv:[^)）]*[)）]"
    shown = re.sub(
        rf"(?<![\w`./-])({several})(?=(?:{source})?(?:[:：]|(?:,| and|、| 和| 与) ?(?:{word}){source}))|^({word})(?=[ ,，])(?! of)",
        lambda found: re.sub(word, lambda one: f"`{one[0]}`", found[0]),
        text,
    )
    if language == "en" and shown[:1].isascii():
        shown = f"{shown[:1].upper()}{shown[1:]}"
    return shown if shown.endswith((".", "。")) else f"{shown}{LABELS[language]['stop']}"


def _doc(section: type[Section]) -> str:
    """The first paragraph of a docstring."""
    return " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())


def _type(entry: Entry, t: Translate, language: str) -> str:
    if entry.inner is None or entry.name in ("data.train", "data.eval"):
        return type_of(entry.field, t, language)
    label = LABELS[language]
    return label["section"] + (label["or null"] if type(None) in get_args(entry.field.annotation) else "")


def _default(entry: Entry, label: dict[str, str]) -> str:
    if entry.field.is_required():
        return label["required"]
    if isinstance(entry.field.default, Section):
        return label["below"]
    return f"`{as_yaml(entry.field.default)}`"


def as_yaml(value: Any) -> str:
    """A value on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def example_value(entry: Entry, about: About) -> str:
    """A value as YAML: the file's, the other one of a switch or choice, or the default."""
    words = [word for word in _words(entry.field.annotation) if word != entry.field.default]
    if about.example:
        return about.example
    if isinstance(entry.field.default, bool):
        return as_yaml(not entry.field.default)
    return as_yaml(words[0] if words else entry.field.default)


def _words(annotation: Any) -> list[str]:
    found: list[str] = []
    for argument in get_args(annotation):
        found += [argument] if isinstance(argument, str) else _words(argument)
    return found


def example_of(entry: Entry, about: About) -> str:
    """A line of YAML that sets the key; empty for a section that is described by its keys."""
    if entry.name in ("model", "data") or (isinstance(entry.field.default, Section) and not about.example):
        return ""
    return example_line(entry.name, example_value(entry, about))


def _example(entry: Entry, about: About, label: dict[str, str]) -> str:
    needs = label["join"].join(f"`{one}`" for one in about.with_)
    shown = example_of(entry, about)
    return f"`{shown}`{label['with'].format(needs) if needs else ''}" if shown else ""


def with_keys(entry: Entry, about: About) -> tuple[str, ...]:
    """Other keys that the example needs; that of image models is said of their section."""
    if entry.name.startswith((f"{DIFFUSION}.", "data.train.pictures")) or entry.name == DIFFUSION:
        return (f"objective: {DIFFUSION}", *about.with_)
    if entry.name.partition(".")[0] in ("rollout", "grpo"):
        return (f"objective: {GRPO}", "rewards: [exact]", *about.with_)
    return (f"objective: {GRPO}", *about.with_) if entry.name.startswith("rewards") else about.with_


_REWARD = {
    "rewards.use": "[{",
    **{f"rewards.{name}": "[{use: exact, " for name in ("weight", "deadline", "on_error", "column")},
    "rewards.pattern": "[{use: regex, ",
    "rewards.min": "[{use: length, ",
    "rewards.max": "[{use: length, ",
    "rewards.tags": "[{use: format, ",
    "rewards.schema": "[{use: json_schema, ",
    "rewards.path": "[{use: model, ",
    "rewards.device": "[{use: model, path: runs/reward, ",
}
"""Of an example its beginning: the function that has the key."""
_METRICS = "eval.metrics."


def example_line(key: str, value: str) -> str:
    """E.g. `optim: {lr: 1.0e-4}`; of a key of a source with its list."""
    if key.startswith(_METRICS):
        listed = example_line(f"rewards.{key.removeprefix(_METRICS)}", value).removeprefix("rewards: ")
        return f"eval: {{metrics: {listed}}}"
    if key.startswith("rewards."):
        return f"rewards: [{nested(key.removeprefix('rewards.'), value)}]".replace(
            "[{", _REWARD.get(key, "[{")
        )
    before, _, inner = key.partition("data.train.")
    if before or not inner:
        return nested(key, value)[1:-1]
    about = {
        "path": "",
        "tags": "path: train.jsonl, format: sharegpt, ",
        "pictures": "path: pictures/cats, ",
    }.get(inner.partition(".")[0], "path: train.jsonl, ")
    return f"data: {{train: [{{{about}{nested(inner, value)[1:-1]}}}]}}"


def nested(key: str, value: str) -> str:
    """E.g. `{optim: {lr: 1.0e-4}}`."""
    first, _, rest = key.partition(".")
    return f"{{{first}: {nested(rest, value) if rest else value}}}"


def _resume(key: str, t: Translate, label: dict[str, str]) -> str:
    """Whether it may change when a run is resumed."""
    rule = rule_of(key)
    says = label["in"].format(t(rule.says)) if rule.says else ""
    if key == "duration":
        return t("may grow; the steps that are done cannot be lost.")
    if rule.kind == "contents":
        return t("may change if the contents stay the same, else only with `--allow {name}`.").format(
            name=rule.name
        )
    if rule.kind == "decided":
        if key in _SETTLED:
            return t("may change; losses then agree to rounding, not bit-exactly.")
        return t("a different result of `auto`, or a different value, only with `--allow {name}`.").format(
            name=key
        )
    words = {"meaning": label["allow"].format(key), "fixed": label["never"]}.get(rule.kind, label["may"])
    return f"{words}{says}{label['stop']}"


def _known(entry: Entry, about: About, language: str) -> str:
    label = LABELS[language]
    names = [
        f"`{name}`{label['in'].format(label['join'].join(tools))}"
        for name, tools in other_names().get(entry.name, {}).items()
    ]
    words = [*(about.zh if language == "zh" else ()), *about.words]
    return label["and"].join([*words, *names])


def _alike(alike: list[Entry], t: Translate, language: str) -> Iterator[str]:
    """The keys of a source of pictures that are keys of `diffusion` for it, at once."""
    yield t(
        "These keys have the type and meaning of the key of `diffusion` with the same name, for the pictures of this source; their default is `null`, the value of that key:"
    )
    yield ""
    yield from (f"- `{entry.name}`" for entry in alike)


def _without_key(t: Translate, language: str) -> Iterator[str]:
    label = LABELS[language]
    yield from (f"## {t('Names without a key')}", "")
    yield from (t("What other tools set by a key, and unisono does not."), "")
    yield from (f"| {label['name']} | {label['here']} |", "|---|---|")
    for entry in names_without_key():
        yield f"| {label['join'].join(entry['names'])} | {entry[language]} |"


def defaults_file(t: Translate) -> list[str]:
    """A config with every key at its default; what the default objective does not take is a
    comment.
    """
    lines: list[str] = []
    for name, field in RunConfig.model_fields.items():
        lines += _default_lines(field.alias or name, field, "")
    lines += [
        f"# {t('with `objective: dpo`, `kto`, `orpo` or `simpo`; the comment behind a key names the objectives that use it')}",
        "# preference:",
    ]
    section = RunConfig.model_fields["preference"].default
    for name, field in type(section).model_fields.items():
        users = [objective for objective, keys in USED.items() if name in keys]
        lines.append(f"#   {name}: {as_yaml(field.default)}  # {', '.join(users)}")
    lines += [
        f"# {t('with `objective: grpo`')}",
        "# rewards: [exact]",
        *_commented("rollout"),
        *_commented(GRPO),
    ]
    lines += [f"# {t('with `objective: classify`')}", *_commented(CLASSIFY)]
    lines += [f"# {t('with `objective: embed`')}", *_commented(EMBED)]
    return [*lines, f"# {t('with `objective: diffusion`')}", *_commented(DIFFUSION)]


def _commented(key: str) -> list[str]:
    """The defaults of a section of one objective, as comments."""
    section = RunConfig.model_fields[key].default
    fields = type(section).model_fields.items()
    return [f"# {key}:", *(f"#   {name}: {as_yaml(field.default)}" for name, field in fields)]


def _default_lines(key: str, field: FieldInfo, indent: str) -> Iterator[str]:
    """A key, and those of its section if the section is not null by default."""
    if key in ("preference", CLASSIFY, EMBED, DIFFUSION, "rewards", "rollout", GRPO):
        return
    inner = section_in(field.annotation)
    if inner is not None and key != "train" and (field.is_required() or isinstance(field.default, Section)):
        yield f"{indent}{key}:"
        for name, below in inner.model_fields.items():
            yield from _default_lines(below.alias or name, below, f"{indent}  ")
    else:
        yield f"{indent}{key}: {as_yaml(SAMPLE[key] if field.is_required() else field.default)}"

"""The reference pages are those that the code makes now.

Run: pytest tests/docs
"""

import ast
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

import make_reference
from config_page import LABELS, Entry, entries, example_of, nested, with_keys
from key_names import About, about_keys
from make_catalogue import COMPLETE, SOURCE, Text, Texts, catalogue_texts, mistakes
from tests import front_server
from unisono.base.locale import read_entries
from unisono.front.cli.app import command_names
from unisono.front.cli.output import GLOBAL_OPTIONS
from unisono.guard.supervise.child_process import child_environment
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import DIFFUSION, GRPO, USED, DiffusionSection
from unisono.trainer.config.yaml_file import all_keys, parse_yaml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["make_reference.py", "draw_rooms.py", "make_catalogue.py"])
def test_the_pages_made_from_the_code_are_up_to_date(script: str) -> None:
    """If this fails: python scripts/SCRIPT.

    For make_catalogue.py then translate what must be complete: `--check` lists it.
    """
    # Forked, as programs are: one of them imports torch.
    command = [sys.executable, "-m", "tests.guard.integrations.launched_programs", str(ROOT / "scripts" / script), "--check"]  # fmt: skip
    with front_server.start_rank(
        command, cwd=ROOT, env=child_environment(threads=1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        _, complaints = process.communicate()
    assert process.returncode == 0, complaints


def test_a_text_needs_a_translation_only_where_chinese_is_complete() -> None:
    entries = read_entries()
    texts = catalogue_texts()
    assert mistakes(texts, entries) == []
    for text, about in (
        *islice(((text, about) for text, about in texts.items() if about.is_complete), 0, None, 500),
        *islice(((text, about) for text, about in texts.items() if not about.is_complete), 0, None, 500),
    ):
        others = {english: chinese for english, chinese in entries.items() if english != text}
        expected = [f"no translation: {text} ({about.origin})"] if about.is_complete else []
        assert mistakes(texts, others) == expected


def test_a_changed_text_or_other_values_of_any_text_are_refused() -> None:
    texts = {"{n} rows of {path}": Text("trainer/data/sources.py", is_complete=False)}
    assert mistakes(texts, {"{n} rows of {path}": "{path} 的 {n} 行"}) == []
    assert mistakes(texts, {"{n} rows of {path}": "{n} 行"}) == [
        "other values in the translation: {n} rows of {path}"
    ]
    assert mistakes(texts, {"{n} rows": "{n} 行"}) == ["no such text: {n} rows"]


@pytest.mark.parametrize(
    ("code", "is_complete"),
    [
        ('raise DataError("the file has no rows")', False),
        ('verdict = Verdict(summary=f"rank {rank} has died", fix=("start it again",))', True),
        ('Evidence(where, f"it waits in {function}")', True),
        ('report.phase("merge", "merging the adapter")', True),
        ('typer.Option("--out", help="Write one file.")', True),
        ('verdict = judge(Verdict(summary=text)), "written to the log"', False),
    ],
)
def test_verdicts_progress_and_help_are_complete_in_any_file(code: str, *, is_complete: bool) -> None:
    texts = Texts(least_words=2, is_complete=False)
    texts.visit(ast.parse(code))
    assert set(texts.templates.values()) == {is_complete}


def test_every_file_in_the_list_of_what_is_complete_exists() -> None:
    assert all((SOURCE / name).exists() for names in COMPLETE.values() for name in names)


ENTRIES = list(entries())
PAGES = {language: ROOT / "docs" / folder / "reference" for language, folder in (("en", ""), ("zh", "zh"))}


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of a page."""
    parts = re.split(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("language", PAGES)
def test_every_key_has_a_heading_with_its_meaning_type_and_default(language: str) -> None:
    """Those of `data.eval` are those of `data.train`; those that a source of pictures has like
    `diffusion` are in one list.
    """
    page, label = sections(PAGES[language] / "config.md"), LABELS[language]
    known = {entry.name for entry in ENTRIES}
    assert set(all_keys(RunConfig)) - known == {
        name for name in all_keys(RunConfig) if name.startswith("data.eval.")
    }
    for entry in ENTRIES:
        if entry.is_like_another:
            assert f"- `{entry.name}`" in page["`data.train.pictures`"]
            continue
        meaning, *facts = page[f"`{entry.name}`"].strip().split("\n")
        assert len(meaning) > 3, f"{entry.name} has no description in the schema"
        assert all(
            any(fact.startswith(f"- **{label[name]}**") for fact in facts) for name in ("type", "default")
        )


@pytest.mark.parametrize(
    ("key", "words"),
    {
        "batch.accumulate": "gradient accumulation, `gradient_accumulation_steps` (transformers, 梯度累积",
        "batch.global": "batch size, 批大小",
        "batch.per_rank": "`per_device_train_batch_size`, `micro_batch_size` (axolotl)",
        "data.max_length": "`cutoff_len` (LLaMA-Factory), `max_seq_length`, `sequence_len` (axolotl), `tokenizer.max_seq_len` (torchtune)",
        "model.dtype": "bf16, fp16, mixed precision, 混合精度",
        "data.eval": "`val_size`, validation split, 验证集",
        "adapter.alpha": "`lora_alpha`, `network_alpha` (sd-scripts)",
        "adapter.rank": "`lora_r` (TRL, `lora_rank`",
        "model.quantize": "4-bit, QLoRA, `load_in_4bit`, `adapter: qlora` (axolotl)",
        "data.loss_on": "mask the prompt, `train_on_inputs`, `assistant_only_loss`",
        "parallel.strategy": "DeepSpeed, ZeRO, FSDP, `deepspeed`",
        "optim.weight_decay": "weight decay, 权重衰减",
        "optim.warmup": "`warmup_ratio`, `warmup_steps`",
        "optim.schedule": "`lr_scheduler_type`",
        "eval.stop_after": "early stopping, `early_stopping_patience`, 早停",
        "memory.gradient_checkpointing": "activation checkpointing, `enable_activation_checkpointing`",
        "model.embedding_noise": "`neftune_noise_alpha`",
        "objective": "`rl: dpo` (axolotl), `stage`, `DPOTrainer`",
    }.items(),
    ids=lambda one: one if "," not in one else "words",
)  # fmt: skip
def test_a_key_is_found_by_its_names_in_other_tools(key: str, words: str) -> None:
    english, chinese = (sections(folder / "config.md")[f"`{key}`"] for folder in PAGES.values())
    for word in words.split(", "):
        assert word in english or not word.isascii()
        assert word.replace(" (", "（").replace(")", "）") in chinese


@pytest.mark.parametrize("word", ["flash attention", "`logging_steps`", "`streaming`", "DeepSpeed config"])
def test_a_name_without_a_key_is_answered(word: str) -> None:
    assert word in sections(PAGES["en"] / "config.md")["Names without a key"]
    assert word in sections(PAGES["zh"] / "config.md")["没有对应配置项的名称"]


def test_every_key_in_the_file_of_words_exists() -> None:
    assert set(about_keys()) <= {entry.name for entry in ENTRIES}


def merged(values: Any, more: Any) -> Any:
    """A mapping with another one in it."""
    if not isinstance(values, dict) or not isinstance(more, dict):
        return more
    return values | {key: merged(values.get(key), value) for key, value in more.items()}


REQUIRED = {"model": {"path": "builtin:tiny"}, "data": {"train": "train.jsonl"}, "output_dir": "runs/first"}


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.is_like_another], ids=lambda entry: entry.name)  # fmt: skip
def test_the_example_of_a_key_is_a_valid_config(entry: Entry, tmp_path: Path) -> None:
    about = about_keys().get(entry.name, About())
    if not (shown := example_of(entry, about)):
        assert entry.inner is not None
        return
    values = REQUIRED
    for needed in with_keys(entry, about):
        key, _, value = needed.partition(": ")
        values = merged(values, yaml.safe_load(nested(key, value)))
    values = merged(values, yaml.safe_load(shown))
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(values), "utf-8")
    loaded = load_config(file).config
    if not entry.name.startswith("data.train."):
        assert key_of(loaded.model_dump(by_alias=True), entry.name) is not None


def key_of(values: Any, name: str) -> Any:
    """The value of a dotted key."""
    for part in name.split("."):
        values = (values[0] if isinstance(values, list) else values)[part]
    return values


def uncommented(text: str, section: str, keys: set[str]) -> str:
    """The file with a section of it, and these keys in it, no longer comments."""
    before, _, after = text.partition(f"# {section}:\n")
    lines = []
    for line in after.splitlines():
        if not line.startswith("#   "):
            break
        if line.removeprefix("#   ").partition(":")[0] in keys:
            lines.append(line.removeprefix("# "))
    return "\n".join([before, f"{section}:", *lines])


@pytest.mark.parametrize("language", PAGES)
@pytest.mark.parametrize("objective", ["sft", *USED, DIFFUSION])
def test_the_file_of_all_defaults_has_the_defaults(objective: str, language: str, tmp_path: Path) -> None:
    page = (PAGES[language] / "config.md").read_text("utf-8")
    text = page.rpartition("```yaml\n")[2].partition("```")[0]
    if objective in USED:
        text = uncommented(text, "preference", set(USED[objective]))
    if objective == DIFFUSION:
        text = uncommented(text, DIFFUSION, set(DiffusionSection.model_fields))
    file = tmp_path / "train.yaml"
    file.write_text(text.replace("objective: sft", f"objective: {objective}"), "utf-8")
    short = tmp_path / "short.yaml"
    short.write_text(yaml.safe_dump(REQUIRED | {"objective": objective}), "utf-8")
    assert load_config(file).config == load_config(short).config
    left_out = {"preference", DIFFUSION, "rewards", "rollout", GRPO, "data.train"}
    named = {".".join(map(str, key)) for key in parse_yaml(text, name="page")[1]}
    assert {
        entry.name for entry in ENTRIES if entry.name.partition(".")[0] not in left_out and "train" not in entry.name
        and not entry.name.startswith(("model.rope.", "optim.router_loss.", "train_only.", "eval.metrics."))
    } <= named  # fmt: skip


@pytest.mark.parametrize("language", PAGES)
def test_options_of_all_commands_are_listed_once(language: str) -> None:
    text = (PAGES[language] / "commands.md").read_text("utf-8")
    for option in (*GLOBAL_OPTIONS, "--help"):
        assert text.count(f"- `{option}`") == 1, option
    commands = [name for name in sections(PAGES[language] / "commands.md") if name.startswith("unisono ")]
    assert len(commands) > 20
    assert text.count("```bash\nunisono ") == 2 * len(commands)
    assert {" ".join(("unisono", *name)) for name in command_names()} - set(commands) <= {
        "unisono", "unisono data", "unisono checkpoint"
    }  # fmt: skip


def test_a_changed_page_in_either_language_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "reference"
    pages = {"config.md": "# One\n", f"{make_reference.CHINESE}/config.md": "# 一\n"}
    monkeypatch.setattr(make_reference, "FOLDER", folder)
    make_reference.write(pages)
    assert make_reference.stale(pages) == []
    for name in pages:
        (folder / name).write_text("# Old\n", "utf-8")
        assert [path.resolve() for path in make_reference.stale(pages)] == [(folder / name).resolve()]
        make_reference.write(pages)


def test_all_pages_of_the_reference_but_two_are_in_both_languages() -> None:
    assert set(pages_of("en")) - set(pages_of("zh")) == {"exit-codes.md", "files.md"}


def pages_of(language: str) -> list[str]:
    """The generated pages."""
    return [
        page.name for page in PAGES[language].glob("*.md") if "<!-- Made by" in page.read_text("utf-8")[:200]
    ]

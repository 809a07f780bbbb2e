"""Writes docs/reference/ from the code: the schema, the catalogue, the commands, the exit codes,
the names of files.

    python scripts/make_reference.py            writes the pages
    python scripts/make_reference.py --check    exit 1 if one of them is not up to date

The pages are kept in the repository, so that they can be read there; a test runs --check.
"""

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from cause_pages import Chinese, cause_pages
from memory_page import memory_page
from python_page import python_page
from unisono.base.causes.variables import GROUP_MEANING, VARIABLES, Variable
from unisono.base.causes.verdict import EXIT_CODES
from unisono.front.checks.check import AREAS, DoctorCheck
from unisono.front.checks.examination import CATALOGUE as CHECKS
from unisono.front.cli.app import build_app
from unisono.guard.agree.environment_rules import LAUNCH, LINTS, ONLY_WARN
from unisono.guard.agree.rules import (
    NEED_MEANING,
    NETWORK_RULES,
    NODE_RULES,
    PREPARED_RULES,
    RANK_RULES,
    Rule,
)
from unisono.guard.agree.version_rules import KNOWN_BAD, VERSION_RULES
from unisono.guard.rundir import RunDir
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import Section
from unisono.trainer.config.yaml_file import describe_field, section_in
from unisono.trainer.readers.key_table import Key
from unisono.trainer.readers.llamafactory.keys import KEYS
from unisono.trainer.readers.llamafactory.reader import SWITCHES, V1_KEYS
from unisono.trainer.readers.sd_scripts.keys import KEYS as SD_SCRIPTS_KEYS

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
CHINESE = "../zh/reference"
WIDTH = 100  # columns of a help text
MADE = "<!-- Made by scripts/make_reference.py. Change the code, then run it. -->"


def main() -> int:
    """Writes the pages, or with --check compares them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare")
    pages = {FOLDER / name: text for name, text in make_pages().items()}
    if parser.parse_args().check:
        old = [
            path
            for path, text in pages.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        for path in old:
            print(f"{path} is not up to date: run python scripts/make_reference.py", file=sys.stderr)
        return 1 if old else 0
    for path, text in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


def make_pages() -> dict[str, str]:
    """Every page by its file name."""
    bodies = {
        "config.md": config_page(),
        "agreement.md": agreement_page(),
        "variables.md": variables_page(),
        "doctor.md": doctor_page(),
        "llamafactory.md": llamafactory_page(),
        "sd-scripts.md": sd_scripts_page(),
        "commands.md": commands_page(),
        "exit-codes.md": exit_codes_page(),
        "files.md": files_page(),
        "memory.md": memory_page(),
        "python.md": python_page(),
        **cause_pages(str, "en"),
        **{f"{CHINESE}/{name}": lines for name, lines in cause_pages(Chinese(), "zh").items()},
    }
    return {name: "\n".join([MADE, "", *lines]).rstrip("\n") + "\n" for name, lines in bodies.items()}


def config_page() -> list[str]:
    """Every key of a config."""
    return [
        "# The config", "",
        "A YAML file. `unisono init` writes one to start from; `key.sub=value` on the command line overrides it.",
        "Unknown keys are refused. Paths are relative to the working directory. Only `model`, `data.train` and `output_dir` are required.", "",
        *section_lines(RunConfig, ""),
    ]  # fmt: skip


def section_lines(section: type[Section], prefix: str) -> list[str]:
    """A table of a section's keys, then the sections in it."""
    rows, inner_pages = [], []
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = section_in(field.annotation)
        about = field.description or (plain_doc(inner) if inner else "")
        takes = describe_field(field)
        rows.append([f"`{key}`", re.sub(r" \(keys: .*?\)", "", takes), default_of(field, inner), about])
        if inner is not None:
            assert issubclass(inner, Section)
            inner_pages += [f"## `{key}`", "", plain_doc(inner), "", *section_lines(inner, f"{key}.")]
    return [*table(["key", "values", "default", "meaning"], rows), "", *inner_pages]


def default_of(field: Any, inner: type | None) -> str:  # a pydantic FieldInfo
    """The default as it would be written."""
    if field.is_required():
        return "required"
    if inner is not None and field.default is not None and not isinstance(field.default, list):
        return "see below"
    words = {None: "null", True: "true", False: "false"}
    value = field.default
    shown = words.get(value, str(value)) if isinstance(value, bool | None) else str(value)
    return f"`{list(value) if isinstance(value, tuple) else shown}`"


def agreement_page() -> list[str]:
    """What nodes and ranks must have in common."""
    lines = [
        "# What nodes and ranks agree on before a run", "",
        "The checks run in this order, before anything is trained; `agreement.json` has the result of each: pass, warn, fail or unknown."
        " Nodes or ranks that differ from a strict majority are blamed; on a tie nobody is blamed, and both values are shown.",
    ]  # fmt: skip
    for title, rules in (
        ("Nodes", NODE_RULES), ("The network", NETWORK_RULES), ("Prepared data", PREPARED_RULES), ("Ranks", RANK_RULES)
    ):  # fmt: skip
        lines += [
            "",
            f"## {title}",
            "",
            *table(
                ["check", "what", "requirement", "otherwise", "cause"], [rule_row(r) for r in rules.values()]
            ),
        ]
    lines += ["", "## Versions", "", "All other packages may differ, with a warning.", ""]
    lines += table(
        ["package", "must be equal in its", "why"],
        [[f"`{r.package}`", r.part, r.why] for r in VERSION_RULES.values()],
    )
    lines += [
        "",
        "## Environment variables",
        "",
        "The group of [each variable](variables.md) applies, with these exceptions:",
        "",
    ]
    lines += table(["variable", "may differ, because"], [
        *([f"`{name}`", f"{why} (a warning)"] for name, why in ONLY_WARN.items()),
        *([f"`{name}`", "its effects are compared instead: nodes, ranks, addresses"] for name in sorted(LAUNCH)),
    ])  # fmt: skip
    lines += [
        "",
        "## Suspicious settings",
        "",
        "Reported with a warning, independent of the other nodes.",
        "",
    ]
    lines += table(
        ["variable", "problem", "instead"], [[f"`{lint.name}`", lint.why, lint.fix] for lint in LINTS]
    )
    lines += ["", "## Versions with known bugs", ""]
    return lines + table(["package", "from", "up to (exclusive)", "problem", "fix", "source"], [
        [f"`{bad.package}`", dotted(bad.since), dotted(bad.before) or "not known", bad.what, bad.command, f"<{bad.source}>"]
        for bad in KNOWN_BAD
    ])  # fmt: skip


def doctor_page() -> list[str]:
    """What doctor looks at."""
    lines = [
        "# What doctor checks", "",
        "`unisono doctor` runs the checks of the machine, `unisono doctor CONFIG` also those of a run, `--nodes` those between nodes. How to use it:"
        " [check the machine before a run](../how-to/doctor.md). The result of a check is pass, warn, fail or unknown; the exit code is 6 if one fails,"
        " with `--strict` also if one warns or is unknown.",
    ]  # fmt: skip
    for area, title in AREAS.items():
        checks = [check for check in CHECKS if check.area == area]
        if checks:
            lines += ["", f"## {title}", *(line for check in checks for line in check_section(check))]
    return lines


def check_section(check: DoctorCheck) -> list[str]:
    """A check's paragraph."""
    causes = ", ".join(f"[{cause}](causes/{cause}.md)" for cause in check.causes)
    why = f"{check.why[0].upper()}{check.why[1:]}."
    return [
        "",
        f"### {check.id}",
        "",
        f"**{check.title[0].upper()}{check.title[1:]}.** {why}",
        "",
        f"Check: {check.how}",
        *(["", f"Causes: {causes}."] if causes else []),
    ]


def rule_row(rule: Rule) -> list[str]:
    """A line of the table of agreement."""
    outcome = {"fail": "refused", "warn": "a warning"}[rule.violated]
    return [
        f"`{rule.id}`",
        rule.subject,
        NEED_MEANING[rule.need],
        outcome,
        f"[{rule.cause}](causes/{rule.cause}.md)",
    ]


def dotted(version: tuple[int, ...]) -> str:
    """(2, 26, 5) as 2.26.5."""
    return ".".join(map(str, version))


GROUP_TITLES = {
    "ModelArguments": "Model", "QuantizationArguments": "Quantization", "ProcessorArguments": "Images, videos, audio",
    "ExportArguments": "Export", "VllmArguments": "vLLM", "SGLangArguments": "SGLang", "KTransformersArguments": "KTransformers",
    "DataArguments": "Data", "FreezeArguments": "Freeze", "LoraArguments": "LoRA", "OFTArguments": "OFT",
    "RLHFArguments": "Preferences", "GaloreArguments": "GaLore", "ApolloArguments": "APOLLO", "BAdamArgument": "BAdam",
    "SwanLabArguments": "SwanLab", "FinetuningArguments": "Training method", "GeneratingArguments": "Generation",
    "RayArguments": "Ray", "ProfilerArguments": "Profiler", "Fp8Arguments": "FP8", "TrainingArguments": "Training",
    "EvaluationArguments": "Evaluation (its `eval` command)", "MegatronBridgeArguments": "Megatron",
    "Seq2SeqTrainingArguments": "Hugging Face's TrainingArguments", "OldNames": "Old names",
}  # fmt: skip


def llamafactory_page() -> list[str]:
    """Every key of a LLaMA-Factory file, and what it becomes."""
    counts = {fate: sum(key.fate == fate and not key.same_as for key in KEYS.values()) for fate in FATES}
    lines = [
        "# LLaMA-Factory's keys", "",
        "Every key of LLaMA-Factory 0.9.5, and of Hugging Face's TrainingArguments that it takes, with its default there and what unisono does with it."
        " How to use it: [from LLaMA-Factory](../how-to/from-llamafactory.md).", "",
        *(f"- **{fate}** ({counts[fate]} keys): {meaning}" for fate, meaning in FATES.items()), "",
        "A refused key is accepted at its default. For an unknown key, the error shows the nearest known one. "
        "`unisono init --from-llamafactory FILE --json` shows the handling of each key of a file.",
    ]  # fmt: skip
    for group in dict.fromkeys(key.group for key in KEYS.values()):
        rows = [key_row(key) for key in KEYS.values() if key.group == group]
        lines += [
            "",
            f"## {GROUP_TITLES[group]}",
            "",
            *table(["key", "default", "handling", "unisono", "note"], rows),
        ]
    lines += [
        "",
        "## Environment variables",
        "",
        "Variables that LLaMA-Factory's launcher reads, and how unisono handles them.",
        "",
    ]
    lines += table(["variable", "unisono"], [[f"`{name}`", text] for name, text in SWITCHES.items()])
    lines += [
        "",
        "## Files of the generation v1",
        "",
        "These files are refused. The table shows the key of unisono for each of their keys.",
        "",
    ]
    return lines + table(
        ["key", "unisono"], [[f"`{name}`", f"`{ours}`" if ours else "none"] for name, ours in V1_KEYS.items()]
    )


def sd_scripts_page() -> list[str]:
    """Every key of a configuration of sd-scripts, and what it becomes."""
    keys = SD_SCRIPTS_KEYS.values()
    counts = {fate: sum(key.fate == fate and not key.same_as for key in keys) for fate in FATES}
    lines = [
        "# Keys of sd-scripts and LoRA-Scripts", "",
        "Every key of a configuration of sd-scripts (train_network.py), as LoRA-Scripts writes it to a TOML file, with its default there and what unisono"
        " does with it. How to use it: [from LoRA-Scripts](../how-to/from-lora-scripts.md).", "",
        *(f"- **{fate}** ({counts[fate]} keys): {meaning}" for fate, meaning in FATES.items()), "",
        "A refused key is accepted at its default. FLUX, Stable Diffusion 3 and modules of LyCORIS are refused with one sentence.",
    ]  # fmt: skip
    for group in dict.fromkeys(key.group for key in keys):
        rows = [key_row(key) for key in keys if key.group == group]
        lines += ["", f"## {group}", "", *table(["key", "default", "handling", "unisono", "note"], rows)]
    return lines


FATES = {
    "carried": "the same value, in a key of unisono",
    "translated": "the same meaning, in keys of unisono",
    "ignored": "has no effect on the result, and is listed once",
    "refused": "known, but not supported: exit code 2, with the alternative",
}


def key_row(key: Key) -> list[str]:
    """A line of the table of LLaMA-Factory's keys."""
    if key.same_as:
        return [f"`{key.name}`", "", "as its new name", f"`{key.same_as}`", ""]
    words = {None: "null", True: "true", False: "false"}
    default = words[key.default] if isinstance(key.default, bool | None) else str(key.default)
    needs = f"only with `{key.needs}`" if key.needs else ""
    choice = f"one of {', '.join(key.words)}" if key.words else ""
    here = ", ".join(f"`{ours}`" for ours in key.ours.split(", ") if ours)
    note = "; ".join(filter(None, (key.note, needs, choice)))
    return [f"`{key.name}`", f"`{default}`" if default else "", key.fate, here, note]


def variables_page() -> list[str]:
    """The environment variables."""
    lines = ["# Environment variables", "", "Environment variables and their effect in distributed training. `unisono explain VARIABLE` shows the same.",
             "On one device unisono needs none of them, and reports those that it ignores."]  # fmt: skip
    for group, meaning in GROUP_MEANING.items():
        rows = [variable_row(variable) for variable in VARIABLES if variable.group == group]
        head = ["variable", "meaning", "suspicious", "related causes"]
        lines += ["", f"## {meaning[0].upper()}{meaning[1:]}", "", *table(head, rows)]
    return lines


def variable_row(variable: Variable) -> list[str]:
    """One row of the table."""
    causes = ", ".join(f"[{name}](causes/{name}.md)" for name in variable.causes)
    return [f"`{variable.name}`", variable.meaning, variable.suspicious, causes]


def commands_page() -> list[str]:
    """Every command, as its --help says."""
    import typer.main

    group: Any = typer.main.get_command(build_app())
    lines = ["# Commands", "", f"{group.help}", "", f"{group.epilog}"]
    for name, command in group.commands.items():
        lines += command_lines(f"unisono {name}", command)
    return lines


def command_lines(name: str, command: Any) -> list[str]:  # a command of typer's, or a group of them
    """One command, or all of a group."""
    if hasattr(command, "commands"):
        return [
            line for sub, inner in command.commands.items() for line in command_lines(f"{name} {sub}", inner)
        ]
    context = command.context_class(command, info_name=name, terminal_width=WIDTH)
    return ["", f"## {name}", "", "```", command.get_help(context), "```"]


def exit_codes_page() -> list[str]:
    """What each exit code means."""
    rows = [[str(code), meaning] for code, meaning in EXIT_CODES.items()]
    return ["# Exit codes", "", "The exit codes of all commands.", "", *table(["code", "meaning"], rows)]


def files_page() -> list[str]:
    """What is in a run's directory."""
    run = RunDir(Path("OUT"))
    rows = []
    for name, member in vars(RunDir).items():
        if isinstance(member, property):
            rows.append([f"`{getattr(run, name).relative_to('OUT')}`", doc_paragraph(member)])
    rows.append([f"`{run.events(0).relative_to('OUT')}`", doc_paragraph(RunDir.events)])
    rows.append([f"`{run.timeline(0).relative_to('OUT')}`", doc_paragraph(RunDir.timeline)])
    rows.append([f"`{run.log('HOST', 0).relative_to('OUT')}`", doc_paragraph(RunDir.log)])
    rows.append([f"`{run.checkpoint(100).relative_to('OUT')}/`", doc_paragraph(RunDir.checkpoint)])
    return [
        "# Files of a run", "",
        "All files of a run are below its `output_dir`. JSON files have `\"schema\": 1`, and are written atomically.", "",
        *table(["name", "contents"], rows),
    ]  # fmt: skip


def plain_doc(thing: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def doc_paragraph(thing: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


if __name__ == "__main__":
    sys.exit(main())

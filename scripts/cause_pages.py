"""docs/reference/causes.md and a page for each cause, in English and Chinese, from the catalogue,
the signatures, the rules' fixes and the variables.

Used by scripts/make_reference.py.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from babel.messages.pofile import read_po

from page_parts import Translate
from unisono.base.causes import CATALOGUE
from unisono.base.causes.entries import Signature, Signs, read_entry
from unisono.base.causes.signatures import find_signature
from unisono.base.causes.variables import VARIABLES
from unisono.base.causes.verdict import Cause, OwnRunOnly
from unisono.front.drill.drills import DRILLS
from unisono.guard.diagnosis.hypotheses import rank
from unisono.guard.diagnosis.remedy import remedy
from unisono.guard.diagnosis.report_terms import find_features
from unisono.guard.diagnosis.report_text import sentences_of
from unisono.guard.diagnosis.run_facts import Hypothesis, RunFacts

ROOT = Path(__file__).resolve().parent.parent
_PROGRAMS = {
    "llamafactory": "LLaMA-Factory", "trl": "TRL, Hugging Face Trainer", "torchrun": "torchrun", "ray": "Ray Train", "lightning": "Lightning",
}  # fmt: skip
_COMMANDS = {
    "unisono", "echo", "sha256sum", "git", "pip", "python", "env", "nvidia-smi", "nc", "ping", "hostname", "touch", "ss", "date", "chronyc", "getent", "dmesg",
    "py-spy", "ps", "sacct", "grep", "ray", "df", "ulimit", "ibstat", "ls", "curl", "huggingface-cli",
}  # fmt: skip
SYMPTOMS = (
    "hangs after the model is loaded, several nodes",
    "hangs after the model is loaded, multi gpu, one node",
    "hangs at init_process_group, two nodes",
    "stuck at 100 % GPU utilization and no step is made",
    "hangs in the first step",
    "hangs after some hours in the middle of training",
    "hangs at the end of an epoch",
    "hangs during evaluation",
    "hangs when saving a checkpoint",
    "fails when saving a checkpoint on several nodes",
    "error after training has finished, at exit",
    "timeout while the dataset is tokenized",
    "CUDA out of memory",
    "a process was killed without any traceback",
    "RAM grows until the job is killed",
    "loss is nan or 0",
    "training is slow, GPUs idle",
    "one node is slower than the others",
    "works on one GPU but hangs on several",
    "works on one node but hangs on two nodes",
    "connection refused between nodes",
    "address already in use",
    "fails after an upgrade of packages",
    "cannot resume from a checkpoint",
    "Ray: pending, no available node types",
    "training in docker, bus error or shared memory",
)
"""Symptoms of the index, ranked as `unisono explain --symptom` ranks them."""
_LABEL = re.compile(r"^(- (?:\[.*?\]\(.*?\)|`[^`]+`|\*\*.*?\*\*)): ")
"""What a list item is about: Chinese has its own colon behind it."""

CHINESE = ROOT / "src" / "unisono" / "base" / "locale" / "zh" / "LC_MESSAGES" / "unisono.po"


class Chinese:
    """Translates by the catalogue of texts.

    Attributes:
        missing: the texts that it does not have; they stay in English.
    """

    def __init__(self) -> None:
        with CHINESE.open("rb") as file:
            entries = read_po(file)
        self.texts = {str(entry.id): str(entry.string) for entry in entries if entry.id and entry.string}
        self.missing: set[str] = set()

    def __call__(self, text: str) -> str:
        """The text in Chinese."""
        if text not in self.texts:
            self.missing.add(str(text))
        return self.texts.get(text, text)


def cause_pages(translate: Translate, language: str) -> dict[str, list[str]]:
    """All pages about causes by their names below docs/reference, as lines."""
    pages = {"causes.md": _index(translate, language)}
    for cause in CATALOGUE.values():
        pages[f"causes/{cause.id}.md"] = list(_page(cause, translate, language))
    if language == "zh":
        pages = {name: [_LABEL.sub(r"\1：", line) for line in lines] for name, lines in pages.items()}
    return pages


def _index(t: Translate, language: str) -> list[str]:
    """Causes by symptom, then all of them."""
    other = "`unisono explain CAUSE`"
    lines = [
        f"# {t('Causes of failure')}", "",
        t("Why training fails, and how to fix it. Paste a line of the log into the search of this site, or look up what you see. `unisono diagnose LOGS` finds the cause from logs, and {command} shows a page in the terminal.").format(command=other), "",
        f"## {t('By symptom')}", "",
        t("The most likely causes first; `unisono explain --symptom TEXT` ranks them in the same way."), "",
        f"| {t('symptom')} | {t('likely causes')} |", "|---|---|",
    ]  # fmt: skip
    for symptom in SYMPTOMS:
        found = rank(find_features("symptom", sentences_of(symptom)), is_failure=True).hypotheses[:4]
        links = "<br>".join(
            f"{_link(one.cause, 'causes/')}: {t(CATALOGUE[one.cause].title)}" for one in found
        )
        lines.append(f"| {t(symptom)} | {links} |")
    lines += [
        "",
        f"## {t('All causes')}",
        "",
        f"| {t('cause')} | {t('in one line')} | {t('exit code')} |",
        "|---|---|---|",
    ]
    return lines + [
        f"| {_link(cause.id, 'causes/')} | {t(cause.title)} | {cause.exit_code} |"
        for cause in CATALOGUE.values()
    ]


def _page(cause: Cause, t: Translate, language: str) -> Iterator[str]:
    """One cause."""
    yield from (f"# {cause.id}: {t(cause.title)}", "", t(cause.meaning))
    yield from ("", f"**{t('What you see')}**", "")
    yield from (f"- {t(sign)}" for sign in cause.telltales)
    entry = read_entry(cause.id)
    if own := entry.signatures:
        yield from ("", t("Lines in logs that indicate it:"), "", *_examples(own))
        if hints := _hints(own):
            yield from ("", t("Also recognized:"), "", *(f"- `{hint}`" for hint in hints))
    if seen := [one for name in entry.seen_with if (one := find_signature(name))]:
        yield from ("", t("Lines that are seen with it, and with other causes, too:"), "", *_examples(seen))
    signs = entry.signs or Signs()
    if checks := [line.replace("{devices}", "0,1,2,3") for line in signs.check]:
        yield from ("", f"## {t('How to check')}", "", *(f"- {_check(t(line))}" for line in checks))
    yield from ("", f"## {t('Fix')}", "")
    general = [line for line in cause.remedy if not isinstance(line, OwnRunOnly)]
    yield from (f"{number}. {t(line)}" for number, line in enumerate(general, 1))
    yield from ("", f"### {t('With unisono')}", "")
    ours = [signs.here] if signs.here else []
    ours += [line for line in cause.remedy if isinstance(line, OwnRunOnly)]
    yield from (f"- {_sentence(t(line))}" for line in ours)
    if "after" in cause.when:
        yield f"- {t('`unisono diagnose LOGS` recognizes it in the logs of any program.')}"
    for fault in [drill.fault for drill in DRILLS if drill.want[:1] == (cause.id,)]:
        text = t("{command} causes it in a tiny run, and shows what is reported.")
        yield f"- {text.format(command=f'`unisono drill {fault}`')}"
    if programs := list(_in_programs(cause, general, t)):
        yield from ("", f"### {t('In other programs')}", "", *programs)
    yield from _related(cause, t)
    retry = t("A retry can help.") if cause.retry_helps else t("A retry does not help by itself.")
    times = {"before": t("before a run"), "during": t("during a run"), "after": t("after a run")}
    when = [times[one] for one in cause.when]
    if language == "zh":
        yield from ("", f"{t('Exit code')} {cause.exit_code}。{retry}{t('Found')}：{'、'.join(when)}。")
    else:
        yield from ("", f"{t('Exit code')} {cause.exit_code}. {retry} {t('Found')}: {', '.join(when)}.")


def _examples(signatures: Sequence[Signature]) -> Iterator[str]:
    """Literal lines."""
    yield from ("```text", *dict.fromkeys(" ".join(one.example.split()) for one in signatures), "```")


def _hints(signatures: Sequence[Signature]) -> list[str]:
    """Other strings that such lines contain; one word alone says too little."""
    examples = " ".join(one.example for one in signatures)
    found = dict.fromkeys(
        hint.strip(" `") for one in signatures for hint in one.hints if hint not in examples
    )
    return [
        hint for hint in found if len(hint) > 5 and (" " in hint or not hint.islower()) and "`" not in hint
    ]


def _check(line: str) -> str:
    """A check with its command as code; in Chinese the command comes last."""
    if "：" in line:
        before, _, command = line.partition("：")
        return f"{before}：{_check(command)}"
    command, rest = re.fullmatch(
        r"(.*?)((?:,| as a test)(?: (?:on|between|from|with|of|and|beside|over)\b.*)?|(?: on| while| beside)"
        r" .*)?",
        line,
    ).groups(default="")  # type: ignore[union-attr]
    return f"`{command}`{rest}" if command.split()[0] in _COMMANDS or "=" in command.split()[0] else line


def _in_programs(cause: Cause, general: list[str], t: Translate) -> Iterator[str]:
    """What to set in other programs: the fixes of `diagnose` that are specific to them, without
    repeating one that holds for all.
    """
    known: dict[str, list[str]] = {}
    for program in _PROGRAMS:
        for line in remedy(Hypothesis(cause=cause.id, why=""), replace(RunFacts(), framework=program)):
            if line not in general:
                known.setdefault(line, []).append(program)
    for line, programs in known.items():
        if len(programs) == len(_PROGRAMS):
            yield f"- {t(line)}"
    for line, programs in known.items():
        if len(programs) < len(_PROGRAMS):
            yield f"- **{', '.join(_PROGRAMS[one] for one in programs)}**: {t(line)}"


def _related(cause: Cause, t: Translate) -> Iterator[str]:
    """Similar causes and variables."""
    if cause.neighbours:
        yield from ("", f"## {t('Similar causes')}", "")
        yield from (f"- {_link(name)}: {t(text)}" for name, text in cause.neighbours)
    if variables := [one for one in VARIABLES if cause.id in one.causes]:
        yield from ("", f"## {t('Related variables')}", "")
        yield from (f"- `{one.name}`: {t(one.meaning)}" for one in variables)


def _sentence(text: str) -> str:
    if not text.isascii() and text[-1:] not in ".。":
        return f"{text}。"
    return f"{text[0].upper()}{text[1:]}" if text.endswith((".", "。")) else f"{text[0].upper()}{text[1:]}."


def _link(cause: str, folder: str = "") -> str:
    return f"[{cause}]({folder}{cause}.md)"

"""The pages docs/reference/agreement.md, doctor.md and variables.md in English and Chinese, from the
rules, the checks and the variables.

Used by scripts/make_reference.py.
"""

from page_parts import Translate, heading, table, term, word
from unisono.base.causes.variables import GROUP_MEANING, VARIABLES, Variable
from unisono.front.checks.check import AREAS, DoctorCheck
from unisono.front.checks.examination import CATALOGUE as CHECKS
from unisono.guard.agree.environment_rules import LAUNCH, LINTS, ONLY_WARN
from unisono.guard.agree.rules import (
    NEED_MEANING,
    NETWORK_RULES,
    NODE_RULES,
    PREPARED_RULES,
    RANK_RULES,
    Rule,
)
from unisono.guard.agree.version_rules import KNOWN_BAD, VERSION_RULES, KnownBad

_STAGES = {
    "Nodes": NODE_RULES, "The network": NETWORK_RULES, "Prepared data": PREPARED_RULES, "Ranks": RANK_RULES,
}  # fmt: skip


def agreement_page(t: Translate, language: str) -> list[str]:
    """What nodes and ranks must have in common."""
    lines = [
        f"# {t('What nodes and ranks agree on before a run')}", "",
        t("The checks run in this order, before anything is trained; `agreement.json` has the result of each: pass, warn, fail or unknown."
          " Nodes or ranks that differ from a strict majority are blamed; on a tie nobody is blamed, and both values are shown."),
    ]  # fmt: skip
    for title, rules in _STAGES.items():
        rows = [_rule(rule, t, language) for rule in rules.values()]
        lines += [
            *heading(title, language),
            *table(["check", "what", "requirement", "otherwise", "cause"], rows, language),
        ]
    lines += [*heading("Versions", language), t("All other packages may differ, with a warning."), ""]
    rows = [[f"`{rule.package}`", word(rule.part, language), t(rule.why)] for rule in VERSION_RULES.values()]
    lines += table(["package", "must be equal in its", "why"], rows, language)
    lines += [
        *heading("Environment variables", language),
        t("The group of [each variable](variables.md) applies, with these exceptions:"),
        "",
    ]
    rows = [[f"`{name}`", f"{t(why)} ({word('a warning', language)})"] for name, why in ONLY_WARN.items()]
    same = t("its effects are compared instead: nodes, ranks, addresses")
    lines += table(
        ["variable", "may differ, because"],
        [*rows, *([f"`{name}`", same] for name in sorted(LAUNCH))],
        language,
    )
    lines += [
        *heading("Suspicious settings", language),
        t("Reported with a warning, independent of the other nodes."),
        "",
    ]
    rows = [
        [f"`{lint.name}`", t(lint.why), lint.fix if _is_code(lint.fix) else t(lint.fix)] for lint in LINTS
    ]
    lines += [
        *table(["variable", "problem", "instead"], rows, language),
        *heading("Versions with known bugs", language),
    ]
    head = ["package", "from", "up to (exclusive)", "problem", "fix", "source"]
    return lines + table(head, [_bug(bug, t, language) for bug in KNOWN_BAD], language)


def _is_code(text: str) -> bool:
    """Whether a fix is nothing but a variable or its assignment."""
    return text.isascii() and " " not in text


def _rule(rule: Rule, t: Translate, language: str) -> list[str]:
    """A line of the table of agreement."""
    outcome = {"fail": "refused", "warn": "a warning"}[rule.violated]
    link = f"[{rule.cause}](causes/{rule.cause}.md)"
    return [
        f"`{rule.id}`",
        term(rule.subject, t, language),
        t(NEED_MEANING[rule.need]),
        word(outcome, language),
        link,
    ]


def _bug(bug: KnownBad, t: Translate, language: str) -> list[str]:
    until = _dotted(bug.before) or word("not known", language)
    return [f"`{bug.package}`", _dotted(bug.since), until, t(bug.what), bug.command, f"<{bug.source}>"]


def _dotted(version: tuple[int, ...]) -> str:
    """(2, 26, 5) as 2.26.5."""
    return ".".join(map(str, version))


def doctor_page(t: Translate, language: str) -> list[str]:
    """What doctor looks at."""
    lines = [
        f"# {t('What doctor checks')}", "",
        t("`unisono doctor` checks the machine, `unisono doctor CONFIG` also the run, and `--nodes` also the connections between nodes. How to use it:"
          " [check the machine before a run](../how-to/doctor.md). The result of a check is pass, warn, fail or unknown; the exit code is 6 if one fails,"
          " with `--strict` also if one warns or is unknown."),
    ]  # fmt: skip
    for area, title in AREAS.items():
        checks = [check for check in CHECKS if check.area == area]
        if checks:
            lines += [
                "",
                f"## {t(title)}",
                *(line for check in checks for line in _check(check, t, language)),
            ]
    return lines


def _check(check: DoctorCheck, t: Translate, language: str) -> list[str]:
    """A check's paragraph."""
    colon, comma, stop = ("：", "、", "。") if language == "zh" else (": ", ", ", ".")
    causes = comma.join(f"[{cause}](causes/{cause}.md)" for cause in check.causes)
    title, why = term(check.title, t, language), t(check.why)
    texts = [title, why] if language == "zh" else [f"{text[0].upper()}{text[1:]}" for text in (title, why)]
    what, related = ("检查方法", "相关原因") if language == "zh" else ("Check", "Causes")
    lines = [
        "",
        f"### {check.id}",
        "",
        f"**{texts[0]}{stop}**{'' if language == 'zh' else ' '}{texts[1].rstrip('。')}{stop}",
        "",
    ]
    return [
        *lines,
        f"{what}{colon}{t(check.how)}",
        *(["", f"{related}{colon}{causes}{stop}"] if causes else []),
    ]


def variables_page(t: Translate, language: str) -> list[str]:
    """The environment variables."""
    lines = [
        f"# {t('Environment variables')}", "",
        t("Environment variables and their effect in distributed training. `unisono explain VARIABLE` shows the same."), "",
        t("On one device unisono needs none of them, and reports those that it ignores."),
    ]  # fmt: skip
    for group, meaning in GROUP_MEANING.items():
        rows = [_variable(variable, t, language) for variable in VARIABLES if variable.group == group]
        title = t(meaning)
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        lines += table(["variable", "meaning", "suspicious", "related causes"], rows, language)
    return lines


def _variable(variable: Variable, t: Translate, language: str) -> list[str]:
    """One row of the table."""
    comma = "、" if language == "zh" else ", "
    causes = comma.join(f"[{name}](causes/{name}.md)" for name in variable.causes)
    suspicious = t(variable.suspicious) if variable.suspicious else ""
    return [f"`{variable.name}`", t(variable.meaning), suspicious, causes]

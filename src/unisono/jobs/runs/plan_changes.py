"""Whether a resumed run is still the same: its settings, data, model, and the conditions of
exactness.

The meaning of each setting is in `config_changes`. Here the new plan is compared with the previous
one: files of the same name may have changed, `auto` may have a different result, and ranks, threads
or packages may differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.base.files import read_object
from unisono.base.user_code import own_class
from unisono.guard.rundir import RunDir
from unisono.jobs.runs.config_changes import (
    Change,
    ChangeFinding,
    changes_between,
    judge_key,
    not_allowed,
    refusal,
    shown,
)
from unisono.jobs.runs.start_decision import next_old
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import Mesh

_ROUNDING = "losses agree to rounding, not bit-exactly"
_SAME_ROWS = f"the same rows in the same order; {_ROUNDING}"
_SHAPES_ROWS = ("data.max_length", "data.packing", "data.loss_on", "objective", "seed")
_PACKAGES = ("python", "torch", "transformers", "peft", "tokenizers", "numpy", "unisono")
_ENCODE = ("unisono", "tokenizers", "transformers", "jinja2", "pyarrow")


@dataclass(frozen=True, slots=True)
class _Decided:
    """A value that the plan decides, and what a different value means.

    Attributes:
        place: in plan.json, dotted.
        remedy: how to get the same value again; {0} is the old value.
        key: its name in `--allow`, if it needs permission.
    """

    place: str
    says: str
    remedy: str = ""
    key: str = ""


_DECIDED = (
    _Decided(
        "dtype",
        "frozen weights and the computation are rounded differently",
        "set model.dtype to {0}",
        "model.dtype",
    ),
    _Decided("world_size", f"{_SAME_ROWS}: sums over the ranks have a different order"),
    _Decided(
        "strategy",
        f"{_SAME_ROWS}: gradients and norms are summed in different parts",
        "set parallel.strategy to {0}",
    ),
    _Decided("device.kind", f"{_ROUNDING}: it sums in a different order", "set device to {0}"),
    _Decided("device.name", f"{_ROUNDING}: it may sum in a different order"),
    _Decided(
        "threads", f"{_ROUNDING}: sums are split among the threads of a rank", "set OMP_NUM_THREADS={0}"
    ),
    _Decided(
        "micro_batch", f"{_SAME_ROWS}: sums are over different groups of sequences", "set batch.micro to {0}"
    ),
    _Decided(
        "gradient_checkpointing",
        f"{_ROUNDING}: activations are computed at different times",
        "set memory.gradient_checkpointing to {0}",
    ),
)


@dataclass(frozen=True)
class ResumeChanges:
    """The changes at a resume.

    Attributes:
        lines: for people, one per change.
        allowed: changes allowed over all starts: key, before, after, from_step.
    """

    lines: list[str] = field(default_factory=list)
    allowed: list[dict[str, object]] = field(default_factory=list)


def check_same_run(
    run: RunDir, plan: Mapping[str, object], versions: dict[str, str], *, allow: frozenset[str] = frozenset()
) -> ResumeChanges:
    """Compares a new plan with the one in the run's directory, before it is overwritten.

    Args:
        run: with plan.json and environment.json of the last start.
        allow: from `read_allowed`.

    Raises:
        UsageError: with all changes that make it a different run and are not allowed.
    """
    before = read_object(run.plan)
    packages = read_object(run.environment).get("packages")
    now = versions if isinstance(packages, dict) else {}
    findings = find_changes(before, plan, packages if isinstance(packages, dict) else {}, now)
    refused = not_allowed(findings, allow)
    if refused:
        raise refusal(refused, root=str(run.root), new_name=next_old(run.root).name)
    step = _at(plan, "resume.step") or 0
    taken = [finding for finding in findings if finding.verdict == "refused"]
    earlier = before.get("allowed")
    return ResumeChanges(
        [f"{'allowed: ' if finding.verdict == 'refused' else ''}{finding.text}" for finding in findings]
        + unused_allowances(allow - {finding.name for finding in taken}),
        [*(earlier if isinstance(earlier, list) else []), *({**f.record, "from_step": step} for f in taken)],
    )


def unused_allowances(names: frozenset[str]) -> list[str]:
    """A line for each `--allow` without effect."""
    return [f"--allow {name} was not needed: no change here requires it" for name in sorted(names)]


def find_changes(
    before: Mapping[str, object],
    after: Mapping[str, object],
    packages_before: Mapping[str, str],
    packages_after: Mapping[str, str],
) -> list[ChangeFinding]:
    """All differences with a meaning or a cost; those that make a different run come first. Pure.

    Args:
        before: the object of plan.json of the previous start.
        packages_before: versions by package, as in environment.json of the earlier start.
    """
    changed = changes_between(*(RunConfig.model_validate(plan["config"]) for plan in (before, after)))
    findings = [finding for change in changed if (finding := judge_key(change)) is not None]
    findings += _model_findings(before, after, changed)
    findings += _row_findings(before, after, changed, _versions(packages_before, packages_after, _ENCODE))
    findings += _decided_findings(before, after)
    findings += _code_findings(before, after, {change.key for change in changed})
    findings += [
        ChangeFinding("", f"{text}: losses may not be bit-exact")
        for text in _versions(packages_before, packages_after, (*_PACKAGES, *_quantizers(after)))
    ]
    return sorted(findings, key=lambda finding: ("fixed", "refused", "line").index(finding.verdict))


_CODE_DECIDES = {"objective": "the loss", "optim.kind": "updates", "optim.schedule": "learning rates"}


def _code_findings(
    before: Mapping[str, object], after: Mapping[str, object], changed: set[str]
) -> list[ChangeFinding]:
    """Code of the user's own, or of other packages, that differs under the same name."""
    findings = []
    for key, decides in _CODE_DECIDES.items():
        old, new = ((_at(plan, "code_digests") or {}).get(key, "") for plan in (before, after))
        if old != new and key not in changed:
            name = str(_at(after, f"config.{key}"))
            what = "file" if own_class(name) else "package"
            text = f"the {what} of {key} {name} has changed: {decides} may be different from here on"
            findings.append(ChangeFinding(key, text, old, new, "refused"))
    # What a failed reward or environment asks for is a repaired file and the same command.
    digests = [_at(plan, "code_digests") or {} for plan in (before, after)]
    repaired = ("rewards.", "rollout.environment.")
    for key in sorted({key for of_plan in digests for key in of_plan if key.startswith(repaired)}):
        old, new = (of_plan.get(key, "") for of_plan in digests)
        if old and new and old != new:
            what = "reward model" if key.endswith(".path") else "file"
            text = f"the {what} of {key} has changed: answers may get other rewards from here on"
            findings.append(ChangeFinding("", text, old, new))
    return findings


def _model_findings(
    before: Mapping[str, object], after: Mapping[str, object], changed: list[Change]
) -> list[ChangeFinding]:
    keys = _pointing_at(changed, "model")
    old, new = _at(before, "model.digest"), _at(after, "model.digest")
    if old == new:
        return [ChangeFinding("", f"{change.values}: its files have the same content") for change in keys]
    means = (
        "the adapter would continue on weights that it was not trained on"
        if _at(after, "config.adapter") is not None
        else "trained weights come from the checkpoint; frozen weights and config.json differ"
    )
    why = "; ".join([*(change.values for change in keys), f"digest {_plain(new)}, and was {_plain(old)}"])
    return [ChangeFinding("model", f"the model's files have changed: {means} ({why})", old, new, "refused")]


def _row_findings(
    before: Mapping[str, object], after: Mapping[str, object], changed: list[Change], encoders: list[str]
) -> list[ChangeFinding]:
    """Findings on the rows as the model sees them, with the cause: the tokenizer, files or their
    parsing, settings, packages.
    """
    keys, of_tokenizer = _pointing_at(changed, "data"), _pointing_at(changed, "tokenizer")
    files, tokenizer = (_pair(before, after, f"data.{name}_digest") for name in ("files", "tokenizer"))
    traits = _pair(before, after, "data.tokenizer_traits")
    if _known(traits) and not _differ(tokenizer):  # equal files, of which transformers makes something else
        tokenizer = traits
    old, new = _prepared_data(before), _prepared_data(after)
    if old == new:
        return _same_row_findings(keys, of_tokenizer, files=_differ(files), tokenizer=_differ(tokenizer))
    findings = []
    if _differ(tokenizer):
        text = "the tokenizer has changed: the same text gives different tokens than in training"
        causes = [*(change.values for change in of_tokenizer), *(encoders if tokenizer == traits else [])]
        names = f" ({'; '.join(causes)})" if causes else ""
        findings.append(ChangeFinding("tokenizer", text + names, *tokenizer, verdict="refused"))
    explained = bool(findings) or any(change.key in _SHAPES_ROWS for change in changed)
    means = _effect_of_rows(before, after)
    if keys or _differ(files):
        why = "; ".join([*(change.values for change in keys), *(["files changed"] if _differ(files) else [])])
        text = f"the rows differ from the rows at the start of the run{f' ({why})' if why else ''}: {means}"
        findings.append(ChangeFinding("data", text, _digest_of(before), _digest_of(after), "refused"))
    elif not explained:
        why = f" ({'; '.join(encoders)})" if encoders else ""
        text = (
            f"the same files, tokenizer and settings give different rows because of different packages{why}:"
            f" {means}"
        )
        findings.append(ChangeFinding("versions", text, _digest_of(before), _digest_of(after), "refused"))
    return findings


def _same_row_findings(
    keys: list[Change], of_tokenizer: list[Change], *, files: bool, tokenizer: bool
) -> list[ChangeFinding]:
    texts = [f"{change.values}: the rows are the same" for change in [*keys, *of_tokenizer]]
    if files and not keys:
        texts.append("the data files have changed, and give the same rows")
    if tokenizer:
        texts.append(
            "the tokenizer has changed, and gives the same tokens; results are saved with it as it is now"
        )
    return [ChangeFinding("", text) for text in texts]


def _effect_of_rows(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """The effect of different rows on the rest of the run."""
    done = (_at(after, "resume.step") or 0) * (_at(after, "global_batch") or 0)
    old, new = _at(before, "data.train.sequences"), _at(after, "data.train.sequences")
    text = (
        "past and future rows no longer form complete epochs: some rows may be repeated, and some never seen"
    )
    if isinstance(old, int) and isinstance(new, int) and new:
        epoch, position = divmod(done, new)
        how = (
            f"drawn again for {new} sequences (they were {old})"
            if old != new
            else f"the same for {new} sequences"
        )
        text = (
            f"{done} sequences are done; the order of an epoch is {how}, and the run continues at position"
            f" {position + 1} of epoch {epoch + 1}; {text}"
        )
    if isinstance(_at(after, "config.data.eval"), float | int):
        text += "; evaluation rows may have been trained on"
    return text


def _decided_findings(before: Mapping[str, object], after: Mapping[str, object]) -> list[ChangeFinding]:
    findings = []
    differ = {d.place for d in _DECIDED if _at(before, d.place) not in (None, _at(after, d.place))}
    meshes = (Mesh.of(_at(plan, "strategy"), _at(plan, "world_size")) for plan in (before, after))
    if "world_size" in differ and not any(mesh.shards_weights for mesh in meshes):
        differ.discard("strategy")  # one rank is single and several are ddp: their number says it
    dropout = _at(after, "config.adapter.dropout")
    for decided in _DECIDED:
        if decided.place not in differ:
            continue
        old, new = _at(before, decided.place), _at(after, decided.place)
        text = f"{decided.place} is {_plain(new)}, and was {_plain(old)}: {decided.says}"
        if dropout and decided.place in ("world_size", "micro_batch"):
            text += (
                f"; adapter.dropout is {dropout}, and different sequences share a forward: losses agree only"
                " on average"
            )
        if decided.remedy and (decided.place != "strategy" or _at(before, "world_size") != 1):
            text += f"; {decided.remedy.format(_plain(old))} to restore it"
        findings.append(ChangeFinding(decided.key, text, old, new, "refused" if decided.key else "line"))
    if _at(after, "device.kind") == "cuda" and not _at(after, "config.deterministic") and not differ:
        text = f"deterministic is false: on a GPU {_ROUNDING}, since its kernels sum in any order"
        findings.append(ChangeFinding("", text))
    return findings


def _versions(before: Mapping[str, str], after: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    return [
        f"{name} is {_plain(after.get(name))}, and was {_plain(before.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _quantizers(plan: Mapping[str, object]) -> tuple[str, ...]:
    """The package that quantized weights depend on; empty if there is none."""
    return ("bitsandbytes",) if _at(plan, "model.quantized") in ("nf4", "fp4", "int8") else ()


def _pointing_at(changed: list[Change], name: str) -> list[Change]:
    """Changed keys that refer to contents of this name."""
    return [change for change in changed if change.rule.kind == "contents" and change.rule.name == name]


def _prepared_data(plan: Mapping[str, object]) -> tuple[Any, ...]:
    """The results of the preparation; the digest of the rows does not cover sequences and the
    split, but their counts do.
    """
    return _digest_of(plan), _at(plan, "data.train"), _at(plan, "data.eval")


def _digest_of(plan: Mapping[str, object]) -> Any:
    return _at(plan, "data.rows_digest")


def _pair(before: Mapping[str, object], after: Mapping[str, object], path: str) -> tuple[Any, Any]:
    return _at(before, path), _at(after, path)


def _known(pair: tuple[Any, Any]) -> bool:
    """Whether both plans have it."""
    return bool(pair[0] and pair[1])


def _differ(pair: tuple[Any, Any]) -> bool:
    return _known(pair) and pair[0] != pair[1]


def _at(value: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _plain(value: object) -> str:
    return value if isinstance(value, str) else "none" if value is None else shown(value)

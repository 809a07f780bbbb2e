"""What a changed config key means for a resumed run: a table of rules, and the parsing of
`--allow`.

Pure.

A key without an entry uses the rule of its section; without that, too, a change makes a different
run, so that a new key is refused until it has a rule.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unisono.base.errors import Problem, UsageError
from unisono.base.text import nearest, one_line
from unisono.trainer.config import RunConfig
from unisono.trainer.config.yaml_file import all_keys

Kind = Literal["silent", "line", "decided", "contents", "meaning", "fixed"]

NAMES = {
    "data": "the contents of the data files and the template",
    "model": "the contents of the model's files",
    "tokenizer": "the contents of the tokenizer's files",
    "versions": "packages that produce different rows from the same files",
}
"""Names that `--allow` accepts besides keys: contents that a key only refers to."""


@dataclass(frozen=True, slots=True)
class KeyRule:
    """How a change of a key is judged.

    Attributes:
        kind: silent: not reported. line: results do not change; reported with its cost. decided:
            the value in the plan counts (`auto` may equal the explicit value), see `plan_changes`.
            contents: it refers to files or their parsing, and the resulting data counts. meaning:
            the run becomes a different one; refused unless allowed. fixed: cannot be allowed.
        says: what it means, as the end of a sentence.
        name: its name in `--allow`, for contents.
    """

    kind: Kind
    says: str = ""
    name: str = ""


_TENSORS_DIFFER = "tensor names or shapes differ from the checkpoint's"
_ONLY_MEASUREMENT = "metrics change, training does not"
_ROWS = KeyRule("contents", name="data")
_OLD_SIZE = KeyRule(
    "fixed", "the position in the data is counted in steps of the old size: rows would be repeated or skipped"
)

RULES: dict[str, KeyRule] = {
    "output_dir": KeyRule("silent"),  # the run was found in it: it was moved, or has a different path
    "reasons": KeyRule("silent"),  # comments on environment variables; no step depends on them
    "restarts": KeyRule(
        "line", "number of automatic restarts, counted again in each start; training does not change"
    ),
    "grace": KeyRule(
        "line", "the time for the last checkpoint after a stop signal; training does not change"
    ),
    "watch": KeyRule("line", "when ranks count as hung or diverged; training does not change"),
    "track": KeyRule("line", "tracking starts or stops here"),
    "duration": KeyRule("silent"),  # reported in the reason of the start
    "eval": KeyRule("line", _ONLY_MEASUREMENT),
    "eval.every": KeyRule("line", f"{_ONLY_MEASUREMENT}; eval.stop_after counts evaluations, not steps"),
    "eval.stop_after": KeyRule("line", "the run may end at a different step"),
    "eval.exact_match": KeyRule("line", "there is no value from before step 1 to compare with"),
    "eval.metrics": KeyRule("line", "its figures begin, end or change here"),
    "checkpoint": KeyRule("line", "from here on; training does not change"),
    "checkpoint.best": KeyRule("meaning", "the weights of a different step become the result"),
    "parallel.strategy": KeyRule("decided"),
    "device": KeyRule("decided"),
    "model.dtype": KeyRule("decided"),
    "batch.micro": KeyRule("decided"),
    "memory.gradient_checkpointing": KeyRule("decided"),
    "deterministic": KeyRule("line", "on a GPU, bit-exactness starts or ends here"),
    "model.path": KeyRule("contents", name="model"),
    "model.revision": KeyRule("contents", name="model"),
    "model.tokenizer": KeyRule("contents", name="tokenizer"),
    "model.weights": KeyRule("meaning", "weights that are not trained differ"),
    "model.resize_vocabulary": KeyRule("fixed", _TENSORS_DIFFER),
    "model.rope": KeyRule("meaning", "the model computes different positions"),
    "model.embedding_noise": KeyRule("meaning", "the noise in training differs from here on"),
    "model.trust_remote_code": KeyRule("meaning", "different code may compute the model"),
    "model.quantize": KeyRule("meaning", "the frozen weights have different values"),
    "model.quantize_double": KeyRule("meaning", "the frozen weights have different values"),
    "model.quantize_embeddings": KeyRule("meaning", "the frozen weights have different values"),
    "model.quantize_compute": KeyRule(
        "meaning", "products with the frozen weights are rounded differently from here on"
    ),
    "adapter": KeyRule("fixed", _TENSORS_DIFFER),
    "adapter.kind": KeyRule(
        "meaning", "the adapter's update is computed differently; dora has tensors that the other kinds lack"
    ),
    "adapter.rank": KeyRule("fixed", _TENSORS_DIFFER),
    "adapter.alpha": KeyRule("meaning", "the trained adapter is scaled differently at once"),
    "adapter.dropout": KeyRule("meaning", "dropout differs from here on"),
    "adapter.targets": KeyRule(
        "meaning", "different modules may be adapted, whose tensors the checkpoint lacks"
    ),
    "adapter.modules_to_save": KeyRule(
        "meaning", "different modules may be trained, whose tensors the checkpoint lacks"
    ),
    "rewards": KeyRule("meaning", "answers get other rewards from here on"),
    "rewards.deadline": KeyRule("line", "how long a reward may take"),
    "rewards.on_error": KeyRule("line", "what follows if a reward fails"),
    "rollout": KeyRule("meaning", "answers are sampled differently from here on"),
    "rollout.url": KeyRule("line", "another server samples; it must serve the same model"),
    "rollout.patience": KeyRule("line", "how long a server is waited for"),
    "rollout.environment.deadline": KeyRule("line", "how long a call of the environment may take"),
    "rollout.environment.on_error": KeyRule("line", "what follows if the environment fails"),
    "rollout.steps": KeyRule("fixed", "the next step would belong to a different rollout"),
    "grpo": KeyRule("meaning", "answers count differently in the loss from here on"),
    "adapter.init": KeyRule("fixed", "the frozen weights differ"),
    "adapter.init_steps": KeyRule("fixed", "the frozen weights differ"),
    "adapter.from": KeyRule("contents", name="model"),
    "adapter.merge": KeyRule("contents", name="model"),
    "freeze": KeyRule("meaning", "different parameters may be trained, whose state the checkpoint lacks"),
    "train_only": KeyRule("meaning", "different parameters may be trained, whose state the checkpoint lacks"),
    "train_parts": KeyRule(
        "meaning", "different parameters may be trained, whose state the checkpoint lacks"
    ),
    "data.train": _ROWS,
    "data.eval": _ROWS,
    "data.mix": _ROWS,
    "data.format": _ROWS,
    "data.template": _ROWS,
    "data.plain_texts": _ROWS,
    "data.thinking": _ROWS,
    "data.ignore": _ROWS,
    "data.thoughts": _ROWS,
    "data.control_tokens": _ROWS,
    "data.date": _ROWS,
    "data.system": _ROWS,
    "data.too_long": _ROWS,
    "data.on_bad_row": _ROWS,
    "data.check_template": _ROWS,
    "data.pixels": _ROWS,
    "data.media_dir": _ROWS,
    "data.cache_bytes": KeyRule("line", "what is kept in memory; training does not change"),
    "data.frames": _ROWS,
    "data.image_hosts": _ROWS,
    "data.boxes": _ROWS,
    "data.resolution": KeyRule("meaning", "pictures have other sizes"),
    "data.max_length": KeyRule("meaning", "rows are truncated and packed differently"),
    "data.packing": KeyRule("meaning", "sequences combine different rows, and a step has different rows"),
    "data.loss_on": KeyRule("meaning", "the loss covers different tokens"),
    "objective": KeyRule("meaning", "the objective is different"),
    "preference": KeyRule("meaning", "the loss is different from here on"),
    "embed": KeyRule("meaning", "embeddings are computed and compared differently from here on"),
    "embed.query_prefix": _ROWS,
    "embed.document_prefix": _ROWS,
    "classify.labels": KeyRule("fixed", "the outputs of the head would have other meanings"),
    "classify.multi_label": KeyRule("fixed", "the outputs of the head would have other meanings"),
    "classify.class_weights": KeyRule("meaning", "labels count differently in the loss from here on"),
    "preference.reference": KeyRule("contents", name="model"),
    "diffusion": KeyRule(
        "meaning", "the loss, or what the model sees of a picture, is different from here on"
    ),
    "diffusion.prior": _ROWS,
    "diffusion.eval_seed": _ROWS,
    "diffusion.cache": KeyRule("line", "where latents are computed; training does not change"),
    "diffusion.prompts": KeyRule("line", _ONLY_MEASUREMENT),
    "diffusion.sample_steps": KeyRule("line", _ONLY_MEASUREMENT),
    "diffusion.guidance": KeyRule("line", _ONLY_MEASUREMENT),
    "optim.kind": KeyRule("fixed", "the checkpoint has the state of a different optimizer"),
    "optim.options": KeyRule("meaning", "updates differ from here on"),
    "optim.lr": KeyRule("meaning", "updates are larger or smaller from here on"),
    "optim.muon_scale": KeyRule("meaning", "updates are larger or smaller from here on"),
    "optim.muon_lr": KeyRule("meaning", "updates are larger or smaller from here on"),
    "optim.part_lr": KeyRule("fixed", "the checkpoint has the state of different groups of parameters"),
    "optim.lora_b_ratio": KeyRule("fixed", "the checkpoint has the state of different groups of parameters"),
    "optim.schedule": KeyRule("meaning", "the learning rate differs from here on"),
    "optim.schedule_start": KeyRule("meaning", "the learning rate differs from here on"),
    "optim.cycles": KeyRule("meaning", "the learning rate differs from here on"),
    "optim.power": KeyRule("meaning", "the learning rate differs from here on"),
    "optim.warmup": KeyRule("meaning", "the learning rate differs from here on"),
    "optim.min_lr": KeyRule("meaning", "the learning rate differs from here on"),
    "optim.weight_decay": KeyRule("meaning", "weights are decayed more or less from here on"),
    "optim.betas": KeyRule("meaning", "the moments decay faster or slower from here on"),
    "optim.eps": KeyRule("meaning", "updates differ slightly from here on"),
    "optim.state_dtype": KeyRule("fixed", "the checkpoint has the optimizer's state in the other dtype"),
    "optim.label_smoothing": KeyRule("meaning", "the loss in training differs from here on"),
    "optim.loss_weight": KeyRule("meaning", "the loss in training differs from here on"),
    "optim.router_loss": KeyRule("meaning", "the loss in training differs from here on"),
    "optim.max_grad_norm": KeyRule("meaning", "gradients are clipped differently from here on"),
    "batch.global": _OLD_SIZE,
    "batch.per_rank": _OLD_SIZE,
    "batch.accumulate": _OLD_SIZE,
    "seed": KeyRule(
        "meaning",
        "order, dropout and the evaluation split are drawn again: rows of this epoch may be repeated or skipped,"
        " and evaluation rows may have been trained on",
    ),
}


def rule_of(key: str) -> KeyRule:
    """The rule of a key: its own, or that of its section."""
    prefix = key
    while prefix not in RULES and "." in prefix:
        prefix = prefix.rpartition(".")[0]
    return RULES.get(prefix, KeyRule("meaning", "the run becomes a different one"))


@dataclass(frozen=True, slots=True)
class Change:
    """A config key that differs between two starts."""

    key: str
    before: Any
    after: Any

    @property
    def rule(self) -> KeyRule:
        """How it is judged."""
        return rule_of(self.key)

    @property
    def values(self) -> str:
        """E.g. `optim.lr is 0.0001, and was 0.0002`."""
        return f"{self.key} is {shown(self.after)}, and was {shown(self.before)}"

    @property
    def text(self) -> str:
        """One line: the values and the meaning."""
        return f"{self.values}: {self.rule.says}" if self.rule.says else self.values


def changes_between(before: RunConfig, after: RunConfig) -> list[Change]:
    """Every key whose value differs, in the order of the schema."""
    old, new = (config.model_dump(mode="json", by_alias=True) for config in (before, after))
    return list(_differences(old, new, ""))


@dataclass(frozen=True, slots=True)
class ChangeFinding:
    """A difference from the start that a run resumes.

    Attributes:
        name: its name in `--allow`; empty if it needs no permission.
        text: one line: the values and the meaning.
        verdict: line: the run resumes, and the line is shown. refused: resumes only if allowed.
            fixed: never resumes.
    """

    name: str
    text: str
    before: Any = None
    after: Any = None
    verdict: Literal["line", "refused", "fixed"] = "line"

    @property
    def record(self) -> dict[str, object]:
        """Its record in the plan, once it was allowed."""
        return {"key": self.name, "before": self.before, "after": self.after}


def judge_key(change: Change) -> ChangeFinding | None:
    """The finding of a changed key by itself; None if there is nothing to report, or the plan or
    contents decide.
    """
    verdicts: dict[Kind, Literal["line", "refused", "fixed"]] = {
        "line": "line",
        "meaning": "refused",
        "fixed": "fixed",
    }
    verdict = verdicts.get(change.rule.kind)
    if verdict is None:
        return None
    name = "" if verdict == "line" else change.key
    return ChangeFinding(name, change.text, change.before, change.after, verdict)


def not_allowed(findings: Iterable[ChangeFinding], allow: frozenset[str]) -> list[ChangeFinding]:
    """The findings that prevent a resume."""
    return [f for f in findings if f.verdict == "fixed" or (f.verdict == "refused" and f.name not in allow)]


def refusal(
    findings: Sequence[ChangeFinding], *, root: str, new_name: str, origins: Mapping[str, str] | None = None
) -> UsageError:
    """Why a run cannot resume: a headline with the alternatives, and each change with its place and
    its fix.

    Args:
        findings: the findings that prevent it; at least one.
        new_name: the new name after `--fresh`.
        origins: where keys of the new config were set, e.g. `train.yaml:7`.
    """
    fixed = [finding.name for finding in findings if finding.verdict == "fixed"]
    flags = " ".join(f"--allow {finding.name}" for finding in findings if finding.verdict != "fixed")
    if fixed:
        way = f"revert {', '.join(fixed)}, which cannot be allowed" + (
            f", and pass {flags} for the rest" if flags else ""
        )
    else:
        way = f"revert {'it' if len(findings) == 1 else 'them'}, or pass {flags} to resume anyway"
    headline = Problem(
        f"the run in {root} would become a different one: {len(findings)} change{'s' if len(findings) > 1 else ''}",
        "output_dir",
        "a resumed run must mean the same from its first step to its last",
        f"{way}, or set a different output_dir, or pass --fresh: it renames the run there to {new_name}",
    )
    return UsageError(headline, *(_problem(finding, root, origins or {}) for finding in findings))


def _problem(finding: ChangeFinding, root: str, origins: Mapping[str, str]) -> Problem:
    """A change, where its new and its earlier value are, and what makes the run the same again."""
    key = finding.name
    while key and key not in origins:
        key = key.rpartition(".")[0]
    where = f"{origins.get(key, finding.name)}; earlier: {root}/config.yaml"
    is_key = finding.name in all_keys(RunConfig) and ABSENT not in (finding.before, finding.after)
    same = f"set {finding.name} to {shown(finding.before)}" if is_key else "revert the change"
    fix = (
        f"{same}; it cannot be allowed"
        if finding.verdict == "fixed"
        else f"{same}, or pass --allow {finding.name}"
    )
    return Problem(finding.text, where, fix=fix)


def read_allowed(words: Iterable[str]) -> frozenset[str]:
    """The names given to `--allow`: keys, or the name of the contents that a key refers to.

    Raises:
        UsageError: with all unknown names.
    """
    known = all_keys(RunConfig)
    names, problems = set(), []
    for word in words:
        if word in NAMES or (word in known and not _is_section(word, known)):
            names.add(name_of(word))
        else:
            problems.append(_unknown(word, known))
    if problems:
        raise UsageError(*problems)
    return frozenset(names)


def name_of(key: str) -> str:
    """The name of a key in `--allow`."""
    return key if key in NAMES else rule_of(key).name or key


def shown(value: Any) -> str:
    """A value for people, on one line."""
    return "nothing" if value is ABSENT else one_line(json.dumps(value, ensure_ascii=False), limit=80)


ABSENT = object()
_MAPPINGS = frozenset({"optim.options"})
"""Keys with a mapping as their value, which changes as a whole."""


_LISTS = frozenset({"rewards", "eval.metrics"})
"""Lists of sections, whose keys have rules."""


def _differences(before: Any, now: Any, key: str) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(now, dict) and key not in _MAPPINGS:
        for name in dict.fromkeys([*before, *now]):
            dotted = f"{key}.{name}" if key else name
            yield from _differences(before.get(name, ABSENT), now.get(name, ABSENT), dotted)
    elif key in _LISTS and isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for old, new in zip(before, now, strict=True):
            yield from _differences(old, new, key)
    elif before != now:
        yield Change(key, before, now)


def _is_section(word: str, known: list[str]) -> bool:
    """Whether it only contains keys. `adapter` and `data.train` are values as well."""
    return word not in RULES and any(key.startswith(f"{word}.") for key in known)


def _unknown(word: str, known: list[str]) -> Problem:
    what = f"--allow {one_line(word, limit=60)}: there is no such key"
    if word in known:
        members = [key for key in known if key.startswith(f"{word}.")]
        return Problem(
            f"--allow {word}: that is a section", "command line", "", f"name its key: {', '.join(members)}"
        )
    leaves = [key for key in known if not _is_section(key, known)]
    near = nearest(word, [*NAMES, *leaves])
    same = [key for key in leaves if key.rpartition(".")[2] == word]
    if near is None and same:
        near = same[0]
    names = ", ".join(NAMES)
    fix = f"did you mean `{near}`?" if near else f"pass a config key, e.g. optim.lr, or one of {names}"
    return Problem(what, "command line", "", fix)

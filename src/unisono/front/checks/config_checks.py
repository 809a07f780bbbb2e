"""Checks of what a run with this config needs: model, data, memory, disk, packages, the hub; and
whether it may start.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from unisono.base.errors import Problem, UnisonoError
from unisono.base.requirements import INSTALL_TRAINER, missing_trainer_packages
from unisono.base.text import show_bytes, show_count
from unisono.front.checks.check import CheckFunction, DoctorCheck, Finding, Status, Surroundings, found
from unisono.guard.facts.environment import Hub, is_cached, probe_url, read_hub
from unisono.guard.places.placement import lay_out
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import read_holder
from unisono.guard.rundir.records import read_result
from unisono.jobs.runs.node_report import checkpoints_bytes
from unisono.jobs.runs.planning import prepare
from unisono.jobs.runs.preparation import plan_start
from unisono.jobs.runs.start_decision import StartDecision, decide_start
from unisono.jobs.runs.train_request import with_overwriting
from unisono.trainer.config import LoadedConfig, RunConfig
from unisono.trainer.config.data_sections import sources_of
from unisono.trainer.plan import RunPlan, needed_packages
from unisono.trainer.plan.families import family_of

HUB = DoctorCheck(
    "config.hub",
    "the Hub, if this run needs it",
    "the start fails if a model or dataset cannot be downloaded, perhaps on one node only",
    "Only if the config names a model, tokenizer or data set by its Hub id: whether it is in the cache,"
    " whether offline mode is on, whether the Hub responds within two seconds, and whether there is a token"
    " (never shown). Warns at most.",
    ("hub_unreachable", "gated_model"),
)

_HUB_LIMIT_S = 2.0
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def check_hub(facts: Surroundings) -> list[Finding]:
    """Whether the config's models and datasets can be had from the Hub. Nothing is downloaded."""
    assert facts.loaded is not None, "this area is checked with a config only"
    named = hub_ids(facts.loaded.config)
    cache = facts.environment.hub_cache
    missing = [(kind, name) for kind, name in named if not is_cached(cache, kind, name)]
    known = read_hub(cache)
    answer = probe_url(known.endpoint, limit_s=_HUB_LIMIT_S) if missing and not known.offline else ""
    return [judge_hub(named, missing, known, answer, cache=cache)]


def hub_ids(config: RunConfig) -> list[tuple[str, str]]:
    """Kind and id of everything that the config names by Hub id.

    Paths, URLs and built-in models are not on the Hub.
    """
    models = [name for name in (config.model.path, config.model.tokenizer) if name and _is_id(name)]
    sources = [section.path for _, section in sources_of(config.data)]
    return [("models", name) for name in models] + [("datasets", name) for name in sources if _is_id(name)]


def _is_id(name: str) -> bool:
    return (
        bool(_HUB_ID.match(name))
        and not Path(name).exists()
        and not Path(name).suffix.startswith((".json", ".csv", ".parquet", ".txt"))
    )


def judge_hub(
    named: list[tuple[str, str]], missing: list[tuple[str, str]], known: Hub, answer: str, *, cache: Path
) -> Finding:
    """The finding on the Hub.

    Pure. `answer`: why the Hub does not respond; empty if it does or was not contacted.
    """
    token = f"there is a token ({known.token})" if known.token else "there is no token"
    names = ", ".join(name for _, name in missing)
    if not named:
        return found(HUB, "pass", "this run needs nothing from it")
    if not missing:
        return found(HUB, "pass", f"{', '.join(name for _, name in named)}: in the cache, {cache}")
    if known.offline:
        fix = [f"`unset {known.offline}`", "or copy the Hub cache from a machine that has it"]
        return found(
            HUB,
            "warn",
            f"{names}: not in the cache, {cache}, and {known.offline} forbids downloads",
            fix=fix,
        )
    if answer:
        fix = [
            f"`curl -sI {known.endpoint}`; set a proxy with HTTPS_PROXY, a mirror with HF_ENDPOINT",
            "or download on a different machine, and copy the Hub cache",
        ]
        return found(
            HUB,
            "warn",
            f"{names}: not in the cache, and {known.endpoint} does not respond: {answer}",
            fix=fix,
        )
    if not known.token:
        return found(
            HUB,
            "pass",
            f"{names}: to be downloaded from {known.endpoint}, which responds; {token}, which gated and"
            " private repositories need",
        )
    return found(HUB, "pass", f"{names}: to be downloaded from {known.endpoint}, which responds; {token}")


START = DoctorCheck(
    "config.start",
    "whether this run may start",
    "a start is refused if output_dir contains a finished run, a different run or other files, or if another"
    " process holds its lock",
    "The first decision of `unisono train`: a new run, a resumed one, or a refusal, which fails with the fix."
    " Warns if a live process holds the run, or if the run there is finished: then nothing is wrong with this"
    " machine.",
)
MODEL = DoctorCheck(
    "config.model",
    "the model and its tokenizer",
    "the start fails on the first node that finds a missing file, or a config and weights of different"
    " models",
    "Everything that a start reads: config.json, the shapes of the weights, the tokenizer. Fails, with all"
    " problems.",
    ("model_path_missing", "tokenizer_mismatch"),
)
DATA = DoctorCheck(
    "config.data",
    "the rows",
    "an unreadable row, a row that is too long, or a template that masks all tokens is found now rather than"
    " after the wait in a queue",
    "The rows are read, rendered and tokenized as at the start, which then finds them in the cache. Fails,"
    " with all problems.",
)
MEMORY = DoctorCheck(
    "config.memory",
    "memory of a rank",
    "a rank runs out of memory at its longest batch, usually not the first",
    "The plan's estimate of weights, state, activations and loss, compared with the free memory of the rank's"
    " device. Warns above 90 %, fails above 100 %.",
    ("cuda_oom", "host_oom_killed"),
)
DISK = DoctorCheck(
    "config.disk",
    "disk for checkpoints",
    "a full disk loses the checkpoint being written, and ends the run",
    "Maximum size of (keep + 2) checkpoints and the final weights, compared with free space in output_dir."
    " Warns above 90 %, fails above 100 %.",
    ("disk_full",),
)
PACKAGES = DoctorCheck(
    "config.packages",
    "packages that this run needs",
    "a missing package for one option fails only when that option is first used",
    "The packages for `track`, `model.quantize` and images, the storage's package for `checkpoint.storage`"
    " and URLs of data (fail if missing), py-spy for stacks of unresponsive ranks (warns).",
    ("missing_dependency",),
)
CATALOGUE: tuple[DoctorCheck, ...] = (START, MODEL, DATA, MEMORY, DISK, PACKAGES, HUB)

_TIGHT = 0.9


@dataclass(frozen=True)
class _PreparedRun:
    """Result of preparing the run: a plan, or the problems."""

    plan: RunPlan | None
    problems: tuple[Problem, ...] = ()


def check_config(facts: Surroundings) -> list[Finding]:
    """All findings on the config, in the order of a start; none without a config."""
    if facts.loaded is None:
        return []
    packages = _check_packages(facts, facts.loaded)
    start, of_hub = _check_start(facts, facts.loaded), check_hub(facts)
    if any(finding.status == "warn" for finding in of_hub):  # a hub that is silent is waited for very long
        why = "not checked: the Hub is needed and not available"
        unknown = [found(check, "unknown", why) for check in (MODEL, DATA, MEMORY, DISK)]
        return [*start, *unknown, *packages, *of_hub]
    prepared = _prepare_run(facts, facts.loaded)
    return [
        *start,
        *_model_and_data(prepared, facts.loaded),
        *_memory_and_disk(facts, prepared),
        *packages,
        *of_hub,
    ]


def _check_start(facts: Surroundings, loaded: LoadedConfig) -> list[Finding]:
    run = RunDir(Path(loaded.config.output_dir))
    holder = read_holder(run.lock)
    if holder is not None:
        fix = ["wait for it to end, or end it", "or choose a different output_dir"]
        return [
            found(START, "warn", f"{run.root} is held by {holder}: a start is refused until it ends", fix=fix)
        ]
    try:
        decide_start(run, loaded.config, resume=False, fresh=False, origins=loaded.origins)
    except UnisonoError as error:
        if with_overwriting(facts.request).fresh:
            return [
                found(START, "pass", f"overwrite_output_dir: {run.root} is renamed, and a new run starts")
            ]
        finished = read_result(run)
        is_done = finished is not None and finished.is_completed  # nothing is wrong with this machine then
        return [
            _problem_finding(START, problem, status="warn" if is_done else "fail")
            for problem in error.problems
        ]
    what = "resumes the run there" if run.plan.exists() else "a new run"
    return [found(START, "pass", f"{what}: {run.root}")]


def _problem_finding(check: DoctorCheck, problem: Problem, *, status: Status = "fail") -> Finding:
    evidence = ": ".join(part for part in (problem.where, problem.what, problem.why) if part)
    return found(check, status, evidence, fix=[problem.fix] if problem.fix else [])


def _prepare_run(facts: Surroundings, loaded: LoadedConfig) -> _PreparedRun:
    """Data, model and plan as at a start; `config.start` checks the decision on an earlier run."""
    request = facts.request
    try:
        prepared = prepare(request, loaded, facts.environment, ledger=False, show=facts.request.show)
        run = RunDir(Path(loaded.config.output_dir))
        decision = StartDecision("fresh", "doctor", "as a new run")
        layout = lay_out(
            [facts.local_node.offer_as(node_rank) for node_rank in range(facts.local_node.topology.nodes)]
        )
        plan = plan_start(
            request,
            loaded,
            facts.local_node,
            run=run,
            decision=decision,
            prepared=prepared,
            show=facts.request.show,
            layout=layout,
        )
    except UnisonoError as error:
        return _PreparedRun(None, error.problems)
    return _PreparedRun(plan)


def _model_and_data(prepared: _PreparedRun, loaded: LoadedConfig) -> list[Finding]:
    """Findings on model and data; a problem belongs to one of them by its key or place."""
    if prepared.plan is None:
        places = ("model", "adapter", loaded.config.model.path, loaded.config.model.tokenizer or "model")
        of_model = [problem for problem in prepared.problems if problem.where.startswith(places)]
        of_data = [problem for problem in prepared.problems if problem not in of_model]
        findings = [_problem_finding(MODEL, problem) for problem in of_model]
        findings += [_problem_finding(DATA, problem) for problem in of_data]
        other, what = (DATA, "the model") if of_model else (MODEL, "the rows")
        if not (of_model and of_data):
            findings.append(found(other, "unknown", f"not checked completely: {what} failed first"))
        return findings
    model, train = prepared.plan.model, prepared.plan.data.train
    text = (
        f"{prepared.plan.config.model.path}: {model.model_type}, {show_count(model.parameters)} parameters,"
        f" {show_bytes(model.weight_bytes)}"
    )
    rows = family_of(model).checked(train, prepared.plan.total_steps)
    return [found(MODEL, "pass", text), found(DATA, "pass", rows)]


def _memory_and_disk(facts: Surroundings, prepared: _PreparedRun) -> list[Finding]:
    plan = prepared.plan
    if plan is None:
        why = "unknown until model and data can be read"
        return [found(MEMORY, "unknown", why), found(DISK, "unknown", why)]
    findings = [judge_memory(plan)]
    free, need = facts.report.output.free_bytes, _disk_bytes(plan)
    if free is None:
        findings.append(
            found(
                DISK,
                "unknown",
                f"{show_bytes(need)} needed; free space in {plan.output_dir} unknown",
            )
        )
    else:
        findings.append(judge_disk(need, free, where=plan.output_dir))
    return findings


def judge_memory(plan: RunPlan) -> Finding:
    """Pure."""
    need, free = plan.memory.total, plan.device.memory_bytes
    parts = (
        f"weights {show_bytes(plan.memory.weights)}, state {show_bytes(plan.memory.trainable)}, activations"
        f" {show_bytes(plan.memory.activations)}, loss {show_bytes(plan.memory.loss_head)}"
    )
    text = f"about {show_bytes(need)} per rank ({parts}); {show_bytes(free)} free on {plan.device.name}"
    if need <= _TIGHT * free:
        return found(MEMORY, "pass", text)
    fix = [
        "`batch.micro=1`, a shorter data.max_length, or `memory.gradient_checkpointing=true`",
        "or train an adapter instead of all weights",
    ]
    if plan.world_size > 1:
        fix.insert(1, "`parallel.strategy=fsdp` shards weights and state over the ranks")
    return found(MEMORY, "warn" if need <= free else "fail", text, fix=fix)


def _disk_bytes(plan: RunPlan) -> int:
    """Bytes of all checkpoints that exist at once, plus the final weights."""
    model = plan.model
    checkpoints = checkpoints_bytes(
        plan.config, {"parameters": model.parameters, "linear_in_out": model.linear_in_out}
    )
    final = model.weight_bytes or 2 * model.parameters
    return (checkpoints or 0) + (final if plan.config.adapter is None else 0)


def judge_disk(need: int, free: int, *, where: str) -> Finding:
    """Pure."""
    text = (
        f"at most {show_bytes(need)} for checkpoints and the final model; {show_bytes(free)} free in {where}"
    )
    if need <= _TIGHT * free:
        return found(DISK, "pass", text)
    fix = ["lower checkpoint.keep, or choose a different output_dir", f"`df -h {where}`"]
    return found(DISK, "warn" if need <= free else "fail", text, fix=fix)


def _check_packages(facts: Surroundings, loaded: LoadedConfig) -> list[Finding]:
    """Findings on packages that this config needs."""
    if lacking := missing_trainer_packages():
        text = f"the trainer is not installed here: {', '.join(lacking)} missing"
        return [found(PACKAGES, "fail", text, fix=[f"`{INSTALL_TRAINER}`"])]
    config, installed = loaded.config, facts.probes.packages()
    required = {package: needed.words for needed in needed_packages(config) for package in needed.names}
    missing = [
        found(
            PACKAGES,
            "fail",
            f"{package} is not installed, and {why} needs it",
            fix=[f"`pip install {package}`"],
        )
        for package, why in required.items()
        if package not in installed
    ]
    if missing:
        return missing
    if facts.local_node.topology.nproc > 1 and "py-spy" not in installed:
        text = "py-spy is not installed: no stack of a rank that hangs in native code"
        return [found(PACKAGES, "warn", text, fix=["`pip install py-spy`"])]
    return [
        found(PACKAGES, "pass", f"{', '.join(required) or 'none'} in addition to unisono's own dependencies")
    ]


CHECKS: tuple[CheckFunction, ...] = (check_config,)

"""Uploads the result of a run to the hub: the directory of `export` and a model card that is made
from the run, without secrets and local paths.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unisono.base._version import __version__
from unisono.base.errors import ModelError, UsageError
from unisono.base.files import objects_of, read_json, read_object, write_json, write_text
from unisono.base.messages import Show
from unisono.base.text import (
    is_secret,
    names_secret,
    one_line,
    plain,
    redact,
    show_count,
    why_unreadable,
)
from unisono.front.hub.download import CacheCheck, RemoteFile, damage, digest_of, find_repo, hub_error
from unisono.guard.facts import read_environment
from unisono.guard.facts.environment import hub_silence, read_hub
from unisono.guard.rundir import RunDir, or_nearest_run
from unisono.guard.rundir.lock import watched_holder
from unisono.guard.rundir.records import iterate_metrics, shown_outcome
from unisono.guard.supervise.task_process import run_request
from unisono.trainer.checkpoint.verify import check_model, read_model_manifest, write_model_manifest
from unisono.trainer.config import RunConfig
from unisono.trainer.config.heads import CLASSIFY, EMBED, REWARD
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.families import family_at, need_decoder
from unisono.trainer.plan.task_requests import ExportRequest, RequestedModel

CARD = "README.md"
_HIDDEN_KEYS = ("output_dir", "storage", "track", "cache_dir", "reasons")
_SETTINGS = ("adapter_config.json", "config.json", "tokenizer_config.json", "generation_config.json")
_NAMES_PATH = re.compile(r"name_or_path$|_file$|_path$")
_PACKAGES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "datasets")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MOST_EVALUATIONS = 8
_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Publication:
    """What `push` uploads.

    Attributes:
        card: the text of README.md, which is among the files.
        files: with their digests, as the hub would list them.
    """

    repo: str
    directory: Path
    what: str
    card: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files)


def refuse_unready(root: Path, step: int | None) -> None:
    """Refuses a run that has no finished, verified result; with `step` the checkpoint is verified
    by the export.

    Raises:
        UsageError: if it is not a run, not finished, or its result has no digests.
        IntegrityError: if its result is damaged.
    """
    run = RunDir(root)
    if not run.plan.is_file():
        raise UsageError.of(
            f"{root} is not a run of unisono",
            where="command line",
            why="there is no plan.json in it",
            fix=or_nearest_run(
                root, "name the output_dir of a run, as in `unisono push runs/demo OWNER/NAME`"
            ),
        )
    if family_at(root).draws:
        raise UsageError.of(
            f"{root} is a LoRA of an image model",
            where=str(root),
            why="push writes model cards only for language models",
            fix=f"`unisono export {root} OUT --format diffusers`, then `hf upload REPO OUT`",
        )
    need_decoder(str(root), where=str(root))
    if step is not None:
        return
    result = read_object(run.result) if run.result.is_file() else {}
    running = watched_holder(run.lock) is not None
    final = next((path for path in (run.adapter, run.model) if path.is_dir()), None)
    if running or result.get("outcome") != "completed" or final is None:
        ended = shown_outcome(str(result.get("outcome") or "unknown"), result.get("verdict"))
        outcome = "it is running" if running else f"its outcome is {ended}"
        raise UsageError.of(
            f"{root} is not finished",
            where=str(run.result),
            why=outcome,
            fix=(
                f"let it finish, or push a checkpoint with --step N; `unisono checkpoint ls {root}` lists"
                " them"
            ),
        )
    checked = check_model(final)
    if not checked.listed:
        raise UsageError.of(
            f"{final} cannot be verified",
            where=str(final),
            why="it has no list of digests",
            fix="push a checkpoint with --step N",
        )
    if not checked.intact:
        raise checked.refusal(restore="copy the directory again, or push a checkpoint with --step N")


def refuse_without_token(repo: str) -> None:
    """Refuses to begin what cannot be uploaded.

    Raises:
        UsageError: if the name is none of the hub, there is no token, or the hub does not answer.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", repo):
        raise UsageError.of(
            f"{repo} is not a name of the hub", where="REPO", fix="it is OWNER/NAME, e.g. anna/support-lora"
        )
    hub = read_hub(read_environment().hub_cache)
    if silence := hub_silence(hub):
        raise ModelError.of(
            f"{repo} cannot be uploaded",
            where=hub.endpoint,
            why=silence,
            fix="check the network; --dry-run needs none",
        )
    if not hub.token:
        raise UsageError.of(
            "uploads need a token, and none is set",
            where="HF_TOKEN",
            fix=(
                "set HF_TOKEN to a token with write access, or log in with `hf auth login`; --dry-run needs"
                " none"
            ),
        )


def prepare(root: Path, repo: str, out: Path, *, merge: bool, step: int | None, show: Show) -> Publication:
    """Writes the directory that is uploaded to `out`, which does not exist.

    Raises:
        UnisonoError: of the export; or if a file would show a local path or a secret.
    """
    run = RunDir(root)
    plan = _plan_of(run)
    request = ExportRequest(model=RequestedModel(str(root), step), out=str(out), merge=merge)
    made = run_request(request, on_message=show)
    private = sorted(set(_local_paths(plan)) | {str(root.absolute()), str(out)}, key=len)
    base = base_of(plan)
    for name in _SETTINGS:
        _clean_settings(out / name, base)
    card = model_card(run, plan, repo, what=made["what"], step=step)
    write_text(out / CARD, card)
    manifest = read_model_manifest(out)
    known = manifest.files if manifest else {}
    weights = {name: entry for name, entry in known.items() if name.endswith(".safetensors")}
    write_model_manifest(out, weights)
    _refuse_private(out, private)
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    remote = tuple(
        RemoteFile(str(file.relative_to(out)), file.stat().st_size, digest_of(file, git=False))
        for file in files
    )
    return Publication(repo, out, made["what"], card, remote)


def _plan_of(run: RunDir) -> RunPlan:
    try:
        return RunPlan.model_validate(read_json(run.plan))
    except (OSError, ValueError) as error:
        raise UsageError.of(
            "the plan of the run cannot be read, and the card is made from it",
            where=str(run.plan),
            why=why_unreadable(error),
            fix="restore the file from a copy of the run",
        ) from error


def base_of(plan: RunPlan) -> str:
    """The base model as others may read it: its hub id, `builtin:NAME`, or the last part of a local
    path.
    """
    path = plan.config.model.path
    return path if path.startswith("builtin:") or _is_hub_id(path) else Path(path).name


def _is_hub_id(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def _clean_settings(file: Path, base: str) -> None:
    """Replaces local paths in a settings file of transformers or peft."""
    if not file.is_file():
        return
    settings = read_json(file)
    if not isinstance(settings, dict):
        return
    cleaned = dict(settings)
    for key, value in settings.items():
        if isinstance(value, str) and value and _NAMES_PATH.search(key) and _is_local(value):
            cleaned[key] = base if key.endswith("name_or_path") else Path(value).name
    if cleaned != settings:
        write_json(file, cleaned)


def _is_local(text: str) -> bool:
    return text.startswith(("/", "~", "./", "../", "file:")) or re.match(r"[A-Za-z]:\\", text) is not None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(inner)


def _local_paths(plan: RunPlan) -> Iterator[str]:
    """The paths of this machine that the plan names."""
    body = plan.to_json()
    for part in ("config", "model", "output_dir", "data"):
        yield from (text for text in _strings(body[part]) if text.startswith("/") and text.count("/") > 1)


def _refuse_private(directory: Path, private: Iterable[str]) -> None:
    """Refuses files with text that is nobody else's business.

    Weights and the words of tokenizers are not searched for secrets.
    """
    private_parts = []
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        if file.suffix == ".safetensors" or file.stat().st_size > _TEXT_BYTES:
            continue
        text = file.read_text("utf-8", errors="replace")
        private_parts += [f"{file.name} has the path {path}" for path in private if path in text]
        if file.name in (CARD, *_SETTINGS) and any(is_secret(word) for word in re.split(r"[\s\"'`|]+", text)):
            private_parts.append(f"{file.name} has a secret")
    if private_parts:
        raise UsageError.of(
            "the files would show what concerns only this machine",
            where=str(directory),
            why="; ".join(private_parts[:3]),
            fix="`unisono export RUN OUT`, edit the file, and upload OUT with `hf upload`",
        )


# ---- the card


def model_card(run: RunDir, plan: RunPlan, repo: str, *, what: str, step: int | None) -> str:
    """The text of README.md: base, data with digests, losses, versions and the config."""
    config, base, objective = plan.config, base_of(plan), plan.config.objective
    is_adapter = what == "adapter"
    metrics = [line for line in iterate_metrics(run.metrics) if step is None or line["step"] <= step]
    parts = [
        _front_matter(config, base, objective, is_adapter=is_adapter),
        f"# {repo.rpartition('/')[2]}",
        f"{_kind(config, what)} of `{base}`, trained with unisono {__version__} (objective: {objective}).",
        _usage_of_embeddings(repo)
        if objective == EMBED
        else _usage(
            repo,
            base,
            is_adapter=is_adapter,
            outputs=plan.head.outputs if plan.head is not None else 0,
            multimodal=plan.model.other_parameters > 0,
        ),
        "## Data\n\n" + _data(run, plan),
        "## Training\n\n" + _training(plan, metrics, step),
        "## Versions\n\n" + _versions(run),
        "## Config\n\n```yaml\n"
        + yaml.safe_dump(public_config(plan.to_json()["config"]), sort_keys=False, allow_unicode=True)
        + "```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _kind(config: RunConfig, what: str) -> str:
    if what == "adapter" and config.adapter is not None:
        return f"{config.adapter.kind.upper()} adapter (rank {config.adapter.rank})"
    return "A fine-tuned version" if what == "model" else "A fine-tuned version (the adapter is merged)"


_TASKS = {REWARD: "text-classification", CLASSIFY: "text-classification", EMBED: "sentence-similarity"}
"""The hub's names of what models are for, by objective."""


def _front_matter(config: RunConfig, base: str, objective: str, *, is_adapter: bool) -> str:
    sources = [text for text in _sources(config) if _is_hub_id(text) and "/" in text]
    kinds = [config.adapter.kind] if config.adapter is not None else []
    body: dict[str, object] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": _TASKS.get(objective, "text-generation"),
        "tags": ["unisono", objective, *kinds],
    }
    if _is_hub_id(base):
        body = {"base_model": base, **body}
    if sources:
        body["datasets"] = sources
    return "---\n" + yaml.safe_dump(body, sort_keys=False, allow_unicode=True) + "---"


def _sources(config: RunConfig) -> list[str]:
    train = config.data.train
    entries = train if isinstance(train, list) else [train]
    return [entry if isinstance(entry, str) else entry.path for entry in entries]


def _usage(repo: str, base: str, *, is_adapter: bool, outputs: int, multimodal: bool) -> str:
    kind = "SequenceClassification" if outputs else "MultimodalLM" if multimodal else "CausalLM"
    labels = f", num_labels={outputs}" if outputs else ""
    if is_adapter:
        code = (
            f"from peft import AutoPeftModelFor{kind}\n\nmodel ="
            f' AutoPeftModelFor{kind}.from_pretrained("{repo}"{labels})'
        )
        if multimodal:  # peft has no class for these
            code = (
                f"from peft import PeftModel\nfrom transformers import AutoModelFor{kind}\n\nmodel ="
                f' PeftModel.from_pretrained(AutoModelFor{kind}.from_pretrained("{base}"), "{repo}")'
            )
        note = (
            ""
            if _is_hub_id(base)
            else (
                f"\n\nThe base model `{base}` is not on the hub: set `base_model_name_or_path` in"
                " adapter_config.json to its directory."
            )
        )
    else:
        code = (
            f"from transformers import AutoModelFor{kind}\n\nmodel ="
            f' AutoModelFor{kind}.from_pretrained("{repo}")'
        )
        note = ""
    return f"```python\n{code}\n```{note}"


def _usage_of_embeddings(repo: str) -> str:
    code = f'from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer("{repo}")'
    return f"```python\n{code}\n```"


def _data(run: RunDir, plan: RunPlan) -> str:
    ledger = read_object(run.data) if run.data.is_file() else {}
    lines = ["| source | rows | used | tokens |", "|---|---|---|---|"]
    for source in objects_of(ledger.get("sources")):
        cells = [_public(str(source.get("path"))), *(source.get(key) for key in ("rows", "used", "tokens"))]
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    digests = {
        "files": plan.data.files_digest,
        "rows in order": plan.data.rows_digest,
        "tokenizer": plan.data.tokenizer_digest,
        "base model": plan.model.digest,
    }
    told = [f"{name} `{digest}`" for name, digest in digests.items() if digest]
    return "\n".join(lines) + (f"\n\nDigests (XXH3-128): {', '.join(told)}." if told else "")


def _training(plan: RunPlan, metrics: Sequence[Mapping[str, Any]], step: int | None) -> str:
    losses = [line for line in metrics if isinstance(line.get("loss"), float)]
    evaluations = [line for line in metrics if isinstance(line.get("eval_loss"), float)]
    last = losses[-1] if losses else {}
    lines = [
        (
            f"- steps: {step if step is not None else last.get('step', '?')} of"
            f" {plan.total_steps}, {plan.global_batch} sequences each"
        ),
        (
            f"- tokens: {show_count(last.get('tokens') or 0)}, {show_count(last.get('loss_tokens') or 0)} of"
            " them with a loss"
        ),
        f"- ranks: {plan.world_size} ({plan.strategy}, {plan.dtype})",
    ]
    if losses:
        lines.append(
            f"- loss: {losses[0]['loss']:.4f} at step {losses[0]['step']}, {last['loss']:.4f} at step"
            f" {last['step']}"
        )
    table = ["", "| step | held-out loss |", "|---|---|"] if evaluations else []
    shown = evaluations[:: max(1, -(-len(evaluations) // _MOST_EVALUATIONS))]
    shown += evaluations[-1:] if evaluations and shown[-1] is not evaluations[-1] else []
    table += [f"| {line['step']} | {line['eval_loss']:.4f} |" for line in shown]
    return "\n".join([*lines, *table])


def _versions(run: RunDir) -> str:
    packages = (read_object(run.environment) if run.environment.is_file() else {}).get("packages") or {}
    names = [
        f"{name} {packages[name]}" for name in ("python", *_PACKAGES) if isinstance(packages.get(name), str)
    ]
    return f"unisono {__version__}, {', '.join(names)}" if names else f"unisono {__version__}"


def public_config(value: Any, key: str = "") -> Any:
    """The config without secrets, outputs, null values, and the directories of local paths."""
    if isinstance(value, dict):
        kept = {name: public_config(inner, name) for name, inner in value.items() if name not in _HIDDEN_KEYS}
        return {name: inner for name, inner in kept.items() if inner not in (None, {}, [])}
    if isinstance(value, list):
        return [public_config(inner, key) for inner in value]
    if isinstance(value, str):
        return "…" if is_secret(value) or names_secret(key) else _public(value)
    return value


def _public(text: str) -> str:
    """A path of this machine without its directory; harmless text."""
    shown = text.rstrip("/").rpartition("/")[2] if _is_local(text) else text
    return redact(one_line(plain(shown), limit=300))


def _cell(value: object) -> str:
    return str("" if value is None else value).replace("|", "\\|")


# ---- the upload


def upload(made: Publication, *, private: bool) -> str:
    """Creates the repository if there is none, uploads all files in one commit, and compares what
    the hub lists with them; gives the commit.

    Raises:
        UnisonoError: if the hub refuses.
        IntegrityError: if it lists other content.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # re-exported

    disable_progress_bars()
    api = HfApi()
    try:
        api.create_repo(made.repo, private=private or None, exist_ok=True)
        operations = [CommitOperationAdd(file.path, str(made.directory / file.path)) for file in made.files]
        done = api.create_commit(
            made.repo, operations, commit_message=f"Upload {made.what} with unisono {__version__}"
        )
    except Exception as error:  # huggingface_hub passes on errors of several packages
        raise hub_error(error, made.repo, writes=True) from error
    verify_upload(made, str(done.oid))
    return str(done.oid)


def verify_upload(made: Publication, commit: str) -> None:
    """Compares the files that the hub lists at a commit with those that were uploaded.

    Raises:
        IntegrityError: if one is missing or differs.
    """
    listed = {file.path: file for file in find_repo(made.repo, commit).files}
    checked = CacheCheck()
    for file in made.files:
        remote = listed.get(file.path)
        if remote is None:
            checked.damaged.append(f"{file.path}: it is missing at the hub")
            continue
        is_git = len(remote.digest) == 40
        local_digest = digest_of(made.directory / file.path, git=True) if is_git else file.digest
        if remote.bytes != file.bytes or (remote.digest and remote.digest != local_digest):
            checked.damaged.append(f"{file.path}: the hub lists different content")
    if checked.damaged:
        raise damage(made.repo, checked, made.directory, "run the same command again")

"""Whether what this run needs from the hub can be had. Never more than a warning: the start itself says what it lacks."""

import re
from pathlib import Path

from unisono.config import RunConfig
from unisono.config.schema import SourceSection
from unisono.doctor.check import Check, Finding, Surroundings, found
from unisono.facts.hub import Hub, is_cached, probe_url, read_hub

HUB = Check(
    "config.hub", "the hub, where this run needs it",
    "a model or data set that cannot be downloaded ends the start, on one node perhaps and not on the others",
    "Only where the config names a model, tokenizer or data set by its hub id: whether it is in the cache, whether offline mode is on, whether the hub answers within two"
    " seconds, and whether there is a token (never which). Warns at most.",
    ("hub_unreachable", "gated_model"),
)  # fmt: skip

_LIMIT_S = 2.0
_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def hub(facts: Surroundings) -> list[Finding]:
    """What is missing is asked for by its name alone."""
    assert facts.loaded is not None, "the area is looked at with a config only"
    named = wanted(facts.loaded.config)
    cache = facts.environment.hub_cache
    missing = [(kind, name) for kind, name in named if not is_cached(cache, kind, name)]
    known = read_hub(cache)
    answer = probe_url(known.endpoint, limit_s=_LIMIT_S) if missing and not known.offline else ""
    return [judge_hub(named, missing, known, answer, cache=cache)]


def wanted(config: RunConfig) -> list[tuple[str, str]]:
    """What the config names by hub ids: its kind, and the id. What is a path, a URL or built in is not the hub's."""
    models = [name for name in (config.model.path, config.model.tokenizer) if name and _is_id(name)]
    train = config.data.train if isinstance(config.data.train, list) else [config.data.train]
    sources = [entry.path if isinstance(entry, SourceSection) else entry for entry in train]
    if isinstance(config.data.eval, str):
        sources.append(config.data.eval)
    return [("models", name) for name in models] + [("datasets", name) for name in sources if _is_id(name)]


def _is_id(name: str) -> bool:
    return (
        bool(_ID.match(name))
        and not Path(name).exists()
        and not Path(name).suffix.startswith((".json", ".csv", ".parquet", ".txt"))
    )


def judge_hub(
    named: list[tuple[str, str]], missing: list[tuple[str, str]], known: Hub, answer: str, *, cache: Path
) -> Finding:
    """Pure. `answer`: why the hub does not answer; empty where it does or was not asked."""
    token = f"there is a token ({known.token})" if known.token else "there is no token"
    names = ", ".join(name for _, name in missing)
    if not named:
        return found(HUB, "pass", "this run needs nothing of it")
    if not missing:
        return found(HUB, "pass", f"{', '.join(name for _, name in named)}: in the cache, {cache}")
    if known.offline:
        fix = [f"`unset {known.offline}`", "or copy the hub's cache from a machine that has it"]
        return found(
            HUB,
            "warn",
            f"{names}: not in the cache, {cache}, and {known.offline} forbids to ask for it",
            fix=fix,
        )
    if answer:
        fix = [
            f"`curl -sI {known.endpoint}`; a proxy is named by HTTPS_PROXY, a mirror by HF_ENDPOINT",
            "or download on another machine, and copy the hub's cache",
        ]
        return found(
            HUB, "warn", f"{names}: not in the cache, and {known.endpoint} does not answer: {answer}", fix=fix
        )
    if not known.token:
        return found(
            HUB,
            "pass",
            f"{names}: to be downloaded from {known.endpoint}, which answers; {token}, as gated and private ones need",
        )
    return found(HUB, "pass", f"{names}: to be downloaded from {known.endpoint}, which answers; {token}")

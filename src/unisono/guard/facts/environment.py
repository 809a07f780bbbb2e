"""The environment of this process: its variables, NCCL's own settings files, installed packages,
digests of unisono's own code, the Hugging Face Hub as configured here.
"""

import hashlib
import http.client
import os
import platform
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from unisono.base._version import PACKAGE
from unisono.base.causes.variables import find_variable
from unisono.base.errors import ModelError
from unisono.base.files import objects_of, open_plain, parse_json, path_below
from unisono.base.text import is_left_by_launcher, is_secret, names_secret
from unisono.guard.facts.machine import driver_version
from unisono.guard.facts.slurm import SlurmStep, read_slurm_step

# Also what the catalogue does not know: a misspelt NCCL_ALGOO is worth a line.
_FAMILY = re.compile(
    r"^(NCCL|TORCH_NCCL|GLOO|TORCH_GLOO|TORCH_DISTRIBUTED|TORCH_FR|ACCELERATE|FSDP|DS|TORCHINDUCTOR|TORCH_COMPILE)_"
)
# Where a misspelt name would stand: also those that begin almost as the families do.
_NEAR = re.compile(
    r"^(N[A-Z]{2,4}|GLOO|TORCH[A-Z]*|PYTORCH|CUDA|CUBLAS|NVIDIA|OMP|MKL|HF|MASTER|WORLD|LOCAL|NODE|UNISONO"
    r"|TOKENIZERS?|PYTHONHASH[A-Z]*)_?[A-Z0-9_]*$"
)
_CREDENTIALS = re.compile(r"\S:\S+@")  # user:password@proxy, with a scheme or without
_NAME_OR_VERSION = re.compile(r"^(Name|Version): *(.*?) *$", re.MULTILINE)
_TOKEN = "UNISONO_TOKEN"  # noqa: S105 - the variable's name
_SERVE_KEY = "UNISONO_SERVE_KEY"
_SAMPLER_KEY = "UNISONO_SAMPLER_KEY"
_OURS = frozenset({_TOKEN, _SERVE_KEY, _SAMPLER_KEY})


@dataclass(frozen=True)
class Environment:
    """Environment variables that matter to unisono."""

    leftovers: dict[str, str] = field(default_factory=dict)
    """Variables of a distributed job. On one device they are ignored and reported."""
    variables: dict[str, str] = field(default_factory=dict)
    """Known variables and those of families such as NCCL_… and GLOO_…; never a secret."""
    strangers: tuple[str, ...] = ()
    """Unknown names that resemble known variables; without their values."""
    torchelastic_run: str | None = None
    slurm_tasks: int | None = None
    slurm_nodes: int | None = None
    slurm_step: SlurmStep | None = None
    """The Slurm step of which this process is a task."""
    world_size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    """These three are not input of a front: a rank compares them with the plan."""
    omp_num_threads: int | None = None
    cache_dir: Path = Path("~/.cache/unisono")
    hub_cache: Path = Path("~/.cache/huggingface/hub")
    """Download cache of huggingface_hub."""
    settings_dir: Path = Path("~/.config/unisono")
    """The user's own folder: the key that signs checkpoints."""
    temporary_dir: Path = Path("/tmp")  # noqa: S108 - it is named, nothing is written
    """Folder of temporary files."""
    visible_devices: str | None = None
    ray_address: str | None = None
    colour: bool = True
    has_display: bool = False
    """Whether a window could be opened here."""

    @property
    def live_launcher(self) -> str | None:
        """The launcher that started this process as one of several ranks, or None."""
        if (self.world_size or 1) <= 1:
            return None
        if self.torchelastic_run is not None:
            return "torchrun"
        if (
            self.slurm_tasks is not None
            and self.slurm_nodes is not None
            and self.slurm_tasks > self.slurm_nodes
        ):
            return "srun"
        return None


def read_environment() -> Environment:
    """Reads the process's environment once."""
    env = os.environ
    return Environment(
        leftovers={name: value for name, value in sorted(env.items()) if is_left_by_launcher(name)},
        variables=_job_variables(env),
        strangers=tuple(
            name
            for name in sorted(env)
            if _NEAR.match(name) and find_variable(name) is None and name not in _OURS
        ),
        torchelastic_run=env.get("TORCHELASTIC_RUN_ID"),
        slurm_tasks=_natural_number(env.get("SLURM_NTASKS")),
        slurm_nodes=_natural_number(env.get("SLURM_NNODES")),
        slurm_step=read_slurm_step(env),
        world_size=_natural_number(env.get("WORLD_SIZE")),
        rank=_natural_number(env.get("RANK")),
        local_rank=_natural_number(env.get("LOCAL_RANK")),
        omp_num_threads=_natural_number(env.get("OMP_NUM_THREADS")),
        cache_dir=_folder(env.get("XDG_CACHE_HOME"), "~/.cache") / "unisono",
        hub_cache=_hub_cache(env),
        settings_dir=_folder(env.get("XDG_CONFIG_HOME"), "~/.config") / "unisono",
        temporary_dir=_folder(env.get("TMPDIR"), "/tmp"),  # noqa: S108
        visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        ray_address=env.get("RAY_ADDRESS") or None,
        has_display=bool(env.get("DISPLAY") or env.get("WAYLAND_DISPLAY")) or platform.system() == "Darwin",
        colour="NO_COLOR" not in env and env.get("TERM") != "dumb",
    )


def all_variables() -> dict[str, str]:
    """All variables, for a child program. Call `take_token` first."""
    return dict(os.environ)


def take_token() -> str | None:
    """Removes UNISONO_TOKEN and returns the job's token, so that child processes cannot read it.

    None if unset or empty.

    Only `/proc/PID/environ` of this process, readable by the same user, still contains it.
    """
    return os.environ.pop(_TOKEN, "").strip() or None


def take_serve_key() -> str | None:
    """Removes UNISONO_SERVE_KEY and returns the key of `unisono serve`, as `take_token`.

    None if unset or empty.
    """
    return os.environ.pop(_SERVE_KEY, "").strip() or None


def sampler_key() -> str | None:
    """UNISONO_SAMPLER_KEY, the key of the server that samples answers; None if unset or empty."""
    return os.environ.get(_SAMPLER_KEY, "").strip() or None


def _job_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that may differ between nodes, without secrets."""
    return {
        name: value
        for name, value in sorted(env.items())
        if (name == "CUDA_VISIBLE_DEVICES" or _FAMILY.match(name) or _is_known(name))
        and not names_secret(name)
        and not is_secret(value)
        and not _CREDENTIALS.search(value)
    }


def _is_known(name: str) -> bool:
    variable = find_variable(name)
    return (
        variable is not None and variable.name == name
    )  # it also finds lower case, which is different in the environment


def _hub_cache(env: Mapping[str, str]) -> Path:
    """The cache folder, by the rules of huggingface_hub."""
    named = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    home = env.get("HF_HOME")
    base = Path(home).expanduser() if home else _folder(env.get("XDG_CACHE_HOME"), "~/.cache") / "huggingface"
    return base / "hub"


def _natural_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isascii() and text.strip().isdigit() else None


def _folder(text: str | None, default: str) -> Path:
    return Path(text) if text and Path(text).is_absolute() else Path(default).expanduser()


_SYSTEM = Path("/etc/nccl.conf")
_LIMIT_BYTES = 1 << 16


def read_nccl_files(*, named: str | None, home: Path | None = None, system: Path = _SYSTEM) -> dict[str, str]:
    """Settings of the user's file and the system's; as in NCCL the first file that sets a name
    wins.

    Args:
        named: NCCL_CONF_FILE, which replaces ~/.nccl.conf.
        home: the user's home; None: looked up.
    """
    user_file = Path(named) if named else _home(home) / ".nccl.conf"
    return _read_nccl_file(system) | _read_nccl_file(user_file)


def _home(given: Path | None) -> Path:
    try:
        return given or Path.home()
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def _read_nccl_file(file: Path) -> dict[str, str]:
    try:
        with open_plain(file) as stream:
            text = stream.read(_LIMIT_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}
    settings: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("#")[0].partition("=")
        name, value = name.strip(), value.strip()
        if equals and name and not names_secret(name) and not is_secret(value):
            settings.setdefault(name, value)
    return settings


# Packages that affect numerics or wire formats: compared between nodes one by one.
_COMPARED = (
    "python",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "tokenizers",
    "safetensors",
    "datasets",
    "pyarrow",
    "numpy",
    "triton",
    "unisono",
)
_NCCL = re.compile(r"^nvidia-nccl(-cu\d+)?$")
_CUDA_SUFFIX = re.compile(r"\+cu(\d+)(\d)$")


def package_versions() -> dict[str, str]:
    """Every installed distribution and its version, by normalised name; and Python's.

    As they were when this process first asked.
    """
    return dict(_installed())


@cache
def _installed() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for distribution in metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        # `distribution.metadata` parses the whole file as a message, with its description: ten
        # times the seconds.
        fields = dict(_NAME_OR_VERSION.findall(text.partition("\n\n")[0]))
        if "Name" in fields and "Version" in fields:
            versions.setdefault(fields["Name"].lower().replace("_", "-"), fields["Version"])
    return dict(sorted(versions.items()))


def versions_digest(versions: dict[str, str]) -> str:
    """A short digest of all versions."""
    return hashlib.sha256(repr(sorted(versions.items())).encode()).hexdigest()[:16]


def decisive_versions(packages: Mapping[str, str]) -> dict[str, str]:
    """The versions that numbers and wire formats depend on: python, torch, cuda, nccl, driver and
    some packages.

    What is not here is left out.

    Args:
        packages: all installed distributions, as `package_versions` gives them.
    """
    versions = {name: packages[name] for name in _COMPARED if name in packages}
    nccl = next((version for name, version in packages.items() if _NCCL.match(name)), None)
    parts = {"cuda": cuda_of(packages.get("torch", "")), "nccl": nccl, "driver": driver_version()}
    return versions | {name: version for name, version in parts.items() if version}


def cuda_of(torch_version: str) -> str | None:
    """The CUDA that torch was built for, as `12.6`; None for one without.

    From the version's suffix (`+cu126`), else from the wheel's version.py, which is read, not
    imported.
    """
    suffix = _CUDA_SUFFIX.search(torch_version)
    if suffix:
        return f"{suffix[1]}.{suffix[2]}"
    if "+" in torch_version or not torch_version:
        return None
    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        match = re.search(
            r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return match[1] if match else None


def code_digests(root: Path | None = None) -> dict[str, str]:
    """A digest of each Python file of the package, by its path from the folder that holds it:
    `unisono/trainer/training/loop.py`.

    Not cached: the package is a megabyte, and a cached digest could be stale.

    Args:
        root: the package's folder; None is this one.
    """
    folder = root or PACKAGE
    files = sorted(file for file in folder.rglob("*.py") if "__pycache__" not in file.parts)
    return {file.relative_to(folder.parent).as_posix(): _digest(file) for file in files}


def _digest(file: Path) -> str:
    try:
        content = file.read_bytes()
    except FileNotFoundError:  # listed, and gone since: the package is being changed
        return "gone"
    return hashlib.sha256(content).hexdigest()[:16]


_PUBLIC = "https://huggingface.co"
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class Hub:
    """Hub settings of the environment.

    Attributes:
        endpoint: its address, without credentials.
        offline: the variable that sets offline mode; empty: online.
        token: where the token is stored; empty: none. Never the token itself.
    """

    endpoint: str
    offline: str
    token: str


def read_hub(cache: Path) -> Hub:
    """Reads the environment.

    Args:
        cache: where downloads are kept, below HF_HOME as a rule; the token's file is beside it.
    """
    env = os.environ
    offline = next(
        (name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if env.get(name, "").upper() in _TRUE),
        "",
    )
    return Hub(_without_credentials(env.get("HF_ENDPOINT") or _PUBLIC), offline, _token_place(cache))


def is_cached(cache: Path, kind: str, name: str) -> bool:
    """Whether a repository is in the cache, at least in part. `kind`: models or datasets."""
    folder = cache / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    try:
        return any(any(entry.iterdir()) for entry in folder.iterdir())
    except OSError:
        return False


_HUB_ANSWER_S = 5.0
"""How long to wait for the hub before falling back to its cache."""


def hub_silence(hub: Hub) -> str:
    """Why the hub cannot be asked; empty if it answers.

    Its own client would retry for half a minute.
    """
    if hub.offline:
        return f"{hub.offline} turns access to the hub off"
    silent = _probe_hub(hub.endpoint)
    return f"{hub.endpoint} does not answer: {silent}" if silent else ""


@cache
def check_hub_answers() -> None:
    """Makes huggingface_hub refuse ETags and commits that cannot be file names.

    It joins them to paths of its cache as they are (2.4), so that a hub could write anywhere.
    """
    from huggingface_hub import get_session, set_client_factory

    first: Any = get_session()
    hooks = {"request": first.event_hooks["request"], "response": [_refuse_paths]}

    def make_client() -> Any:
        settings = {"follow_redirects": first.follow_redirects, "timeout": first.timeout}
        return type(first)(event_hooks=hooks, **settings)

    set_client_factory(make_client)


def _refuse_paths(answer: Any) -> None:
    try:
        for name in filter(None, _names_in(answer)):
            path_below(Path(), name)
    except ValueError as error:
        raise ModelError.of(
            "the hub gives a name that cannot be a file in the cache",
            where=f"{answer.url.host}{answer.url.path}",
            why=str(error),
            fix="use a hub or mirror that you trust: HF_ENDPOINT names it",
        ) from error


def _names_in(answer: Any) -> Iterator[object]:
    """The parts of an answer that huggingface_hub makes file names of."""
    yield answer.headers.get("X-Repo-Commit")
    if answer.request.method == "HEAD":  # of a file; ETags of other answers are not used
        tag = answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag") or ""
        yield tag.lstrip("W/").strip('"')
    elif "/api/" in answer.url.path and "json" in answer.headers.get("Content-Type", ""):
        try:
            body = parse_json(answer.read())
        except ValueError:  # reported by huggingface_hub
            return
        for entry in objects_of(body if isinstance(body, list) else [body]):
            yield entry.get("sha")
            yield from (lfs.get("oid") for lfs in objects_of([entry.get("lfs")]))


@cache
def _probe_hub(endpoint: str) -> str:
    """Calls `probe_url` once per process."""
    return probe_url(endpoint, limit_s=_HUB_ANSWER_S)


def probe_url(url: str, *, limit_s: float) -> str:
    """Why a URL does not respond within the limit; empty if it does, with any status.

    Uses the environment's proxies.

    Runs in a thread: a name server that is down blocks for half a minute.
    """
    answers: list[str] = []

    def work() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - checked below
            urllib.request.urlopen(request, timeout=limit_s).close()  # noqa: S310
            answers.append("")
        except urllib.error.HTTPError as error:  # it answers, and that is what was asked
            error.close()
            answers.append("")
        except (OSError, ValueError, http.client.HTTPException) as error:
            answers.append(str(getattr(error, "reason", error)) or type(error).__name__)

    if not url.startswith(("https://", "http://")):
        return "not an http address"
    thread = threading.Thread(target=work, name="hub", daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else f"no answer within {limit_s:g} s"


def _without_credentials(url: str) -> str:
    scheme, separator, location = url.partition("://")
    return f"{scheme}{separator}{location.rpartition('@')[2]}".rstrip("/")


def _token_place(cache: Path) -> str:
    env = os.environ
    named = next((name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if env.get(name)), None)
    if named is not None:
        return named
    file = Path(env["HF_TOKEN_PATH"]).expanduser() if env.get("HF_TOKEN_PATH") else cache.parent / "token"
    try:
        return str(file) if file.stat().st_size > 0 else ""
    except OSError:
        return ""

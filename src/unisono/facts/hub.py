"""The Hugging Face Hub as configured on this machine: endpoint, offline mode, token, reachability."""

import http.client
import os
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

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


def probe_url(url: str, *, limit_s: float) -> str:
    """Why a URL does not respond within the limit; empty if it does, with any status. Uses the environment's proxies.

    Runs in a thread: a name server that is down blocks for half a minute.
    """
    answers: list[str] = []

    def work() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - checked below
            urllib.request.urlopen(request, timeout=limit_s).close()  # noqa: S310
            answers.append("")
        except urllib.error.HTTPError:  # it answers, and that is what was asked
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
    scheme, found, rest = url.partition("://")
    return f"{scheme}{found}{rest.rpartition('@')[2]}".rstrip("/")


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

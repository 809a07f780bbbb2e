"""The job's secret, and keys that are made from it: each for one purpose, none of them leads back to the secret."""

import hmac
import json
import secrets

TOKEN_BYTES = 32


def new_token() -> str:
    """A fresh secret for a job, as text that fits a file or an environment variable."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def derive(token: bytes, purpose: str, *parts: str | int) -> bytes:
    """A key of 32 bytes for `purpose` alone. Whoever has it learns neither the token nor the key of another purpose.

    Args:
        token: the job's secret, not empty.
        purpose: what the key is for, for example `control.session` or `rank`.
        parts: what it is bound to as well: a nonce, a rank. They are written as JSON, so no two lists read the same.
    """
    assert token, "a job of several nodes has a token"
    return hmac.digest(token, json.dumps(["unisono", purpose, *parts]).encode(), "sha256")

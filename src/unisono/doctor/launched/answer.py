"""What the look on node 0 says in JSON, read back. Pure."""

from collections.abc import Sequence
from typing import Any

from unisono.doctor.check import findings_of
from unisono.doctor.examining import Examination
from unisono.errors import UnfitError
from unisono.files import parse_json
from unisono.supervise.task_process import refusal

_DISAGREE = 3


def read_answer(line: str) -> dict[str, Any] | None:
    """The object of a line that is a doctor's answer: its checks, or its refusal; None for any other line."""
    try:
        body = parse_json(line)
    except ValueError:
        return None
    if isinstance(body, dict) and (isinstance(body.get("checks"), list) or body.get("kind") == "refused"):
        return body
    return None


def examination_of(answer: dict[str, Any], *, code: int, host: str) -> Examination:
    """The examination that node 0 has told.

    Args:
        answer: as `read_answer` gave it.
        code: node 0's exit code.
        host: what the heading names.

    Raises:
        UnisonoError: what node 0 refused, in the class of its exit code.
    """
    if "checks" not in answer:
        raise refusal(answer)
    return Examination(host, findings_of(answer), agreed=code != _DISAGREE)


def without_answer(*, where: str, said: Sequence[str], fix: str) -> UnfitError:
    """The error for a look that ended without an answer."""
    return UnfitError.of(
        "the look on the nodes ended without a word of node 0", where=where,
        why="; ".join(said) or "nothing was printed there", fix=fix,
    )  # fmt: skip

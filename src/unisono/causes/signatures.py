"""Lines of logs that mean something: for `unisono train`, which follows its ranks' logs, and for reading those of dead runs.

A table in several files, by whose words they are. It judges nothing: what beats what is for who reads the hits together.
"""

from unisono.causes.signature import Kind, Signature, compiled
from unisono.causes.signatures_elsewhere import ELSEWHERE_SIGNATURES
from unisono.causes.signatures_files import FILES_SIGNATURES
from unisono.causes.signatures_launch import LAUNCH_SIGNATURES
from unisono.causes.signatures_machine import MACHINE_SIGNATURES
from unisono.causes.signatures_nccl import NCCL_SIGNATURES
from unisono.causes.signatures_peers import PEERS_SIGNATURES
from unisono.causes.signatures_program import PROGRAM_SIGNATURES
from unisono.causes.signatures_trainers import TRAINERS_SIGNATURES
from unisono.text import plain

__all__ = ["LINE_LIMIT", "SIGNATURES", "Kind", "Signature", "find_signature", "match_line"]

LINE_LIMIT = 2048
"""Characters of a line that are looked at: a line's meaning stands at its head, and a line may be a megabyte of numbers."""

ALL_SIGNATURES: tuple[Signature, ...] = (
    *LAUNCH_SIGNATURES,
    *PEERS_SIGNATURES,
    *NCCL_SIGNATURES,
    *PROGRAM_SIGNATURES,
    *MACHINE_SIGNATURES,
    *FILES_SIGNATURES,
    *TRAINERS_SIGNATURES,
    *ELSEWHERE_SIGNATURES,
)

SIGNATURES: dict[str, Signature] = {signature.id: signature for signature in ALL_SIGNATURES}


_BY_HINT = [(hint, signature) for signature in ALL_SIGNATURES for hint in signature.hints]
"""Flat, since most lines have none of them, and this is all that they cost."""


def find_signature(signature_id: str) -> Signature | None:
    """The entry with this id, or None."""
    return SIGNATURES.get(signature_id)


def match_line(line: str) -> list[Signature]:
    """The signatures that a line has, in the order of the table. Escape sequences of terminals are not part of it."""
    head = line[:LINE_LIMIT]
    if "\x1b" in head:
        head = plain(head)
    found = dict.fromkeys(signature for hint, signature in _BY_HINT if hint in head)
    return [signature for signature in found if compiled(signature.pattern).search(head)]

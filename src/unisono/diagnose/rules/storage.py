"""Files that one host has and another has not."""

import re

from unisono.diagnose.facts import Traceback
from unisono.diagnose.finding import Finding
from unisono.diagnose.rules.view import View

_MISSING = re.compile(
    r"No such file or directory|FileNotFoundError|not a valid checkpoint|does not exist|not found"
)
_CHECKPOINT = re.compile(
    r"checkpoint|ckpt|global_step|iter_\d|\.metadata|\.distcp|optimizer(?:_\d|\.|\b)|trainer_state|\bstep[-_]?\d",
    re.IGNORECASE,
)


def find_unshared(view: View) -> list[Finding]:
    """All ranks of one host miss a part of a checkpoint that those of the others found."""
    missed = [trace for trace in view.tracebacks if _misses(trace) and not view.survived(trace.event)]
    if not missed:
        return []
    places = {_place(trace) for trace in missed}
    others = {
        event.who.host or event.source for event in view.facts.events if event.rank is not None
    } - places
    ranks = {trace.event.rank for trace in missed if trace.event.rank is not None}
    if len(places) != 1 or not others or len(ranks) < 2:
        return []
    host = missed[0].event.who.host
    where = host or missed[0].event.source
    return [Finding("checkpoint_not_shared", f"the ranks of {where} miss a part of the checkpoint that the other hosts found", tuple(trace.event for trace in missed[:4]), hosts=(host,) if host else (), confidence=0.85)]  # fmt: skip


def _misses(trace: Traceback) -> bool:
    text = f"{trace.type}: {trace.message[:600]}"
    return bool(_MISSING.search(text) and _CHECKPOINT.search(trace.message[:600]))


def _place(trace: Traceback) -> str:
    return trace.event.who.host or trace.event.source

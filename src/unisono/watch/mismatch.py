"""Whether ranks are in the same collective: those that wait, and those that failed in it. Pure.

Op counts as in NCCL's RAS; kinds and sizes as in torch's flight recorder, because counts alone do not show that two ranks are in different
collectives.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from unisono.causes import Evidence, Verdict
from unisono.watch.rank_record import Beat
from unisono.watch.verdicts import labels, verdict
from unisono.watch.views import Collective, Picture, RankView

_UNKNOWN = ""
"""For a collective that is not known."""


def mismatch(picture: Picture, views: Sequence[RankView]) -> Verdict | None:
    """The verdict on ranks whose last collectives differ, including ranks that failed in them; None if they match."""
    steps = Counter(view.beat.step for view in views if view.beat is not None)
    since_s = max((view.idle_s for view in views), default=0.0)
    if len(steps) > 1 and not _in_one_collective(picture, views):
        most = max(steps)
        behind = [v.rank for v in views if v.beat is not None and v.beat.step < most]
        ahead = [v.rank for v in views if v.beat is not None and v.beat.step == most]
        at = ", ".join(f"{step}" for step in sorted(steps)[:-1])
        summary = f"{labels(picture, behind)} made fewer steps: step {at} was the last, and {labels(picture, ahead)} went on to step {most}"
        return verdict("unequal_steps", summary, picture, ranks=behind, since_s=since_s)
    beats = {view.rank: view.beat for view in views if view.beat is not None and view.beat.is_foreign}
    if left_the_loop(list(beats.values())):
        return _left_the_loop(picture, beats, since_s)
    if len(beats) == len(views) and (found := _out_of_their_loop(picture, beats, since_s)) is not None:
        return found
    kinds: dict[str, list[int]] = {}
    for view in views:
        kinds.setdefault(_collective(view, picture), []).append(view.rank)
    if len(kinds) < 2 or _UNKNOWN in kinds:
        return None
    groups = sorted(kinds.items(), key=lambda item: (len(item[1]), item[1]))
    odd = groups[0][1] if len(groups[0][1]) < len(groups[1][1]) else []
    told = "; ".join(f"{labels(picture, ranks)}: {kind}" for kind, ranks in groups)
    summary = f"ranks are in different collectives: {told}"
    evidence = [Evidence(where=labels(picture, ranks), text=kind) for kind, ranks in groups]
    return verdict("collective_mismatch", summary, picture, ranks=odd, since_s=since_s, evidence=evidence)


def _in_one_collective(picture: Picture, views: Sequence[RankView]) -> bool:
    """Whether ranks of a foreign program wait in the same collective; then different step counts do not matter."""
    if not all(view.beat is not None and view.beat.is_foreign for view in views):
        return False
    looks = [picture.looks.get(view.rank) for view in views]
    begun = {alike(look.begun) if look is not None and look.begun is not None else _UNKNOWN for look in looks}
    return len(begun) == 1 and _UNKNOWN not in begun


def _left_the_loop(picture: Picture, beats: Mapping[int, Beat], since_s: float) -> Verdict | None:
    """The verdict on ranks that have not read a batch for the step of the others, if they are in a different collective."""
    begun = {
        alike(look.begun)
        for rank in beats
        if (look := picture.looks.get(rank)) is not None and look.begun is not None
    }
    if len(begun) < 2:
        return None
    behind = [rank for rank, beat in beats.items() if not beat.micro]
    ahead = [rank for rank, beat in beats.items() if beat.micro]
    step = beats[ahead[0]].step
    summary = f"{labels(picture, behind)} made fewer steps: step {step - 1} was the last, and {labels(picture, ahead)} went on to step {step}"
    return verdict("unequal_steps", summary, picture, ranks=behind, since_s=since_s)


def _out_of_their_loop(picture: Picture, beats: Mapping[int, Beat], since_s: float) -> Verdict | None:
    """The verdict on ranks that cannot make another step while others can, which are in a recurring collective."""
    looks = {rank: look for rank in beats if (look := picture.looks.get(rank)) is not None}
    behind = [rank for rank, look in looks.items() if look.may_step is False]
    ahead = [rank for rank, look in looks.items() if look.may_step and look.recurs]
    if not behind or not ahead or len(behind) + len(ahead) < len(beats):
        return None
    begun = {rank: alike(look.begun) for rank, look in looks.items() if look.begun is not None}
    if len(begun) < len(beats) or {begun[rank] for rank in behind} & {begun[rank] for rank in ahead}:
        return None
    last = max(beats[rank].step for rank in behind) - 1
    are, its = ("is", "its loop") if len(ahead) == 1 else ("are", "theirs")
    summary = f"{labels(picture, behind)} made fewer steps: step {last} was the last, and the loop is over there; {labels(picture, ahead)} {are} still in {its}"
    ways = {True: "its loop has had that before", False: "nothing leads back from there to its steps"}
    evidence = [
        Evidence(where=labels(picture, [rank]), text=f"{begun[rank]}; {ways[rank in ahead]}")
        for rank in beats
    ]
    return verdict("unequal_steps", summary, picture, ranks=behind, since_s=since_s, evidence=evidence)


def _collective(view: RankView, picture: Picture) -> str:
    """The collective that a rank is in, with equal text for equal ones. The flight recorder also has torch's own."""
    assert view.beat is not None
    look = picture.looks.get(view.rank)
    if look is not None and look.begun is not None:
        return alike(look.begun) if view.beat.is_foreign else str(look.begun)
    if view.beat.is_foreign:
        return _UNKNOWN
    return f"collective {view.beat.comm}, {view.beat.kind} of {view.beat.elements} elements"


_EQUALLY_SIZED = ("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base")


def alike(begun: Collective) -> str:
    """Text of a collective; ranks with different texts cannot be in the same one. Some kinds allow different sizes."""
    sizes = f" {begun.sizes}" if begun.name in _EQUALLY_SIZED else ""
    return f"{begun.name} #{begun.number}{sizes}"


def left_the_loop(beats: Sequence[Beat]) -> bool:
    """Whether, of ranks with equal step counts, some have read a batch for the next step and others have not: those have left the loop.

    Without a loader of torch no rank reads a batch, and the result is False.
    """
    return any(beat.micro for beat in beats) and not all(beat.micro for beat in beats)

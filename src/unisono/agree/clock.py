"""Whether the clocks of the nodes agree. They need not: nothing of ours compares clocks of two machines."""

from statistics import median

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.finding import finding, remedy_for, unknown_for
from unisono.agree.naming import Who, name_all
from unisono.agree.rules import NODE_RULES
from unisono.causes import Evidence

_TOO_FAR_S = 2.0
_SHOWN = 8


def judge_clocks(members: Members) -> Agreement:
    """Warns where two clocks are more than two seconds apart; never more than a warning."""
    rule = NODE_RULES["clock"]
    offsets = {who: _offset(report.clock_offset_s, who) for who, report in members}
    known = {who: offset for who, offset in offsets.items() if offset is not None}
    unknown = unknown_for(rule, [who for who in offsets if who not in known], "not measured")
    if len(known) < 2:
        return Agreement.noted(rule.id, "pass", "one clock") if len(members) == 1 else unknown
    apart = max(known.values()) - min(known.values())
    if apart <= _TOO_FAR_S:
        return Agreement.noted(rule.id, "pass", f"at most {apart:.1f} s apart").merged(unknown)
    odd = _far_off(known)
    first, last = min(known, key=lambda who: (known[who], who)), max(known, key=lambda who: (known[who], who))
    if odd:
        base = median(known.values())
        who = max(odd, key=lambda who: (abs(known[who] - base), who))
        ahead = "ahead of" if known[who] > base else "behind"
        summary = f"the clock of {name_all([who])} is {abs(known[who] - base):.1f} s {ahead} the others"
        summary += f"; {len(odd) - 1} more are off" if len(odd) > 1 else ""
    else:
        summary = f"the clocks of {name_all([first])} and {name_all([last])} are {apart:.1f} s apart"
    evidence = [
        Evidence(where=name_all([who]), text=f"{known[who]:+.1f} s against the head")
        for who in sorted(known, key=lambda who: (who not in odd, who))[:_SHOWN]
    ]
    fix = remedy_for(rule, sorted(odd))
    return finding(rule, summary, people=odd, evidence=evidence, fix=fix).merged(unknown)


def _offset(measured: float | None, who: Who) -> float | None:
    """The head measures others against itself, so that its own is zero."""
    return 0.0 if measured is None and who.node_rank == 0 else measured


def _far_off(known: dict[Who, float]) -> set[Who]:
    """Those far from the middle, if most are near it; nobody, if that is not so."""
    middle = median(known.values())
    far = {who for who, offset in known.items() if abs(offset - middle) > _TOO_FAR_S}
    return far if 2 * len(far) < len(known) else set()

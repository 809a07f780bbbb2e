"""What is said of a climb. Pure."""

from unisono.doctor.check import Check, Finding, found
from unisono.doctor.ladder.climb import Climb, Tried
from unisono.doctor.ladder.rungs import OWN, export_lines
from unisono.units import show_seconds

LADDER = Check(
    "network.ladder", "A real collective, and the settings with which it works",
    "settings that are tried by hand in the middle of the night stay for years; one step at a time tells which is needed, and what it costs",
    "With --ladder. Child processes add numbers with the real back-end, first with the settings as they are: one number, then 4 MiB (gloo) or 64 MiB (NCCL). If that"
    " fails, hangs or crawls: without what is set, interface pinned, InfiniBand off, peer access off, shared memory off (NCCL), or interface"
    " pinned to each candidate, transport tcp, transport uv (gloo), each with a deadline; then each step that was not needed is left out. PASS: it works as it is. FAIL: it"
    " does not; the first settings that work are written out. Settings live in the children alone.",
    ("address_unreachable", "nccl_socket_iface", "ib_unreachable"),
)  # fmt: skip


def say(climb: Climb, *, interface: str = "") -> Finding:
    """One finding.

    Args:
        climb: the way.
        interface: what OWN stands for on this node.
    """
    rows = [_row(one) for one in climb.tried]
    first = climb.as_it_is
    transports = next((one.outcome.rows for one in climb.tried if one.outcome.rows), ())
    if climb.chosen is None:
        text = f"nothing works: {first.text}"
        fix = [
            "what all attempts have in common is below the settings: look at network.*, devices.* and system.shm above"
        ]
        return found(LADDER, "fail", text, *rows, *transports, fix=fix)
    if climb.chosen is climb.tried[0]:
        if first.rate >= climb.enough:
            return found(LADDER, "pass", f"works as it is: {_speed(climb.chosen)}", *rows, *transports)
        text = f"works as it is and crawls ({_speed(climb.chosen)}; {climb.enough / 1e6:,.0f} MB/s would be usual); no setting makes it quicker"
        return found(
            LADDER,
            "warn",
            text,
            *rows,
            *transports,
            fix=["look at network.*: speed of the link, and who else uses it"],
        )
    lines = [line.replace(OWN, interface or "INTERFACE") for line in export_lines(climb.chosen.settings)]
    how = "fails" if not first.ok else f"crawls ({first.rate / 1e6:,.1f} MB/s)"
    text = f"as it is it {how}: {first.text}; it works with: {climb.chosen.name} ({_speed(climb.chosen)}{_against_best(climb)})"
    costs = [f"it costs {cost}" for cost in climb.costs]
    return found(
        LADDER,
        "fail" if not first.ok else "warn",
        text,
        *costs,
        *_to_keep(climb.chosen),
        *rows,
        *transports,
        fix=lines,
    )


def _to_keep(chosen: Tried) -> list[str]:
    """How a setting that somebody now makes by hand gets its reason into the plan; nothing where only something is taken away."""
    names = [name for name, value in chosen.settings.items() if value is not None]
    if not names:
        return []
    reasons = " ".join(f"--reason {name}='WHY'" for name in names)
    return [f"set by hand it stays for years: `unisono train … {reasons}` keeps in the plan why"]


def _speed(tried: Tried) -> str:
    small = (
        f", one number in {tried.outcome.small_s * 1000:.1f} ms" if tried.outcome.small_s is not None else ""
    )
    return f"{tried.outcome.rate / 1e6:,.0f} MB/s{small}"


def _against_best(climb: Climb) -> str:
    assert climb.chosen is not None
    if climb.best is None or climb.best is climb.chosen or not climb.chosen.outcome.rate:
        return ""
    return f", {climb.chosen.outcome.rate / climb.best.outcome.rate:.0%} of the best seen"


def _row(tried: Tried) -> str:
    outcome = tried.outcome
    if outcome.ok:
        return f"{tried.name}: {_speed(tried)}"
    passed = (
        f"; one number took {show_seconds(outcome.small_s)}, the large sum did not come back"
        if outcome.small_s is not None
        else ""
    )
    return f"{tried.name}: {outcome.text}{passed}"

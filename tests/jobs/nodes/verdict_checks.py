"""What fronts said at the end of a job: one verdict, the same words on every node."""

from collections.abc import Sequence

from tests.jobs.nodes.fronts import Front, Named, together
from unisono.base.causes import Verdict


def same_words(fronts: Sequence[Front]) -> Verdict:
    """The one fatal verdict that all of these fronts told, in the same words; those that speak to
    people show its lines.
    """
    reported = [verdict for front in fronts for verdict in front.verdicts if verdict.severity == "fatal"]
    assert reported, "no verdict in JSON:\n" + "\n".join(
        f"--- {f.label}: {f.exit_code}\n{f.text()}" for f in fronts
    )
    timeless = {verdict.model_copy(update={"named_after_s": None}).model_dump_json() for verdict in reported}
    assert len(timeless) == 1, timeless
    lines = [line for line in reported[0].lines() if not line.startswith("DETECTED ")]
    for front in fronts:
        if front.json:
            assert len([verdict for verdict in front.verdicts if verdict.severity == "fatal"]) == 1, (
                front.text()
            )
        else:
            missing = [line for line in lines if line not in front.text()]
            assert not missing, f"{front.label} did not say {missing}; it said:\n{front.text()}"
            assert front.text().count(lines[0]) == 1, f"{front.label} said it more than once:\n{front.text()}"
    return reported[0]


def named(fronts: Sequence[Front], *, since: float | None = None) -> Named:
    """The verdict in the same words on all of these fronts, which have ended, and how long it
    took.
    """
    verdict = same_words(fronts)
    begin = max(front.started for front in fronts) if since is None else since
    printed = [
        front.printed_at('"kind": "verdict"') if front.json else front.printed_at(verdict.summary)
        for front in fronts
    ]
    found = Named(
        verdict, max(at or 0.0 for at in printed) - begin, max(front.ended or 0.0 for front in fronts) - begin
    )
    for front in fronts:
        front.named = found
    return found


def refused(
    fronts: Sequence[Front], cause: str, *, hosts: Sequence[str] = (), within_s: float = 40.0, code: int = 3
) -> Verdict:
    """Waits for the end of a job that must not start; asserts exit code, cause, culprits, equal
    words and the time it took.

    The time is from the start of the last front, so Python's own start is in it.
    """
    codes = together(fronts)
    reported = "\n".join(f"--- {front.label}: {front.exit_code}\n{front.text()}" for front in fronts)
    assert codes == [code] * len(fronts), reported
    found = named(fronts)
    assert found.verdict.cause == cause, reported
    assert sorted(found.verdict.hosts) == sorted(hosts), reported
    assert all("Traceback" not in front.text() for front in fronts), reported
    assert found.ended_s < within_s, f"{found.ended_s:.1f} s\n{reported}"
    return found.verdict

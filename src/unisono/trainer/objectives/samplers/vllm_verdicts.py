"""The verdicts that end a run whose server does not sample with its weights."""

from collections.abc import Sequence

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.text import one_line
from unisono.trainer.objectives.samplers.probe import BOUNDS, Probe, ProbeFinding

_MOST_TEXT = 1_000  # characters of a summary


def sampler_verdict(cause: str, summary: str, *, phase: str, evidence: Sequence[Evidence] = ()) -> Verdict:
    """A verdict on a server that samples.

    Args:
        cause: of the catalogue.
        summary: what is wrong, with the address of the server.
        phase: of the rank.
        evidence: what it is based on.
    """
    entry = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        summary=one_line(summary, limit=_MOST_TEXT),
        phase=phase,
        evidence=tuple(evidence),
        fix=entry.remedy if entry is not None else (),
    )


def verdict_on(finding: ProbeFinding, probe: Probe, *, server: str, name: str, dtype: str) -> Verdict:
    """The verdict on what a probe has shown.

    Args:
        finding: what is wrong.
        probe: of the present version.
        server: its address.
        name: of the adapter there.
        dtype: of the computation here.
    """
    token, served, here = probe.farthest
    evidence = Evidence(
        where=f"version {probe.version} ({name})",
        text=(
            f"{probe.tokens} tokens; root mean square {finding.distance:.2g} from the weights here, bound"
            f" {BOUNDS[dtype]:g}; farthest: token {token}, {served:.4f} there, {here:.4f} here"
        ),
    )
    cause = "sampler_mismatch" if finding.kind == "mismatch" else "sampler_stale"
    if finding.kind == "mismatch":
        text = (
            f"the server {server} gives different log-probabilities for version {probe.version} than the"
            f" weights here: they differ by {finding.distance:.2g}, the bound is {BOUNDS[dtype]:g}"
        )
    elif finding.kind == "unbound":
        text = (
            f"the adapter {name} changes nothing on the server {server}: it answers as the model without an"
            f" adapter (distance {finding.nearest:.2g}; from version {probe.version}: {finding.distance:.2g})"
        )
    else:
        text = (
            f"the server {server} answers as version {finding.version}, not as version {probe.version}, which"
            f" it has loaded (distances {finding.nearest:.2g} and {finding.distance:.2g})"
        )
    return sampler_verdict(cause, text, phase="sync", evidence=[evidence])

"""Whether the nodes have the same unisono and Python as who typed the command. Pure."""

from collections.abc import Sequence

from unisono import __version__
from unisono.causes import Evidence, Verdict, find_cause
from unisono.errors import Disagreed, UnfitError
from unisono.facts import package_versions
from unisono.facts.versions import code_digests
from unisono.launch.ray.fronts import Place
from unisono.text import one_line

_SHOWN = 3


def refuse_unlike(places: Sequence[Place]) -> None:
    """Compares this process with what each keeper has told.

    Raises:
        UnfitError: if unisono is missing on a node.
        Disagreed: version_mismatch or code_mismatch, naming the nodes.
    """
    bare = [place for place in places if place.facts["trouble"]]
    if bare:
        raise UnfitError.of(
            f"unisono is not installed on {', '.join(place.label for place in bare)}", where=str(bare[0].facts["program"]),
            why=one_line(str(bare[0].facts["trouble"]), limit=300),
            fix="install it there, in the python that Ray runs in; or give it to the job by its runtime_env (see docs/how-to/ray.md)",
        )  # fmt: skip
    own = {"python": package_versions()["python"], "unisono": __version__}
    for name, mine in own.items():
        odd = [place for place in places if place.facts[name] != mine]
        if odd:
            _refuse("version_mismatch", name, mine, [(place, str(place.facts[name])) for place in odd])
    code = code_digests()
    for place in places:
        theirs = place.facts["code"]
        files = sorted(path for path in {*code, *theirs} if code.get(path) != theirs.get(path))
        if files:
            more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
            _refuse(
                "code_mismatch",
                "unisono's code",
                "",
                [(place, f"differs in {', '.join(files[:_SHOWN])}{more}")],
            )


def _refuse(cause: str, what: str, mine: str, odd: Sequence[tuple[Place, str]]) -> None:
    known = find_cause(cause)
    names = ", ".join(place.label for place, _ in odd)
    here = f": {mine} here, {odd[0][1]} there" if mine else f": it {odd[0][1]}"
    verdict = Verdict(
        cause=cause, when="before", phase="ray", hosts=tuple(place.host for place, _ in odd),
        summary=f"{what} is another on {names} than where the command was typed{here}",
        evidence=tuple(Evidence(where=place.label, text=text) for place, text in odd),
        fix=known.remedy if known else (),
    )  # fmt: skip
    raise Disagreed.of(verdict.summary, fix="; ".join(verdict.fix), verdict=verdict)

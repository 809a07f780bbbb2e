"""Put newly made cases into the two files: `python -m tests.guard.diagnosis.making.gather OUT MADE.jsonl
KEPT.jsonl`.

A case that is in one of the files stays in that file, so that what was once in the open never
counts as kept away;
of new ones a third of each class is kept away.  A case in another shape goes where the case itself is.  Cases that
were written by hand are only in these files.
"""

from __future__ import annotations

import collections
import hashlib
import json
import sys
from pathlib import Path

from tests.guard.diagnosis.making import shapes

Case = dict[str, object]


def rows(file: Path) -> dict[str, Case]:
    """The cases of a file by id, without those that are another's in another shape."""
    if not file.exists():
        return {}
    found = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return {str(case["id"]): case for case in found if "~" not in str(case["id"])}


def placed(cases: dict[str, Case], made: set[str], kept: set[str]) -> set[str]:
    """The ids that are kept away: those that were, and of each class's new ones every third."""
    kept = set(kept)
    by_class: dict[str, list[str]] = collections.defaultdict(list)
    for name in sorted(cases, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        by_class[str(cases[name]["class"])].append(name)
    for names in by_class.values():
        old = [name for name in names if name in made | kept]
        for number, name in enumerate((name for name in names if name not in old), len(old) + 1):
            if sum(other in kept for other in names) < (number + 1) // 3:
                kept.add(name)
    return kept


def main() -> None:
    """Read what was made and both files; write both files."""
    out, made_file, kept_file = map(Path, sys.argv[1:])
    made, kept = rows(made_file), rows(kept_file)
    new = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("*.json"))}
    cases = made | kept | new
    away = placed(cases, set(made), set(kept))
    for file, names in (
        (made_file, [n for n in cases if n not in away]),
        (kept_file, [n for n in cases if n in away]),
    ):
        own = [cases[name] for name in sorted(names)]
        own += shapes.of(own)
        text = "".join(json.dumps(case, ensure_ascii=False) + "\n" for case in own)
        file.write_text(text, encoding="utf-8")
        print(f"{file.name}: {len(own)} cases, {len({str(case['class']) for case in own})} causes")


if __name__ == "__main__":
    main()

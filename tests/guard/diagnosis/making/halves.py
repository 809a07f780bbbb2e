"""Put cases of the tools into two halves by a hash of their names: `python -m
tests.guard.diagnosis.making.halves OUT READ.jsonl KEPT.jsonl`.

The half is known before a case is made, so that nobody chooses it: one is for writing rules, the
other for measuring them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path


def is_kept(name: str) -> bool:
    """Whether the case of this name is kept away from those who write rules."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


def main() -> None:
    """Read what was made; write both files."""
    out, read_file, kept_file = map(Path, sys.argv[1:])
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("*.json"))]
    for file, kept in ((read_file, False), (kept_file, True)):
        rows = [case for case in found if is_kept(case["id"]) == kept]
        text = "".join(json.dumps(case, ensure_ascii=False) + "\n" for case in rows)
        file.write_text(text, encoding="utf-8")
        print(
            f"{file.name}: {len(rows)} cases, {len({case['class'] for case in rows})} causes, {len(text)} bytes"
        )


if __name__ == "__main__":
    main()

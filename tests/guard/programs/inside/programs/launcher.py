"""A launcher of the plainest kind, which loads no torch: launcher.py NPROC SCRIPT ...; ends with
the highest exit code of its ranks.

Where a test has forked it from a process with torch (tests/front_server.py), it forks its ranks.
"""

import os
import runpy
import subprocess
import sys


def main() -> int:
    count, words = int(sys.argv[1]), sys.argv[2:]
    places = [
        {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["TEST_PORT"],
        }
        for rank in range(count)
    ]  # fmt: skip
    if "torch" in sys.modules:
        return forked(words, places)
    ranks = [subprocess.Popen([sys.executable, *words], env=os.environ | place) for place in places]
    return max(abs(rank.wait()) for rank in ranks)


def forked(words: list[str], places: list[dict[str, str]]) -> int:
    """The same; returns in each rank as well, at its end."""
    ranks = []
    for place in places:
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(place)
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")
            return 0
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())

"""A launcher of the plainest kind, which loads no torch: launcher.py NPROC SCRIPT ...; ends with the highest exit code of its ranks."""

import os
import subprocess
import sys


def main() -> int:
    count, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    port = os.environ["TEST_PORT"]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
            }
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(count)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())

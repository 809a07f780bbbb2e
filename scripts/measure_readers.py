"""Reads all example files of axolotl, and all commands in TRL's examples, of checkouts: how many are
carried, how many are refused and why, and whether one ends with an error of ours.

python scripts/measure_readers.py --axolotl ../axolotl --trl ../trl
"""

import argparse
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from unisono.base.errors import UnisonoError
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config import LoadedConfig, config_of
from unisono.trainer.readers.trl.trl_file import read_trl

_COMMAND = re.compile(r"^[#\s]*((?:python|accelerate launch|trl)\b(?:[^\n\\]|\\\n|\\.)*)", re.MULTILINE)
_SHOWN = 40
Reads = Sequence[tuple[str, Callable[[], LoadedConfig]]]


def main() -> int:
    """Prints the counts of each tool; 1 if a file ends with an error that is not refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--axolotl", type=Path)
    parser.add_argument("--trl", type=Path)
    options = parser.parse_args()
    failed = 0
    if options.axolotl:
        files = sorted(options.axolotl.glob("examples/**/*.y*ml"))
        failed += report("axolotl", [(str(file), partial(load_config, file)) for file in files])
    if options.trl:
        files = sorted(options.trl.glob("examples/cli_configs/*.y*ml"))
        reads = [(str(file), lambda file=file: load_config(file)) for file in files]
        reads += [
            (text, lambda text=text: config_of(read_trl(text), verb="init")) for text in commands(options.trl)
        ]
        failed += report("TRL", reads)
    return 1 if failed else 0


def _read_command(text: str) -> LoadedConfig:
    return config_of(read_trl(text), verb="init")


def commands(checkout: Path) -> Iterator[str]:
    """The commands with arguments in the texts of TRL's scripts."""
    scripts = [*checkout.glob("examples/scripts/**/*.py"), *checkout.glob("trl/scripts/*.py")]
    for script in sorted(scripts):
        for match in _COMMAND.finditer(script.read_text(encoding="utf-8")):
            if "--" in match[1]:
                yield re.sub(r"\n#?", " ", match[1].replace("\\\n", " "))


def report(tool: str, reads: Reads) -> int:
    """Prints how the files of a tool end; gives how many end with an error of ours."""
    ends: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for name, read in reads:
        try:
            read()
        except UnisonoError as error:
            ends["refused"] += 1
            reasons.update({problem.what[:100] for problem in error.problems})
        except Exception:  # noqa: BLE001 - what is measured
            ends["failed"] += 1
            print(name, traceback.format_exc(limit=-3), file=sys.stderr)
        else:
            ends["carried"] += 1
    print(f"{tool}: {len(reads)} read; {', '.join(f'{count} {end}' for end, count in ends.items())}")
    for reason, count in reasons.most_common(_SHOWN):
        print(f"{count:5} {reason}")
    return ends["failed"]


if __name__ == "__main__":
    sys.exit(main())

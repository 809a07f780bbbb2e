"""Where what stands in a rank's record: a fixed record in memory that its front made, inherits to it, and reads at any time.

There is no lock. Each record has two slots that are written in turn, and each begins and ends with its number. A reader takes the newest slot
whose two numbers are equal, and only if a second reading of it is the same. So a writer that was stopped or killed in the middle of a
slot leaves the record before, and the memory outlives the rank: its last words can be read after its death.
"""

import functools
import struct

RECORD_BYTES = 4096
# All are of 8 bytes, aligned, in the machine's order: so each is written at once, and in the order in which it stands here.
MAIN = struct.Struct("=19Q")
# number, monotonic ns, phase, kind, step, micro step, collectives begun, elements of the last, done, total, digest of the batch,
# ns in data, compute, comm, other; how often the phase was seen, ns together, ns of the longest; number again
PULSE = struct.Struct("=4Q")  # number, monotonic ns, answered request, number again
WORD = struct.Struct("=Q")
MAIN_AT, PULSE_AT = (0, 256), (512, 576)
# changes, collectives begun in all groups, how many of them are pending, ns without use of a processor, whether somebody else's program
GROUPS = struct.Struct("=5Q")
REQUEST_AT, COLLECTIONS_AT, GROUPS_AT, ROWS_AT = 640, 704, 768, 1024
MOST_ROWS = (RECORD_BYTES - ROWS_AT - WORD.size) // 8
KINDS = (
    "none", "all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter", "other", "reduce", "gather", "scatter", "all_to_all", "send",
    "recv",
)  # fmt: skip


@functools.cache
def words(count: int) -> struct.Struct:
    """So many words one after the other."""
    return struct.Struct(f"={count}Q")

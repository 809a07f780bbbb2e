"""Where a step of somebody else's training loop begins, as far as that shows: so that a rank which has left the loop can be told from one in it."""

_ALIKE = 3


class Loop:
    """Begins a step with a batch of the loader that it trains on; where it reads none of torch's, with the collective that begins every step.

    A batch for an evaluation, or the barrier after the loop, begins no step. Which loader it trains on is seen at each step: the one that
    was read last before it. Not safe for several threads: all of it is called by the main one.
    """

    def __init__(self) -> None:
        self._trained_on: int | None = None
        self._read: int | None = None
        self._reads = False  # since the last step
        self._by_batches = False  # the last step
        self._has_begun = False
        self._opening = (0, 0)
        self._alike = 0

    def batch(self, rows: object) -> bool:
        """A batch was taken of these rows; whether it begins a step, or goes on with it. None: of what the program itself calls its batches."""
        self._read, self._reads = id(rows), True
        return self._trained_on in (None, self._read)

    def collective(self, kind: int, elements: int) -> bool:
        """A collective is called; whether it begins a step. Only the first after a step may, and where batches are read it sums up the last one."""
        if self._has_begun or self._reads or self._by_batches:
            return False
        self._has_begun = True
        found = (kind, elements)
        self._alike = self._alike + 1 if found == self._opening else 0
        self._opening = found
        return self._alike >= _ALIKE

    def stepped(self) -> None:
        """A step is made."""
        if self._reads:
            self._trained_on = self._read
        self._by_batches = self._reads
        self._reads = self._has_begun = False

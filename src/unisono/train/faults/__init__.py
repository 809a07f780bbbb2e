"""Faults that drills and tests put into a run, in `plan.faults`; a config cannot hold them.

This is all there are. Steps are optimizer steps, from 1; a fault with a step strikes at that step.

What a rank brings, found before step 1:
one_row_more      [rank, …]        these ranks have a row more than the others
unseeded_split    [rank, …]        these ranks have split their rows with a generator that nobody seeded
flip_weight_bit   [rank, …]        these ranks hold a weight with one bit turned
other_tokenizer   [rank, …]        these ranks have another tokenizer

How a rank ends:
die               {rank, step, how: exception | sigkill | exit | exit0 | refuse | oom}    at the start of that step; exit0 leaves as
                                   if all were well; oom takes memory, `bytes` at most, until the kernel kills the rank
one_step_less     [rank, …]        these ranks believe that the run has a step less, and leave before the others
hang_in_teardown  {rank}           a thread of its own keeps the process after its result
destroy_twice     {rank}           it destroys the process group, which is then destroyed again

How a rank hangs, or is late:
stop              {rank, step}     SIGSTOP to itself
starve            {rank, step, fifo}        reads its batch from a FIFO that nobody writes
hold_gil          {rank, step, seconds}     in native code that keeps Python's lock
sleep             {rank, step, seconds}     in Python, between forward and backward
spin              {rank, step, seconds}     the same, in a loop
slow              {rank, step, seconds}     in each step from that one on

What a rank does otherwise than the rest:
other_collective  {rank, step}     gathers where the others sum
other_shape       {rank, step}     sums a tensor with an element more
drift             {rank, step}     changes a weight that is trained
nan_steps         [step, …]        the gradient of these steps is not a number, on all ranks
nan_loss          {rank, steps}    its part of the loss of these steps is not a number

What is no fault, though it looks like one:
pause             [{how: sleep | work | collect | evaluate | sync | save, seconds, steps: [step, …] or every, ranks: [rank, …] or none for all}, …]
                                   a slow first step, a compiler's work, a garbage collection of many objects; a slow round of the
                                   evaluation after that step; metrics that are slow to be synced before its save; a slow save of it
clock_jump        {step, seconds}  the wall clock of every rank is off by so much from then on
write_rows        directory        every rank writes down which rows went into each of its forwards
marks             directory        a rank that a fault strikes leaves the moment there, in ns of the monotonic clock: rank-00001
"""

from unisono.train.faults.bringing import believed, change_loaded, change_table
from unisono.train.faults.calling import among
from unisono.train.faults.ending import at_the_end
from unisono.train.faults.pausing import pause
from unisono.train.faults.rows import write_rows
from unisono.train.faults.spoiling import spoil_gradient, spoil_loss
from unisono.train.faults.striking import in_compute, in_data

__all__ = [
    "among", "at_the_end", "believed", "change_loaded", "change_table", "in_compute", "in_data", "pause", "spoil_gradient", "spoil_loss",
    "write_rows",
]  # fmt: skip

"""The exit codes of every command, and what each means."""

EXIT_CODES: dict[int, str] = {
    0: "completed",
    1: "a bug in unisono: the traceback is shown; please report it",
    2: "invalid usage, config or data: nothing was started",
    3: "ranks or nodes disagree, or a node is missing: nothing was trained",
    4: "stopped by unisono: a hang, or a NaN loss",
    5: "a rank exited by itself: an exception, a signal, out of memory",
    6: "the machine is not fit for the run, or storage failed",
    7: "damage was found, or no valid checkpoint exists where one is needed",
    75: "preempted (SIGTERM, SIGUSR1) with a valid checkpoint: run the same command again",
    130: "interrupted from the keyboard, with a valid checkpoint",
}

"""The exit codes of every command, and what each means."""

EXIT_CODES: dict[int, str] = {
    0: "completed",
    1: "a defect of unisono: the traceback is shown; please report it",
    2: "usage, configuration or data were refused: nothing was started",
    3: "ranks or nodes disagree, or one is missing: nothing was trained",
    4: "ended by a verdict while ranks lived, for example when the loss is no number",
    5: "a rank ended by itself: an exception, a signal, out of memory",
    6: "the machine is not fit, or storage failed",
    7: "damage was found, or there is no intact checkpoint where one is needed",
    75: "preempted (SIGTERM, SIGUSR1) with a good checkpoint: run the same command again",
    130: "interrupted from the keyboard, with a good checkpoint",
}

"""The command line. A command is a plain function; a group of commands is a Typer named `app`.

A module imports at its top nothing but the standard library, typer and `unisono.front.cli.output`:
whatever else a command needs it imports inside the function, so that `unisono --help` answers at
once. Refusals are raised as UnisonoError; `unisono.front.cli.app.main` shows them and ends with
their exit code. `unisono.front.cli.output.output()` says how to speak.
"""

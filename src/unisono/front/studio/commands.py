"""Commands of unisono whose answers the page shows: a plan, a preview, a diagnosis."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from unisono.base.errors import UsageError

COMMAND = (sys.executable, "-m", "unisono")
_MOST_BYTES = 16 << 20
_LIMIT_S = 600.0


class Commands:
    """One process of each kind at a time: a newer request ends the one before it."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: the working directory of the commands.
        """
        self._folder = folder
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def ask(self, kind: str, *words: str) -> list[dict[str, Any]]:
        """The objects that `unisono … --json` prints.

        Args:
            kind: of the question; a newer one of the same kind ends this one.
            words: of the command line.

        Raises:
            UsageError: if it was ended, or prints something else.
        """
        self._end(kind)
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *words, "--json",
            cwd=self._folder, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, limit=_MOST_BYTES, start_new_session=True,
        )  # fmt: skip
        self._running[kind] = process
        try:
            async with asyncio.timeout(_LIMIT_S):
                assert process.stdout is not None
                output = await process.stdout.read(_MOST_BYTES)
                await process.wait()
        except TimeoutError:
            output = b""
        finally:
            if process.returncode is None:
                _kill(process)
            if self._running.get(kind) is process:
                del self._running[kind]
        objects = _objects(output)
        if not objects:
            raise UsageError.of(f"`unisono {words[0]}` was ended before it answered", fix="try again")
        return objects

    def close(self) -> None:
        """Ends all of them."""
        for kind in list(self._running):
            self._end(kind)

    def _end(self, kind: str) -> None:
        process = self._running.get(kind)
        if process is not None and process.returncode is None:
            _kill(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Ends a command with its own processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def _objects(output: bytes) -> list[dict[str, Any]]:
    objects = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                objects.append(value)
    return objects


def shown_plan(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows of a dry run: the plan in figures, a scheduler's script, or problems."""
    plan = next((one for one in objects if one.get("kind") == "plan"), None)
    result = objects[-1]
    problems = result.get("problems") or []
    script = next((one["text"] for one in objects if one.get("kind") == "script"), None)
    if script is not None and not problems:
        return {"problems": [], "script": script}
    if plan is None or problems:
        return {"problems": problems or [{"what": str(result.get("outcome") or "the plan failed")}]}
    data, device = plan["data"], plan["device"]
    return {
        "problems": [],
        "steps": plan["total_steps"],
        "rows": data["ledger"]["used"],
        "tokens": data["ledger"]["tokens"],
        "world_size": plan["world_size"],
        "global_batch": plan["global_batch"],
        "micro_batch": plan["micro_batch"],
        "device": device["name"],
        "dtype": plan["dtype"],
        "memory_bytes": plan["memory"]["total"],
        "device_bytes": device["memory_bytes"],
        "resume": plan["resume_reason"],
        "warnings": [*plan["warnings"], *data["warnings"]],
    }

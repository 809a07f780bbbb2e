"""The command that serves an export: what `unisono export --for PROGRAM` prints."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.base.errors import UsageError

if TYPE_CHECKING:
    from unisono.trainer.plan.task_requests import Exported, GgufExported

PROGRAMS = ("vllm", "ollama", "transformers")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for --max-lora-rank."""


def format_for(program: str | None, format_: str | None) -> str | None:
    """The format of an export for a program: GGUF for Ollama.

    Raises:
        UsageError: if the program is unknown, or does not read the format.
    """
    if program is None:
        return format_
    if program not in PROGRAMS:
        names = ", ".join(PROGRAMS)
        raise UsageError.of(f"--for {program} is unknown", where="--for", fix=f"use one of {names}")
    needed = "gguf" if program == "ollama" else None
    if format_ not in (None, needed):
        fix = "omit --format" if needed is None else "use --format gguf, or omit it"
        raise UsageError.of(f"{program} does not read --format {format_}", where="--format", fix=fix)
    return needed


def serving_command(program: str, result: "Exported | GgufExported") -> tuple[str, str]:
    """The command; or an empty one, and why there is none."""
    out, name = result["out"], Path(result["out"]).name
    if program == "ollama":
        name = shlex.quote(name.lower())  # Ollama takes no upper case
        return f"ollama create {name} -f {shlex.quote(out)}/Modelfile && ollama run {name}", ""
    if result.get("reward") or result.get("labels") or result.get("embeds") or result.get("pictures"):
        return "", f"{program} serves models that write text, and this one does not"
    if result["what"] != "adapter":
        return shlex.join(_whole(program, out, name)), ""
    if program == "transformers":
        return "", "`transformers serve` loads no adapter; add --merge"
    settings = json.loads((Path(out) / "adapter_config.json").read_text(encoding="utf-8"))
    if (why := _unserved(settings)) is not None:
        return "", f"vLLM loads no adapter {why} beside its base; add --merge"
    return shlex.join(_beside(result["base"], out, name, settings)), ""


def _whole(program: str, out: str, name: str) -> list[str]:
    if program == "transformers":
        return ["transformers", "serve", out]
    return ["vllm", "serve", out, "--served-model-name", name]


def _unserved(settings: dict[str, Any]) -> str | None:
    """What of an adapter vLLM does not load."""
    if settings["peft_type"] != "LORA":
        return f"of kind {settings['peft_type'].lower()}"
    if settings.get("use_dora"):
        return "of kind dora"
    if settings.get("modules_to_save"):
        return f"with trained {settings['modules_to_save'][0]}"
    return f"of rank {_rank(settings)}" if _rank(settings) > _RANKS[-1] else None


def _rank(settings: dict[str, Any]) -> int:
    return max(int(settings["r"]), *map(int, (settings.get("rank_pattern") or {}).values()), 1)


def _beside(base: str, out: str, name: str, settings: dict[str, Any]) -> list[str]:
    rank = next(each for each in _RANKS if each >= _rank(settings))
    words = ["vllm", "serve", base, "--enable-lora", "--lora-modules", f"{name}={out}"]
    words += ["--max-lora-rank", str(rank)]
    template = Path(out) / "chat_template.jinja"  # vLLM would take that of the base
    return [*words, "--chat-template", str(template)] if template.exists() else words

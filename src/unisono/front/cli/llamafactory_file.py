"""What a file of LLaMA-Factory means where a command takes RUN|MODEL: a model with an adapter, a
template, and how to generate.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from unisono.base.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from unisono.trainer.config.llamafactory import Translation

_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class InferenceFile:
    """A file of LLaMA-Factory that was given in place of RUN|MODEL."""

    translation: "Translation"

    @property
    def model(self) -> dict[str, Any]:
        """The fields of a task's request that say what to load: target, base, merged, template,
        thinking, default_system.

        A file for training means the run that it trains. All adapters but the last are merged into
        the model, as in LLaMA-Factory.
        """
        found = self.translation
        if found.verb == "train":
            return {"target": str(found.values["output_dir"])}
        *merged, last = found.adapters or [found.model]
        return {
            "target": last,
            "base": found.model if found.adapters else None,
            "merged": merged,
            "template": found.template,
            "thinking": found.values["enable_thinking"],
            "default_system": found.values["default_system"],
        }

    @property
    def generation(self) -> dict[str, Any]:
        """max_tokens, and how tokens are chosen; LLaMA-Factory's defaults where the file is
        silent.
        """
        return self.translation.generation | {"seed": self.translation.values["seed"]}

    def export(self, *, merge: bool) -> dict[str, Any]:
        """The request of the task `export`; a file with `export_dir` merges its adapter."""
        found = self.translation
        exports = found.verb == "export"
        return self.model | {
            "out": found.values["export_dir"],
            "merge": merge or (exports and bool(found.adapters)),
            "max_shard_size": f"{found.values['export_size']} GB" if exports else None,
        }

    def prediction(self, *, step: int | None, limit: int | None, out: Path | None) -> dict[str, Any]:
        """The request of the task `predict`.

        Raises:
            UsageError: if the file does not predict, or with an option that does not apply.
        """
        from unisono.trainer.config import config_of

        found = self.translation
        if found.verb != "predict":
            raise UsageError.of(
                "there are no rows to evaluate",
                where=found.name,
                why="it has no `do_predict: true`",
                fix="add --data FILE",
            )
        for option, value in (("--step", step), ("--limit", limit), ("--out", out)):
            if value is not None:
                raise UsageError.of(
                    f"{option} does not apply to a LLaMA-Factory file that predicts",
                    where=option,
                    fix="set max_samples=N and output_dir=DIR behind the file",
                )
        config = config_of(found, verb="predict").config
        return self.model | {
            "config": config.model_dump(mode="json", by_alias=True),
            "generation": self.generation | {"skip_special_tokens": found.values["skip_special_tokens"]},
            "out": str(found.values["output_dir"]),
        }


def read_inference_request(
    context: typer.Context, target: str, overrides: list[str] | None, sampling: dict[str, Any]
) -> dict[str, Any]:
    """What to load and how to generate, for `generate` and `chat`.

    Options on the command line win over the file's keys.

    Args:
        context: of the command, which knows the options that were given.
        target: RUN|MODEL.
        overrides: as for `read_inference_file`.
        sampling: the command's options, by name.
    """
    given = read_inference_file(target, overrides or [])
    if given is None:
        return {"target": target, **sampling}
    typed = {name: value for name, value in sampling.items() if _is_typed(context, name)}
    return given.model | given.generation | typed


def _is_typed(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def read_inference_file(target: str, overrides: list[str]) -> InferenceFile | None:
    """The file of LLaMA-Factory that is given as RUN|MODEL; None if it is no file.

    Args:
        overrides: `key=value` from the command line, in LLaMA-Factory's names.

    Raises:
        ConfigError: with all that is wrong with the file.
        UsageError: if overrides are given without such a file, or the file is one of our configs.
    """
    path = Path(target)
    if path.suffix.lower() not in _SUFFIXES or path.is_dir():
        if overrides:
            raise UsageError.of(
                f"{overrides[0]!r} is not expected",
                where="command line",
                why="key=value follows only a file of LLaMA-Factory",
                fix="remove it; `--help` lists the options",
            )
        return None
    from unisono.front.cli.output import output
    from unisono.trainer.config import is_llamafactory, read_llamafactory
    from unisono.trainer.config.yaml_file import read_yaml

    raw, _ = read_yaml(path)
    if not is_llamafactory(raw):
        raise UsageError.of(
            f"{target} is a config",
            where=target,
            why="the file describes a training, not a trained model",
            fix=f"pass its run, {raw.get('output_dir') or 'the output_dir in it'}",
        )
    words = [text for text in overrides if "=" not in text]
    if words:
        raise UsageError.of(
            f"{words[0]!r} is not key=value",
            where="command line",
            fix=f"write it before key=value, directly behind {target}",
        )
    found = read_llamafactory(path, tuple(overrides))
    if found.problems:
        raise ConfigError(*found.problems)
    if found.our_overrides and found.verb != "predict":
        raise UsageError.of(
            f"{found.our_overrides[0]!r} has no effect here",
            where="command line",
            why="it is a key of training, and no rows are read",
            fix="remove it; keys of LLaMA-Factory have no dot",
        )
    for note in found.notes():
        output().notify(note)
    return InferenceFile(found)


def split_prompt(prompt: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """PROMPT and the overrides behind a file of LLaMA-Factory, whose first may stand where a prompt
    would.
    """
    words = list(overrides or ())
    if prompt is None or "=" not in prompt:
        return prompt, words
    from unisono.trainer.config.llamafactory_keys import KEYS

    return (None, [prompt, *words]) if prompt.partition("=")[0] in KEYS else (prompt, words)

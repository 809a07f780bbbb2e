"""What a file of LLaMA-Factory means where a command takes RUN|MODEL: a model with an adapter, a
template, and how to generate.
"""

from dataclasses import dataclass
from pathlib import Path

from unisono.base.errors import UsageError
from unisono.trainer.config import config_of
from unisono.trainer.readers.llamafactory.reader import LlamaFactoryFile


@dataclass(frozen=True)
class InferenceFile:
    """A file of LLaMA-Factory that was given in place of RUN|MODEL."""

    translation: LlamaFactoryFile

    @property
    def model(self) -> dict[str, object]:
        """The fields of a task's request that say what to load: target, base, merged, template,
        thinking, default_system.

        A file for training means the run that it trains. All adapters but the last are merged into
        the model, as in LLaMA-Factory.
        """
        file = self.translation
        if file.verb == "train":
            return {"target": str(file.values["output_dir"])}
        *merged, last = file.adapters or [file.model]
        return {
            "target": last,
            "base": file.model if file.adapters else None,
            "merged": merged,
            "template": file.template,
            "thinking": file.values["enable_thinking"],
            "default_system": file.values["default_system"],
        }

    @property
    def generation(self) -> dict[str, object]:
        """max_tokens, and how tokens are chosen; LLaMA-Factory's defaults where the file is
        silent.
        """
        return self.translation.generation | {"seed": self.translation.values["seed"]}

    def export(self, *, merge: bool) -> dict[str, object]:
        """The request of the task `export`; a file with `export_dir` merges its adapter."""
        file = self.translation
        exports = file.verb == "export"
        return self.model | {
            "out": file.values["export_dir"],
            "merge": merge or (exports and bool(file.adapters)),
            "max_shard_size": f"{file.values['export_size']} GB" if exports else None,
        }

    def prediction(self, *, step: int | None, limit: int | None, out: Path | None) -> dict[str, object]:
        """The request of the task `predict`.

        Raises:
            UsageError: if the file does not predict, or with an option that does not apply.
        """
        file = self.translation
        if file.verb != "predict":
            raise UsageError.of(
                "there are no rows to evaluate",
                where=file.name,
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
        config = config_of(file, verb="predict").config
        return self.model | {
            "config": config.model_dump(mode="json", by_alias=True),
            "generation": self.generation | {"skip_special_tokens": file.values["skip_special_tokens"]},
            "out": str(file.values["output_dir"]),
        }

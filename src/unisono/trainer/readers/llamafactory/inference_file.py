"""What a file of LLaMA-Factory means where a command takes RUN|MODEL: a model with an adapter, a
template, and how to generate.
"""

from dataclasses import dataclass
from pathlib import Path

from unisono.base.errors import UsageError
from unisono.trainer.config import config_of
from unisono.trainer.plan.task_requests import PredictRequest, RequestedModel
from unisono.trainer.readers.llamafactory.reader import LlamaFactoryFile


@dataclass(frozen=True)
class InferenceFile:
    """A file of LLaMA-Factory that was given in place of RUN|MODEL."""

    translation: LlamaFactoryFile

    @property
    def model(self) -> RequestedModel:
        """What to load.

        A file for training means the run that it trains. All adapters but the last are merged into
        the model, as in LLaMA-Factory.
        """
        file = self.translation
        if file.verb == "train":
            return RequestedModel(str(file.values["output_dir"]))
        *merged, last = file.adapters or [file.model]
        return RequestedModel(
            last,
            base=file.model if file.adapters else None,
            merged=tuple(merged),
            template=file.template,
            thinking=file.values["enable_thinking"],
            default_system=file.values["default_system"],
        )

    @property
    def export_dir(self) -> str | None:
        """Where it exports to; None: it does not say."""
        return str(self.translation.values["export_dir"] or "") or None

    @property
    def merges(self) -> bool:
        """Whether its export merges an adapter."""
        return self.translation.verb == "export" and bool(self.translation.adapters)

    @property
    def max_shard_size(self) -> str | None:
        """The size of the files of its export."""
        file = self.translation
        return f"{file.values['export_size']} GB" if file.verb == "export" else None

    def prediction(
        self, *, cache_dir: Path, step: int | None, limit: int | None, out: Path | None
    ) -> PredictRequest:
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
        return PredictRequest(
            model=self.model,
            config=config_of(file, verb="predict").config,
            cache_dir=cache_dir,
            max_tokens=file.max_tokens,
            sampling=file.sampling,
            skip_special_tokens=file.values["skip_special_tokens"],
            out=str(file.values["output_dir"]),
        )

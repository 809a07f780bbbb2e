"""Written language models, loaded again as their users load them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.adapter import fit_base_to_adapter
from unisono.trainer.model.directory import adapter_head, read_model_config, stored_head
from unisono.trainer.model.file_settings import ADAPTER_FILE, ADAPTER_SETTINGS
from unisono.trainer.model.files import read_safetensors_header, weight_files
from unisono.trainer.model.layers import take_rope
from unisono.trainer.model.load import DTYPES, load_base, set_head
from unisono.trainer.model.multimodal import auto_class
from unisono.trainer.model.quantization import quantized_load


@dataclass(frozen=True)
class WrittenModel:
    """A language model, or an adapter of one.

    Attributes:
        directory: of a model or an adapter.
        base: of the base model; for a model the same.
        config: of the run; None if nothing is known of one.
        has_head: whether it is a reward model or another classifier.
    """

    directory: Path
    base: Path
    config: RunConfig | None
    has_head: bool

    rounding = 0.0

    @property
    def weights(self) -> Path:
        """The file of trained weights, or the first of several."""
        return self.directory / ADAPTER_FILE if self.is_adapter else weight_files(self.directory)[0]

    @property
    def trusts_code(self) -> bool:
        """Whether the model's own code may run."""
        return self.config is not None and self.config.model.trust_remote_code

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter."""
        return (self.directory / ADAPTER_SETTINGS).is_file()

    def bytes_in_memory(self, dtype: str) -> int:
        """The size of all weights in a dtype, if none is quantized."""
        files = weight_files(self.base) + ([self.directory / ADAPTER_FILE] if self.is_adapter else [])
        shapes = [header.shape for file in files for header in read_safetensors_header(file)]
        return DTYPES[dtype].itemsize * sum(torch.Size(shape).numel() for shape in shapes)

    def load(self, *, dtype: str, device: torch.device) -> Any:
        """The model of transformers, or of peft on its base."""
        return load_as_users_do(self, dtype=dtype, device=device)


def load_as_users_do(written: WrittenModel, *, dtype: str, device: torch.device) -> Any:
    """The model of transformers, or of peft on its base, as their own `from_pretrained` loads it;
    in evaluation mode.
    """
    from peft import PeftModel
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # the front shows the progress
    auto = auto_class(read_model_config(written.base), has_head=written.has_head)
    place = written.directory if (written.directory / "config.json").is_file() else written.base
    settings = AutoConfig.from_pretrained(str(place), trust_remote_code=written.trusts_code)
    head = None
    if written.has_head:
        is_adapter = written.is_adapter
        head = adapter_head(written.directory) if is_adapter else stored_head(read_model_config(place))
        set_head(settings, head)
    quantized = quantized_load(written.config, written.base, dtype=dtype, device=device)
    if quantized is not None:  # as it was trained; transformers alone reads no GPTQ
        model = load_base(
            written.base,
            dtype=DTYPES[dtype],
            trust_remote_code=written.trusts_code,
            adjust=lambda config: take_rope(config, directory=written.directory),
            head=head,
            quantized=quantized,
        )
    else:
        model = auto.from_pretrained(
            str(written.base), config=settings, dtype=DTYPES[dtype], trust_remote_code=written.trusts_code
        )
    model.to(device)
    if not written.is_adapter:
        return model.eval()
    header = read_safetensors_header(written.directory / ADAPTER_FILE)
    fit_base_to_adapter(model, {tensor.name: tuple(tensor.shape) for tensor in header})
    return PeftModel.from_pretrained(model, str(written.directory), torch_device=str(device)).eval()

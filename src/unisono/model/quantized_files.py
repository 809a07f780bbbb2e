"""How the weights of a model are quantized, by the config and the model's config.json; what is refused. Without torch."""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from unisono.config.schema import ModelSection, RunConfig
from unisono.errors import ModelError

Kind = Literal["nf4", "fp4", "int8", "gptq", "awq"]
_LIBRARIES = {"bitsandbytes": (0, 50), "accelerate": (1, 1)}
"""What transformers needs to quantize weights and to read quantized ones, with the first tested version."""
_INSTALL = "pip install bitsandbytes accelerate"


@dataclass(frozen=True)
class Quantization:
    """How the linear layers of a base model are quantized.

    Attributes:
        kind: the data type of bitsandbytes (nf4, fp4, int8), or the method of files that were quantized by another library.
        double: whether the scales of blocks are quantized, too.
        stored: whether the model's files have quantized weights; if not, weights are quantized when they are loaded.
    """

    kind: Kind
    double: bool
    stored: bool

    @property
    def by_bitsandbytes(self) -> bool:
        """Whether its layers are those of bitsandbytes."""
        return self.kind in ("nf4", "fp4", "int8")


def quantization_of(section: ModelSection, directory: Path, settings: dict[str, Any]) -> Quantization | None:
    """How the weights in memory will be quantized; None if they will not be.

    Args:
        section: `model` of the config.
        directory: of the model.
        settings: its config.json.

    Raises:
        ModelError: if the files are quantized in another way than the config says, or a library is missing.
    """
    stored = stored_quantization(directory, settings)
    if stored is None:
        if section.quantize is None:
            return None
        _require_libraries(f"model.quantize: {section.quantize}")
        double = section.quantize_double and section.quantize != "int8"
        return Quantization(section.quantize, double, stored=False)
    if section.quantize not in (None, stored.kind):
        raise ModelError.of(
            f"the weights in {directory} are already quantized as {stored.kind}",
            where=f"model.quantize: {section.quantize}",
            why="quantized weights are not quantized again",
            fix="set model.quantize: null, or use the model's original files",
        )
    return stored


def refuse_training(config: RunConfig, directory: Path, stored: Quantization | None) -> None:
    """Refuses to train weights themselves that are quantized in their files.

    Raises:
        ModelError: if there is no adapter, or it changes the base weights.
    """
    adapter = config.adapter
    if stored is None or not stored.stored:
        return
    if adapter is None:
        raise ModelError.of(
            f"the weights in {directory} are quantized as {stored.kind}, and cannot be trained themselves",
            where="adapter: null",
            fix="set adapter: {kind: lora}, or use the model's original files",
        )
    for key, is_set in (("init: pissa", adapter.init == "pissa"), ("merge", bool(adapter.merge))):
        if is_set:
            raise ModelError.of(
                f"the weights in {directory} are quantized as {stored.kind}, and cannot be changed",
                where=f"adapter.{key}",
                fix=f"remove adapter.{key.partition(':')[0]}, or use the model's original files",
            )


def stored_quantization(directory: Path, settings: dict[str, Any]) -> Quantization | None:
    """How the weights in a model's files are quantized, by its config.json.

    Raises:
        ModelError: if the method is not supported, or its library is missing.
    """
    found = settings.get("quantization_config")
    if not isinstance(found, dict):
        return None
    method = str(found.get("quant_method", "bitsandbytes"))
    where = str(directory / "config.json")
    if method == "bitsandbytes":
        _require_libraries(f"{where}: quant_method {method}")
        if found.get("load_in_8bit") or found.get("_load_in_8bit"):
            return Quantization("int8", double=False, stored=True)
        kind: Kind = "nf4" if found.get("bnb_4bit_quant_type") == "nf4" else "fp4"
        return Quantization(kind, bool(found.get("bnb_4bit_use_double_quant")), stored=True)
    if method in ("gptq", "awq"):
        if installed("gptqmodel") is None:
            raise ModelError.of(
                f"the weights in {directory} are quantized with {method.upper()}, and gptqmodel is not installed",
                where=where,
                why="transformers reads such weights through it",
                fix="pip install gptqmodel optimum, or use the model's original files with model.quantize: nf4",
            )
        return Quantization("gptq" if method == "gptq" else "awq", double=False, stored=True)
    raise ModelError.of(
        f"the weights in {directory} are quantized with {method!r}",
        where=where,
        why="bitsandbytes, GPTQ and AWQ are read",
        fix="use the model's original files, e.g. with model.quantize: nf4",
    )


def _require_libraries(where: str) -> None:
    """Refuses quantized weights where a library is missing or too old.

    Raises:
        ModelError: with how to install it.
    """
    for name, least in _LIBRARIES.items():
        version = installed(name)
        if version is None or _release(version) < least:
            wanted = ".".join(map(str, least))
            raise ModelError.of(
                f"quantized weights need {name} {wanted} or newer, which is not installed"
                + (f": {version} is" if version else ""),
                where=where,
                fix=f"{_INSTALL}, or set model.quantize: null",
            )


def installed(name: str) -> str | None:
    """The version of an installed package; None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())

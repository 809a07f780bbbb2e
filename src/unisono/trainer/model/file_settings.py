"""What a model's and an adapter's files contain, compared with the config: the adapters it starts
from, and how weights are quantized.

Without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from math import prod, sqrt
from pathlib import Path
from typing import Any, Literal

from unisono.base.errors import ModelError, Problem
from unisono.trainer.config.model_sections import AdapterSection, ModelSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.files import ConfigJson, TensorHeader, read_json_object

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_SETTINGS = "adapter_config.json"
_FIX = "copy adapter_config.json again"
_CLASSIFIES = "SEQ_CLS"
_CLASSIFIER_HEADS = {"score", "classifier"}
"""Heads that peft stores with every adapter of a classifier, whether they are listed or not."""


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in a directory.

    Attributes:
        key: the config key that names it.
        directory: with ADAPTER_FILE and ADAPTER_SETTINGS.
        settings: the contents of ADAPTER_SETTINGS.
    """

    key: str
    directory: Path
    settings: dict[str, Any]

    @property
    def files(self) -> list[Path]:
        """The files that decide what it does."""
        return [self.directory / ADAPTER_SETTINGS, self.directory / ADAPTER_FILE]

    @property
    def rank(self) -> int:
        """r."""
        return int(self.settings["r"])

    @property
    def kind(self) -> str:
        """The value of `adapter.kind`."""
        if self.settings.get("use_dora"):
            return "dora"
        return "rslora" if self.settings.get("use_rslora") else "lora"

    @property
    def has_head(self) -> bool:
        """Whether it belongs to a reward model, or to another classifier."""
        return bool(self.settings.get("task_type") == _CLASSIFIES)

    @property
    def scaling(self) -> float:
        """The factor of B·A."""
        alpha = float(self.settings["lora_alpha"])
        return alpha / (sqrt(self.rank) if self.kind == "rslora" else self.rank)


def find_adapters(section: AdapterSection, *, has_head: bool) -> list[StoredAdapter]:
    """The adapters of `adapter.merge` in order, and that of `adapter.from` last, if there are any.

    Args:
        section: `adapter` of the config.
        has_head: whether a reward model or another classifier is trained.

    Raises:
        ModelError: if one is missing, is not a LoRA adapter, or differs from what the section says.
    """
    adapters = [_read(name, f"adapter.merge.{i}") for i, name in enumerate(section.merge)]
    for adapter in adapters:
        _refuse_unmergeable(adapter)
    if section.from_ is not None:
        adapters.append(_read(section.from_, "adapter.from"))
        _refuse_other_task(adapters[-1], has_head=has_head)
        _refuse_differences(adapters[-1], section)
    return adapters


def adapter_directory(name: str, key: str) -> Path:
    """The directory of an adapter: the one that is named, or `adapter` in that of a run.

    Raises:
        ModelError: if there is none.
    """
    directory = Path(name).expanduser()
    for candidate in (directory, directory / "adapter"):
        if (candidate / ADAPTER_SETTINGS).is_file() and (candidate / ADAPTER_FILE).is_file():
            return candidate.resolve()
    raise ModelError.of(
        f"there is no adapter in {name}",
        where=key,
        why=(
            f"neither it nor its folder `adapter` has {ADAPTER_SETTINGS} and {ADAPTER_FILE}"
            if directory.is_dir()
            else "there is no such directory; relative paths start at the working directory"
        ),
        fix="pass the directory of an adapter in peft's layout, or of a finished run",
    )


def _read(name: str, key: str) -> StoredAdapter:
    directory = adapter_directory(name, key)
    file = directory / ADAPTER_SETTINGS
    settings = read_json_object(file, fix=_FIX)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ModelError.of(
            f"{name} is an adapter of type {kind!r}",
            where=key,
            why="only LoRA, rsLoRA and DoRA are trained",
            fix="use a LoRA adapter, or merge it into the model first",
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ModelError.of(
            f"r is {rank!r} and lora_alpha {alpha!r}",
            where=str(file),
            why="both must be numbers above 0",
            fix=_FIX,
        )
    uneven = [name for name in ("rank_pattern", "alpha_pattern") if settings.get(name)]
    if uneven:
        raise ModelError.of(
            f"the modules of {name} have different ranks or scales ({uneven[0]} in {ADAPTER_SETTINGS})",
            where=key,
            why="an adapter has one rank and one alpha here",
            fix="`unisono export --merge` writes the model with this adapter merged; train on that",
        )
    return StoredAdapter(key, directory, settings)


def _refuse_unmergeable(adapter: StoredAdapter) -> None:
    """Refuses an adapter whose change of the base weights is more than B·A: the result could not be
    stored as an adapter.
    """
    what = None
    if adapter.kind == "dora":
        what = "it is a DoRA adapter"
    elif adapter.settings.get("modules_to_save"):
        what = f"it has fully trained modules ({', '.join(adapter.settings['modules_to_save'])})"
    if what is not None:
        raise ModelError.of(
            f"{adapter.directory} cannot be merged in memory",
            where=adapter.key,
            why=f"{what}, which an adapter on the unchanged base model cannot express",
            fix="`unisono export --merge` writes the model with this adapter merged; set model.path to that",
        )


def _refuse_other_task(adapter: StoredAdapter, *, has_head: bool) -> None:
    """Refuses to continue an adapter of a language model as that of a classifier, e.g. of a reward
    model, and the reverse.
    """
    if adapter.has_head == has_head:
        return
    kinds = ("a language model", "a reward model or classifier")
    raise ModelError.of(
        f"{adapter.directory} is an adapter of {kinds[adapter.has_head]}, and {kinds[has_head]} is trained",
        where=adapter.key,
        why=f"task_type is {adapter.settings.get('task_type')!r} in {ADAPTER_SETTINGS}",
        fix=(
            "move it to adapter.merge: training starts from the model with it merged"
            if has_head
            else "set objective: reward or classify, or use an adapter of a language model"
        ),
    )


def _refuse_differences(adapter: StoredAdapter, section: AdapterSection) -> None:
    """Refuses what `adapter` says differently from the adapter that training continues with."""
    implied = _CLASSIFIER_HEADS if adapter.has_head else set()
    modules = sorted({*(adapter.settings.get("modules_to_save") or [])} - implied)
    pairs: list[tuple[str, Any, Any]] = [
        ("kind", section.kind, adapter.kind),
        ("rank", section.rank, adapter.rank),
        ("alpha", float(section.alpha), float(adapter.settings["lora_alpha"])),
        ("modules_to_save", sorted({*section.modules_to_save} - implied), modules),
    ]
    problems = [
        Problem(
            f"adapter.{key} is {_shown(mine)}, and {_shown(theirs)} in"
            f" {adapter.directory / ADAPTER_SETTINGS}",
            f"adapter.{key}",
            "training continues with that adapter's weights",
            f"set adapter.{key}: {_shown(theirs)}",
        )
        for key, mine, theirs in pairs
        if mine != theirs
    ]
    if problems:
        raise ModelError(*problems)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


Kind = Literal["nf4", "fp4", "int8", "gptq", "awq", "fp8", "mxfp4", "compressed-tensors"]
LAYOUTS = {
    "gptq": ("gptq", "gptq_v2"),
    "awq": ("gemm",),
    "fp8": ("fp8",),
    "mxfp4": ("mxfp4",),
    "compressed-tensors": ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized"),
}
"""The layouts that are read of files of GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978), fp8 with
scales of blocks (arXiv:2412.19437), MXFP4 (arXiv:2310.10537) and compressed-tensors; in the first,
zero points are stored less one.
"""
_WIDTHS = {"gptq": (2, 4, 8), "awq": (4,), "fp8": (8,), "mxfp4": (4,), "compressed-tensors": (2, 4, 8)}
"""Bits of a weight."""
_GROUPED = ("qweight", "qzeros", "scales", "g_idx")
_PARTS = {
    "gptq": _GROUPED,
    "awq": _GROUPED,
    "fp8": ("weight", "weight_scale_inv", "activation_scale"),
    "mxfp4": ("blocks", "scales"),  # after the name of the parameter and `_`
    "compressed-tensors": (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    ),
}
"""The last names of the tensors of a quantized matrix. Scales of activations are loaded with it and
not used: activations keep their dtype.
"""
_CODES = ("F8_E4M3", "I8")
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E8M0": 1}  # of a scale
ORIGINAL = "use the model's original files, e.g. with model.quantize: nf4"
_LIBRARIES = {"bitsandbytes": (0, 50), "accelerate": (1, 1)}
"""What transformers needs to quantize weights and to read quantized ones, with the first tested
version.
"""
_INSTALL = "pip install bitsandbytes accelerate"


@dataclass(frozen=True)
class Quantization:
    """How the linear layers of a base model are quantized.

    Attributes:
        kind: the data type of bitsandbytes (nf4, fp4, int8), or the method by which files were
            quantized.
        double: whether the scales of blocks are quantized, too.
        stored: whether the model's files have quantized weights; if not, weights are quantized when
            they are loaded.
        layout: of files that unisono reads itself, one or several of LAYOUTS.
        embeddings: whether embedding and head are in int8, too.
        bits: of a weight in such files.
        block: outputs and inputs that share a scale there, by config.json; 0 are all.
    """

    kind: Kind
    double: bool
    stored: bool
    layout: str = ""
    embeddings: bool = False
    bits: int = 0
    block: tuple[int, int] = (0, 0)


def quantization_of(section: ModelSection, directory: Path, settings: ConfigJson) -> Quantization | None:
    """How the weights in memory will be quantized; None if they will not be.

    Args:
        section: `model` of the config.
        directory: of the model.
        settings: its config.json.

    Raises:
        ModelError: if the files are quantized in another way than the config says, or a library is
            missing.
    """
    stored = stored_quantization(directory, settings)
    if stored is None:
        if section.quantize is None:
            return None
        _require_libraries(f"model.quantize: {section.quantize}")
        double = section.quantize_double and section.quantize != "int8"
        return Quantization(section.quantize, double, stored=False, embeddings=section.quantize_embeddings)
    if section.quantize not in (None, stored.kind):
        raise ModelError.of(
            f"the weights in {directory} are already quantized as {stored.kind}",
            where=f"model.quantize: {section.quantize}",
            why="quantized weights are not quantized again",
            fix="set model.quantize: null, or use the model's original files",
        )
    if section.quantize_embeddings:
        raise ModelError.of(
            f"the weights in {directory} are already quantized as {stored.kind}",
            where="model.quantize_embeddings: true",
            why="their embedding and head are left as they are in the files",
            fix="set model.quantize_embeddings: false, or use the model's original files",
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


def stored_quantization(directory: Path, settings: ConfigJson) -> Quantization | None:
    """How the weights in a model's files are quantized, by its config.json.

    Raises:
        ModelError: if the method is not supported, or its library is missing.
    """
    stored = settings.get("quantization_config")
    if not isinstance(stored, dict):
        return None
    method = str(stored.get("quant_method", "bitsandbytes"))
    where = str(directory / "config.json")
    if method == "bitsandbytes":
        _require_libraries(f"{where}: quant_method {method}")
        if stored.get("load_in_8bit") or stored.get("_load_in_8bit"):
            return Quantization("int8", double=False, stored=True)
        kind: Kind = "nf4" if stored.get("bnb_4bit_quant_type") == "nf4" else "fp4"
        return Quantization(kind, bool(stored.get("bnb_4bit_use_double_quant")), stored=True)
    if method in ("gptq", "awq"):
        return _grouped(method, stored, directory)
    if method == "fp8":
        return Quantization("fp8", double=False, stored=True, layout="fp8", bits=8, block=_block_of(stored))
    if method == "mxfp4":
        return Quantization("mxfp4", double=False, stored=True, layout="mxfp4", bits=4, block=(1, 32))
    if method == "compressed-tensors":
        return _compressed(stored, directory)
    raise ModelError.of(
        f"the weights in {directory} are quantized with {method!r}",
        where=where,
        why="bitsandbytes, GPTQ, AWQ, fp8, MXFP4 and compressed-tensors are read",
        fix=ORIGINAL,
    )


def _grouped(method: str, stored: Mapping[str, object], directory: Path) -> Quantization:
    """How weights are stored that GPTQ or AWQ quantized."""
    named = [
        str(stored[key]).lower() for key in ("checkpoint_format", "version", "format") if stored.get(key)
    ]
    layout = named[0] if named else LAYOUTS[method][0]
    what = None
    if layout not in LAYOUTS[method] or stored.get("is_marlin_format"):
        what = f"in the layout {layout if layout not in LAYOUTS[method] else 'marlin'!r}"
    elif stored.get("bits") not in _WIDTHS[method]:
        what = f"to {stored.get('bits')} bits"
    if what is not None:
        raise ModelError.of(
            f"the weights in {directory} are quantized with {method.upper()} {what}",
            where=str(directory / "config.json"),
            why=f"{' and '.join(LAYOUTS[method])} with {', '.join(map(str, _WIDTHS[method]))} bits are read",
            fix=ORIGINAL,
        )
    kind: Kind = "gptq" if method == "gptq" else "awq"
    bits, block = int(str(stored["bits"])), (1, _positive(stored.get("group_size")))
    return Quantization(kind, double=False, stored=True, layout=layout, bits=bits, block=block)


def _compressed(stored: Mapping[str, object], directory: Path) -> Quantization:
    """How weights are stored in a layout of compressed-tensors."""
    named = stored.get("config_groups")
    groups = [group for group in named.values() if isinstance(group, dict)] if isinstance(named, dict) else []
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
    layouts = {str(group.get("format") or stored.get("format")) for group in groups}
    bits = {part.get("num_bits") for part in weights}
    sparsity = stored.get("sparsity_config") or {}
    what = None
    if not weights or not layouts <= {*LAYOUTS["compressed-tensors"]}:
        what = f"in the layout {', '.join(sorted(layouts)) or stored.get('format')!r}"
    elif len(bits) > 1 or not bits <= {*_WIDTHS["compressed-tensors"]}:
        what = f"to {' and '.join(sorted(map(str, bits)))} bits"
    elif stored.get("transform_config") or (
        isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"
    ):
        what = "with rotated or sparse weights"
    if what is not None:
        raise ModelError.of(
            f"the weights in {directory} are quantized with compressed-tensors {what}",
            where=str(directory / "config.json"),
            why=f"{', '.join(LAYOUTS['compressed-tensors'])} with 2, 4 or 8 bits for all layers are read",
            fix=ORIGINAL,
        )
    return Quantization(
        "compressed-tensors",
        double=False,
        stored=True,
        layout="+".join(sorted(layouts)),
        bits=bits.pop(),
        block=_block_of(weights[0], (1, _positive(weights[0].get("group_size")))),
    )


def _block_of(stored: Mapping[str, object], otherwise: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Outputs and inputs that share a scale, by config.json; 0 are all."""
    block = stored.get("weight_block_size", stored.get("block_structure"))
    if isinstance(block, list) and len(block) == 2:
        return _positive(block[0]), _positive(block[1])
    return otherwise


def _positive(value: object) -> int:
    """A positive number, else 0."""
    return value if isinstance(value, int) and value > 0 else 0


@dataclass(frozen=True)
class StoredShape:
    """A matrix (outs, ins) in files that unisono reads itself.

    Attributes:
        outs: its outputs.
        ins: its inputs.
        bits: of a weight.
        block: outputs and inputs that share a scale.
        scale_bytes: of all scales and zero points in memory.
        parts: its tensors by their last name.
    """

    outs: int
    ins: int
    bits: int
    block: tuple[int, int]
    scale_bytes: int
    parts: dict[str, TensorHeader]

    @property
    def bytes(self) -> float:
        """The bytes of weights, scales and zero points in memory."""
        return self.outs * self.ins * self.bits / 8 + self.scale_bytes


def stored_shapes(how: Quantization, headers: list[TensorHeader], where: str) -> dict[str, StoredShape]:
    """The matrices that are quantized in files which unisono reads itself, by the name of their
    layer; those of MXFP4, of all experts, by the name of their parameter.

    Raises:
        ModelError: if there are none, if shapes contradict each other, or if the head is among
            them.
    """
    parts: dict[str, dict[str, TensorHeader]] = {}
    for header in headers:
        layer, _, last = header.name.rpartition("_" if how.kind == "mxfp4" else ".")
        if last in _PARTS[how.kind]:
            parts.setdefault(layer, {})[last] = header
    shapes = {
        layer: _stored_shape(how, layer, tensors, where)
        for layer, tensors in parts.items()
        if tensors.keys() != {"weight"} or tensors["weight"].dtype in _CODES
    }
    head = next((layer for layer in shapes if layer.endswith("lm_head")), None)
    if head is not None or not shapes:
        raise ModelError.of(
            f"{head} is quantized" if head else f"no weight is quantized with {_title(how.kind)}",
            where=where,
            why="the head is computed with dense weights" if head else "it is the method in config.json",
            fix=ORIGINAL if head else "copy config.json and the weights again",
        )
    return shapes


def _title(kind: Kind) -> str:
    return kind.upper() if kind in ("gptq", "awq") else kind


def _stored_shape(how: Quantization, layer: str, parts: dict[str, TensorHeader], where: str) -> StoredShape:
    if how.kind == "mxfp4":
        shape = _experts_shape(how, parts)
    elif "weight_packed" in parts:
        shape = _packed_shape(how, parts)
    else:
        shape = (_grouped_shape if how.kind in ("gptq", "awq") else _scaled_shape)(how, parts)
    if shape is not None:
        return shape
    raise ModelError.of(
        f"the tensors of {layer} do not form a matrix that {_title(how.kind)} quantized to"
        f" {' or '.join(map(str, _WIDTHS[how.kind]))} bits",
        where=where,
        why=", ".join(f"{name} {part.dtype} {part.shape}" for name, part in parts.items()),
        fix=f"copy the weights again, or {ORIGINAL}",
    )


def _grouped_shape(how: Quantization, parts: dict[str, TensorHeader]) -> StoredShape | None:
    """A matrix of GPTQ or AWQ; None if the tensors do not fit."""
    shapes = {name: header.shape for name, header in parts.items()}
    packed, zeros, scales = (shapes.get(name, ()) for name in _GROUPED[:3])
    dtypes = {parts[name].dtype for name in ("qweight", "qzeros") if name in parts}
    if dtypes != {"I32"} or not len(packed) == len(zeros) == len(scales) == 2 or not all(scales):
        return None
    groups, outs = scales
    bits = zeros[1] * 32 // outs
    ins = packed[0] if how.kind == "awq" else packed[0] * 32 // max(bits, 1)
    expected = (ins, outs * bits // 32) if how.kind == "awq" else (ins * bits // 32, outs)
    fits = (packed, zeros) == (expected, (groups, outs * bits // 32)) and ins % groups == 0
    if not fits or bits not in _WIDTHS[how.kind] or shapes.get("g_idx", (ins,)) != (ins,):
        return None
    return StoredShape(outs, ins, bits, (1, ins // groups), 3 * outs * groups, parts)


def _packed_shape(how: Quantization, parts: dict[str, TensorHeader]) -> StoredShape | None:
    """A matrix of compressed-tensors in words of 32 bits; None if the tensors do not fit."""
    packed, scales = parts["weight_packed"], parts.get("weight_scale")
    if (
        packed.dtype != "I32"
        or len(packed.shape) != 2
        or scales is None
        or scales.dtype not in ("F32", "F16", "BF16")
    ):
        return None
    outs, ins = packed.shape[0], packed.shape[1] * 32 // how.bits
    groups = scales.shape[1] if scales.shape[:1] == (outs,) and len(scales.shape) == 2 else 0
    zeros, index = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    fits = groups > 0 and ins % groups == 0 and (index is None or index.shape == (ins,))
    if zeros is not None:
        fits = fits and (zeros.dtype, zeros.shape) == ("I32", (outs * how.bits // 32, groups))
    return StoredShape(outs, ins, how.bits, (1, ins // groups), 3 * outs * groups, parts) if fits else None


def _scaled_shape(how: Quantization, parts: dict[str, TensorHeader]) -> StoredShape | None:
    """A matrix of bytes with a scale for each block; None if the tensors do not fit."""
    codes, scales = parts.get("weight"), parts.get("weight_scale_inv", parts.get("weight_scale"))
    if codes is None or scales is None or codes.dtype not in _CODES or scales.dtype not in _BYTES:
        return None
    if len(codes.shape) != 2 or "weight_zero_point" in parts:
        return None
    outs, ins = codes.shape
    counts = (*scales.shape, 1, 1)[:2]  # of the blocks; one scale may have no dimension
    block = _shared(outs, counts[0], how.block[0]), _shared(ins, counts[1], how.block[1])
    if prod(scales.shape) != prod(counts) or not all(block):
        return None
    return StoredShape(outs, ins, 8, block, prod(counts) * _BYTES[scales.dtype], parts)


def _experts_shape(_how: Quantization, parts: dict[str, TensorHeader]) -> StoredShape | None:
    """The matrices of all experts in MXFP4, one below the other; None if the tensors do not fit."""
    if {name: part.dtype for name, part in parts.items()} != {"blocks": "U8", "scales": "U8"}:
        return None
    blocks, scales = parts["blocks"].shape, parts["scales"].shape
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != 16:
        return None
    return StoredShape(blocks[0] * blocks[1], blocks[2] * 32, 4, (1, 32), prod(scales), parts)


def _shared(size: int, count: int, block: int) -> int:
    """How many of `size` share one of `count` scales: a block of config.json, or equal parts; 0 if
    neither fits.
    """
    if block and -(-size // block) == count:
        return block
    return size // count if count and size % count == 0 else 0


def dense_headers(headers: list[TensorHeader], shapes: dict[str, StoredShape]) -> list[TensorHeader]:
    """The tensors of the model before it was quantized."""
    packed = {part.name for shape in shapes.values() for part in shape.parts.values()}
    return [header for header in headers if header.name not in packed] + [
        TensorHeader(layer if "blocks" in shape.parts else f"{layer}.weight", "I32", (shape.outs, shape.ins))
        for layer, shape in shapes.items()
    ]


def _require_libraries(where: str) -> None:
    """Refuses quantized weights where a library is missing or too old.

    Raises:
        ModelError: with how to install it.
    """
    for name, least in _LIBRARIES.items():
        version = installed(name)
        if version is None or _release(version) < least:
            required = ".".join(map(str, least))
            raise ModelError.of(
                f"quantized weights need {name} {required} or newer, which is not installed"
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

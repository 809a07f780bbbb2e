"""GGUF, the files of llama.cpp and Ollama: settings, tensors and tokenizer of a model, written and
read back.

The package `gguf` has the names of tensors of all architectures. What a tensor must look like
differs for some: gguf_families.toml says how. How llama.cpp splits words is found by trying what it
knows.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from gguf import GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from unisono.base.errors import IntegrityError, ModelError
from unisono.base.events import Reporter
from unisono.base.text import one_line
from unisono.trainer.model.gguf_families import FAMILIES, KEYS, RENAMED, GgufFamily
from unisono.trainer.model.gguf_limits import Rope, find_difference, longest_context
from unisono.trainer.model.multimodal import text_prefixes

DTYPES = {
    "f32": (GgmlType.F32, LlamaFileType.ALL_F32),
    "f16": (GgmlType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GgmlType.BF16, LlamaFileType.MOSTLY_BF16),
}
"""What is written without llama.cpp's own tool: the type of matrices; vectors are always
float32.
"""
_FIXED_TYPES = {
    "v.patch_embd.weight": GgmlType.F32,
    "v.position_embd.weight": GgmlType.F32,
    "mm.input_projection.weight": GgmlType.F16,
}
"""Of tensors of a vision part, which llama.cpp's converter writes in these whatever the others
are.
"""
_QUANTIZED_DIFFERENCE = 0.5  # of the spread of a tensor's values: 2 bits explain that much

TokenizerJson = dict[str, Any]  # as tokenizers writes it
Setting = tuple[str, str, Any]
"""A key, the type of GGUF ("uint32", "float32", "bool", "string", "array"), and the value."""
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?((?=\p{L})[^a-z])*((?=\p{L})[^A-Z])+%s|"
    r"[^\r\n\p{L}\p{N}]?((?=\p{L})[^a-z])+((?=\p{L})[^A-Z])*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SEED = (_LLAMA3 % "").replace(r"]+[\r\n]*|", r"\r\n]+|")
_SPLITS: dict[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((_GPT2,), False),
    "qwen2": ((_LLAMA3 % "",), False),
    "llama-bpe": ((_LLAMA3 % "{1,3}",), True),
    "dbrx": ((_LLAMA3 % "{1,3}",), False),
    "smollm": ((r"\p{N}", _GPT2), False),
    "tekken": ((_CASED % ("", "", ""),), True),
    "gpt-4o": ((_CASED % (_ENDING, _ENDING, "{1,3}"),), False),
    "seed-coder": ((_SEED,), False),
    "falcon": ((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"), False),
    "bloom": ((r" ?[^(\s|.,!?…。，、।۔،)]+",), False),
}
"""llama.cpp's names for ways to split a text before merges; whether a word that is a token is taken
without merging.
"""
TEXTS = (
    "Hello, world! It's 10:45 on May 3rd, 2026; that'll be $1,234.50 (or €99).",
    "don't I'VE we'd THEY'LL 'still' 'title' \"quoted\" — dash – and…",
    "  two  spaces\tand\ttabs \n\n new lines\r\n   indented\n\n\nend  ",
    'def f(x):\n    return x**2 + 3*y_1  # comment\n\n{"intent": "timer", "minutes": 15}',
    "https://example.org/a?b=c&d=%20 me@mail.com #tag @user C:\\path\\file.txt",
    "你好，世界。今天是2026年5月3日！ こんにちは 안녕하세요 Привет мир Ελληνικά עברית العربية",
    "naïve café résumé Ångström ﬁ ½ ² 🙂🙃👩‍👩‍👧 ~`|^<>[]{}()=+-*/_",
    "('still) [\"'twas'] x't 'move",
    "a b c d e f 1 2 3 12 123 1234 12345 x1 1x A.B.C. e.g. i.e. 7 77 777 7777 77777 777777 7777777",
    "!!!!!! ..... ?!?… ==>> ``` --- ###\t\t \n \n\n \t\n\n\n   \n     x",
    "Phường Bến Nghé, ខ្ញុំ រស់នៅ भाषा ภาษาไทย ÉCOLE Straße iPhone XMLHttpRequest I'M y'all's",
)
"""Texts by which it is found what llama.cpp must do to give the tokens of a tokenizer; the last has
words with combining marks.
"""
_DECODER_OF_SEVERAL = re.compile(r"^model\.[a-z_]+\.(?=(layers|embed_tokens|norm)\.)")
"""What the names of a multimodal model have before those of its language model."""
_FUSED = re.compile(r"experts\.gate_up_proj$|shared_mlp\.input_linear\.weight$")
"""Gate and up projection of experts in one tensor."""
_CONV1D = re.compile(r"\.(c_attn|c_fc|c_proj)\.weight$")
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class GgufLayout:
    """How a model of transformers is laid out in a GGUF file.

    Attributes:
        config: of the text model.
        kind: its `model_type`.
        names: from names of transformers to those of llama.cpp.
    """

    config: Any
    kind: str
    names: Any

    @classmethod
    def of(cls, config: Any) -> "GgufLayout":
        """The layout for a config of transformers.

        Raises:
            ModelError: if the architecture, or a setting of it, cannot be written.
        """
        text = config.get_text_config()
        kind = str(text.model_type)
        if kind not in FAMILIES:
            raise ModelError.of(
                f"a model of type {kind} cannot be written as GGUF here",
                where="config.json: model_type",
                why=f"the types that can be are {', '.join(FAMILIES)}",
                fix=(
                    "add `--converter convert_hf_to_gguf.py`, with the path of that script in a clone of"
                    " llama.cpp"
                ),
            )
        layout = cls(text, kind, gguf.get_tensor_name_map(FAMILIES[kind].number, text.num_hidden_layers))
        layout._check()
        return layout

    @property
    def family(self) -> GgufFamily:
        """What is known of the family."""
        return FAMILIES[self.kind]

    @property
    def architecture(self) -> str:
        """llama.cpp's name."""
        return self.family.architecture

    @property
    def head_dim(self) -> int:
        """The width of an attention head."""
        plain = self.config.hidden_size // self._heads
        return int(plain if self.family.exact_heads else getattr(self.config, "head_dim", None) or plain)

    @property
    def _heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def _rope(self) -> Rope:
        """The rotary settings, those of the layers that see all tokens."""
        rope: Rope = getattr(self.config, "rope_parameters", None) or {}
        return rope.get("full_attention", rope)

    @property
    def _key_value_heads(self) -> int:
        """Of falcon with one head for all, config.json has a number that is not used."""
        one = getattr(self.config, "multi_query", False)
        return 1 if one else int(getattr(self.config, "num_key_value_heads", None) or self._heads)

    @property
    def _inner_size(self) -> int:
        """The width of the feed-forward part."""
        names = ("intermediate_size", "ffn_hidden_size", "n_inner")
        size = next((int(value) for name in names if (value := getattr(self.config, name, None))), 0)
        if self.kind == "lfm2" and self.config.block_auto_adjust_ff_dim:
            multiple = self.config.block_multiple_of
            size = int(self.config.block_ffn_dim_multiplier * int(2 * size / 3))
            size = multiple * math.ceil(size / multiple)
        return size or 4 * int(self.config.hidden_size)

    def _check(self) -> None:
        difference = find_difference(self.kind, self.config)
        if difference is not None:
            key, value, why = difference
            raise ModelError.of(
                f"llama.cpp has nothing for {key} {one_line(value, limit=60)} in a model of type {self.kind}",
                where=f"config.json: {key}",
                why=why,
                fix="keep the model for transformers and vLLM: `unisono export --merge`",
            )

    def settings(self, vocabulary: int) -> list[Setting]:
        """The keys of the architecture.

        Args:
            vocabulary: rows of the embedding.
        """
        config, family, name = self.config, self.family, self.architecture
        types = getattr(config, "layer_types", None) or ()
        settings: list[Setting] = [
            ("vocab_size", "uint32", vocabulary),
            ("context_length", "uint32", longest_context(self.kind, config)),
            ("embedding_length", "uint32", config.hidden_size),
            ("block_count", "uint32", config.num_hidden_layers),
            ("feed_forward_length", "uint32", self._inner_size),
            ("attention.head_count", "uint32", self._heads),
            ("attention.key_length", "uint32", self.head_dim),
            ("attention.value_length", "uint32", self.head_dim),
        ]
        heads = self._key_value_heads
        settings.append(
            ("attention.head_count_kv", "array", [heads * (type_ != "conv") for type_ in types])
            if "conv" in types
            else ("attention.head_count_kv", "uint32", heads)
        )
        settings += [(key, "uint32", self._inner_size) for key in family.experts]
        settings += self._by_keys()
        if family.windows:
            settings.append(("attention.sliding_window", "uint32", int(config.sliding_window)))
        if self.kind == "gemma3_text":
            local_rope = config.rope_parameters["sliding_attention"]
            settings.append(("rope.freq_base_swa", "float32", float(local_rope.get("rope_theta", 10000.0))))
        settings += self._rotation()
        return [(f"{name}.{key}", kind, value) for key, kind, value in settings]

    def _by_keys(self) -> Iterator[Setting]:
        """What config.json has, by the names of llama.cpp."""
        config = self.config.to_dict()
        for kind, names in KEYS.items():
            for key, name in names.items():
                is_read = kind == "uint32" or key in self.family.reads
                if is_read and config.get(key) is not None:
                    yield name, kind, {"uint32": int, "float32": float, "bool": bool}[kind](config[key])
        if (value := config.get("rms_norm_eps")) is not None:
            yield "attention.layer_norm_rms_epsilon", "float32", value
        for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"):
            if (value := config.get(key)) is not None:  # of either kind of norm
                yield "attention.layer_norm_epsilon", "float32", value
                yield "attention.layer_norm_rms_epsilon", "float32", value
        for name, value in self.family.constants.items():
            yield name, "uint32" if isinstance(value, int) else "float32", value

    def _rotation(self) -> list[Setting]:
        rope = self._rope
        if not rope:  # learned positions
            return []
        theta = float(rope.get("rope_theta", 10000.0))
        width = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        if rope.get("rope_type") == "dynamic":  # Hunyuan's, which is one for all lengths
            theta *= float(rope["alpha"]) ** (width / (width - 2))
        return [
            ("rope.freq_base", "float32", theta),
            ("rope.dimension_count", "uint32", width),
            *self._scaling(),
        ]

    def _scaling(self) -> list[Setting]:
        rope = self._rope
        if rope.get("rope_type") not in ("linear", "yarn"):
            return []
        settings: list[Setting] = [
            ("rope.scaling.type", "string", rope["rope_type"]),
            ("rope.scaling.factor", "float32", float(rope["factor"])),
        ]
        if rope["rope_type"] == "yarn":
            trained = rope.get("original_max_position_embeddings") or self.config.max_position_embeddings
            settings.append(("rope.scaling.original_context_length", "uint32", int(trained)))
        return settings

    def tensors(self, base: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a model in the file's names and layout, in float32, one after the other.

        Raises:
            ModelError: if llama.cpp has no name for one.
        """
        tied = base.get_input_embeddings().weight is getattr(base.get_output_embeddings(), "weight", None)
        omitted = {"lm_head.weight"} if tied and not self.family.head else set()
        inside = text_prefixes(base)
        for name, tensor in base.state_dict().items():
            if not name.startswith(inside) or name in omitted:  # of a vision part
                continue
            if name.endswith(_BUFFERS):
                continue
            for part, values in self._parts(name, tensor.detach().float()):
                yield self.name(part), values
        if self._rope.get("rope_type") == "llama3":
            yield "rope_freqs.weight", self._llama3_factors()

    def name(self, name: str) -> str:
        """The file's name for a tensor.

        Raises:
            ModelError: if there is none.
        """
        plain = _DECODER_OF_SEVERAL.sub("model.", name)
        for theirs, known in RENAMED.items():
            plain = plain.replace(theirs, known)
        stored_name = self.names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if stored_name is not None and ".experts." in plain:
            stored_name += ".weight"  # transformers has no suffix for the experts of a layer
        if stored_name is None:
            raise ModelError.of(
                f"llama.cpp has no name for the tensor {name}",
                where=f"model type {self.kind}",
                fix="add `--converter convert_hf_to_gguf.py`, with its path in a clone of llama.cpp",
            )
        return str(stored_name)

    def _parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor as llama.cpp has it: the two halves of experts are two tensors there."""
        if (fused := _FUSED.search(name)) is not None:
            form = (
                "experts.{}_proj" if fused[0].startswith("experts") else "mlp.shared_experts.{}_proj.weight"
            )
            for half, part in zip(tensor.chunk(2, dim=-2), ("gate", "up"), strict=True):
                yield name[: fused.start()] + form.format(part), half.contiguous()
        elif self.family.one_plus and name.endswith("norm.weight"):
            yield name, tensor + 1  # these norms multiply by 1 + weight, and llama.cpp by what the file has
        elif self.family.transposed and _CONV1D.search(name):
            yield name, tensor.T.contiguous()
        elif name.endswith(".conv.conv.weight"):  # (C, 1, L)
            yield name, tensor.squeeze(1)
        else:
            yield name, self.rows(name, tensor)

    def rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The outputs of projections of attention in the order of llama.cpp; others are
        unchanged.
        """
        if self.family.query_key_value and ".query_key_value." in name:
            parts = tensor.reshape(self._heads, 3, -1, *tensor.shape[1:])
            return parts.swapaxes(0, 1).reshape(tensor.shape)
        if not self.family.interleaved or not any(f".{part}_proj." in name for part in "qk"):
            return tensor
        heads = self._heads if ".q_proj." in name else self._key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)

    def _llama3_factors(self) -> torch.Tensor:
        """(head_dim / 2,): by what llama.cpp divides each rotary frequency."""
        rope = self._rope
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        trained = rope["original_max_position_embeddings"]
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
        waves = 2 * math.pi * float(rope["rope_theta"]) ** (steps / self.head_dim)  # in tokens
        smooth = ((trained / waves - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).float()


def write_gguf(
    path: Path,
    settings: Iterable[Setting],
    tensors: "Iterable[tuple[str, torch.Tensor]]",
    shapes: "Iterable[tuple[str, tuple[int, ...]]]",
    *,
    architecture: str,
    dtype: str,
) -> None:
    """Writes a file, tensor by tensor.

    Args:
        path: new.
        settings: keys besides the architecture.
        tensors: in the file's names and layout, float32.
        shapes: of the same tensors in the same order.
        architecture: llama.cpp's name.
        dtype: of matrices, one of DTYPES.
    """
    writer = GGUFWriter(path, architecture)
    for key, kind, value in settings:
        getattr(writer, f"add_{kind}")(key, value)
    for name, shape in shapes:
        kept = _type_of(name, shape, dtype)
        bytes_each = 4 if kept == GgmlType.F32 else 2
        size = math.prod(shape) * bytes_each
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors:
        writer.write_tensor_data(_stored(name, tensor, dtype))
    writer.close()


def _type_of(name: str, shape: tuple[int, ...], dtype: str) -> GgmlType:
    if name in _FIXED_TYPES and dtype != "f32":
        return _FIXED_TYPES[name]
    return DTYPES[dtype][0] if len(shape) > 1 else GgmlType.F32


def _stored(name: str, tensor: torch.Tensor, dtype: str) -> "np.ndarray[Any, Any]":
    """The values as they are in the file.

    Raises:
        ModelError: if one is out of the range of the type.
    """
    kept = _type_of(name, tuple(tensor.shape), dtype)
    values = tensor.cpu().contiguous().numpy()
    if kept == GgmlType.F16:
        if float(np.abs(values).max(initial=0.0)) > float(np.finfo(np.float16).max):
            raise ModelError.of(
                f"{name} has values out of the range of f16",
                where=name,
                why="they would become infinite",
                fix="add --quantize bf16",
            )
        return values.astype(np.float16)
    return quantize(values, GgmlType.BF16) if kept == GgmlType.BF16 else values


def read_back(path: Path, tensors: "Iterable[tuple[str, torch.Tensor]]", *, dtype: str | None) -> float:
    """Compares every tensor of a file with what it should hold.

    Args:
        path: of the file.
        tensors: that were written.
        dtype: one of DTYPES: values must be equal; None: they were quantized since, and must be
            near.

    Returns:
        The largest root mean square difference of a tensor, relative to that of its values; 0 for
        equal ones.

    Raises:
        IntegrityError: if one is missing, differs, or is there in addition.
    """
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    worst = 0.0
    for name, tensor in tensors:
        here = stored.pop(name, None)
        if here is None or [*reversed(here.shape.tolist())] != list(tensor.shape):
            raise _damaged(path, name, "it is missing, or has a different shape")
        if dtype is not None:
            if not np.array_equal(np.asarray(here.data), _stored(name, tensor, dtype)):
                raise _damaged(path, name, "its values differ from those that were written")
            continue
        worst = max(worst, _difference(here, tensor))
    if stored:
        raise _damaged(path, next(iter(stored)), "the model has no such tensor")
    if worst > _QUANTIZED_DIFFERENCE:
        raise _damaged(path, "a tensor", f"quantized values differ by {worst:.2g} of their size")
    return worst


def _difference(here: Any, tensor: torch.Tensor) -> float:
    try:
        values = dequantize(np.asarray(here.data), here.tensor_type).reshape(tensor.shape)
    except NotImplementedError:  # of a type that the package cannot read; name and shape are compared
        return 0.0
    expected = tensor.cpu().numpy()
    size = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
    return float(np.sqrt(np.mean(np.square(values - expected, dtype=np.float64)))) / max(size, 1e-12)


def _damaged(path: Path, name: str, why: str) -> IntegrityError:
    return IntegrityError.of(
        f"{name} in {path.name} is not what was written", where=str(path), why=why, fix="export again"
    )


@dataclass(frozen=True, slots=True)
class Spaces:
    """What llama.cpp does with the spaces beside special tokens.

    Attributes:
        prefix: for SentencePiece's BPE: it puts one before a text, and before what follows a
            special token.
        strips: special tokens take the white space after them. It does that by the name of the
            model, `general.name`.
    """

    prefix: bool
    strips: bool

    def named(self, name: str) -> str:
        """The name in the file: with `phi-3` in it, special tokens strip."""
        if self.strips:
            return name if _PHI3.search(name) else f"phi-3 {name}"
        return _PHI3.sub("phi 3", name)


def find_spaces(tokenizer: Any, texts: Sequence[str]) -> Spaces:
    """What llama.cpp must do with spaces to give the same tokens for some texts.

    Args:
        tokenizer: of transformers, a fast one.
        texts: e.g. rendered conversations.

    Raises:
        ModelError: if it can do nothing of the kind.
    """
    real = tokenizer.backend_tokenizer
    raw = json.loads(real.to_str())
    if raw["model"].get("type") != "BPE":
        raise _unknown(f"a tokenizer of type {raw['model'].get('type')}")
    expected = _encoded(real, texts)
    known = {*raw["model"]["vocab"], *(token["content"] for token in raw["added_tokens"])}
    pieces = bool(raw["model"].get("byte_fallback"))
    for strips in (False, True) if known.issuperset((*_UNSTRIPPED, "</s>")) else (False,):
        for prefix in (True, False) if pieces else (False,):
            spaces = Spaces(prefix, strips)
            if _encoded(Tokenizer.from_str(json.dumps(_with_spaces(raw, spaces))), texts) == expected:
                return spaces
    raise _unknown("the way in which this tokenizer treats spaces beside special tokens")


def _with_spaces(raw: TokenizerJson, spaces: Spaces) -> TokenizerJson:
    """A tokenizer.json that treats spaces as llama.cpp does."""
    added = [
        token | {"lstrip": False, "rstrip": spaces.strips and token["content"] not in _UNSTRIPPED}
        for token in raw["added_tokens"]
    ]
    if not raw["model"].get("byte_fallback"):
        return raw | {"added_tokens": added}
    parts: list[dict[str, object]] = [{"type": "Prepend", "prepend": "▁"}] if spaces.prefix else []
    parts.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    normalizer = {"type": "Sequence", "normalizers": parts}
    return raw | {"added_tokens": added, "normalizer": normalizer, "pre_tokenizer": None}


def tokenizer_settings(
    tokenizer: Any,
    *,
    rows: int,
    template: str | None,
    stops: Iterable[int],
    end_of_turn: int | None,
    spaces: Spaces,
    report: Reporter,
) -> list[Setting]:
    """The keys of a tokenizer.

    Args:
        tokenizer: of transformers, a fast one.
        rows: of the embedding: as many tokens are written. One without a text gets a placeholder;
            one without a row is not written.
        template: the chat template, as Jinja.
        stops: the tokens that end an answer. llama.cpp has keys for three: the end of sequence, of
            a turn, and of a message.
        end_of_turn: the one that the template writes.
        spaces: as `find_spaces` gives it.
        report: is told of texts whose tokens differ.

    Raises:
        ModelError: if llama.cpp has no such tokenizer.
    """
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, kinds = _tokens(raw, rows)
    settings = (
        _pieces(raw, rows, prefix=spaces.prefix)
        if raw["model"].get("byte_fallback")
        else _bytes(raw, tokenizer, report)
    )
    settings += [("tokenizer.ggml.tokens", "array", tokens), ("tokenizer.ggml.token_type", "array", kinds)]
    ends = [end_of_turn] if end_of_turn is not None else []
    ends += [stop for stop in stops if stop not in (end_of_turn, tokenizer.eos_token_id)]
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
        "unknown": tokenizer.unk_token_id,
        **dict(zip(("eot", "eom"), ends, strict=False)),
    }
    settings += [
        (f"tokenizer.ggml.{name}_token_id", "uint32", number)
        for name, number in ids.items()
        if isinstance(number, int) and number < rows
    ]
    first = tokenizer("a").input_ids[0]
    settings.append(("tokenizer.ggml.add_bos_token", "bool", first == tokenizer.bos_token_id))
    settings.append(("tokenizer.ggml.add_eos_token", "bool", False))
    if template is not None:
        settings.append(("tokenizer.chat_template", "string", template))
    return settings


def _unknown(what: str) -> ModelError:
    return ModelError.of(
        f"llama.cpp has nothing for {what}",
        where="tokenizer.json",
        why="byte-level BPE and SentencePiece's BPE can be written",
        fix=(
            "add `--converter convert_hf_to_gguf.py`, with its path in a clone of llama.cpp, or keep the model"
            " for transformers and vLLM"
        ),
    )


def _bytes(raw: TokenizerJson, tokenizer: Any, report: Reporter) -> list[Setting]:
    """The keys of byte-level BPE."""
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    name, is_exact = find_split(raw, tokenizer.backend_tokenizer)
    if not is_exact:
        report.warning(
            "tokens_differ",
            "words with combining marks, as in Hindi and Khmer, have other tokens in llama.cpp than here",
        )
    return [
        ("tokenizer.ggml.model", "string", "gpt2"),
        ("tokenizer.ggml.pre", "string", name),
        ("tokenizer.ggml.merges", "array", merges),
    ]


def find_split(raw: TokenizerJson, real: Tokenizer) -> tuple[str, bool]:
    """llama.cpp's name for a way to split texts that gives the same tokens for all of TEXTS; else
    for all but the last, and then False.

    Args:
        raw: tokenizer.json.
        real: the same tokenizer.

    Raises:
        ModelError: if there is none.
    """
    made = {name: _splitting(raw, *split) for name, split in _SPLITS.items()}
    for texts in (TEXTS, TEXTS[:-1]):
        expected = _encoded(real, texts)
        for name, tokenizer in made.items():
            if _encoded(tokenizer, texts) == expected:
                return name, texts == TEXTS
    raise _unknown("the way in which this tokenizer splits texts")


def _splitting(raw: TokenizerJson, patterns: Sequence[str], ignore_merges: bool) -> Tokenizer:  # noqa: FBT001
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    changed = raw | {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, whole]},
        "model": raw["model"] | {"ignore_merges": ignore_merges},
    }
    return Tokenizer.from_str(json.dumps(changed))


def _encoded(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _pieces(raw: TokenizerJson, count: int, *, prefix: bool) -> list[Setting]:
    """The keys of SentencePiece's BPE. tokenizer.json has no scores; their order is that of the
    merges.
    """
    merged: dict[str, int] = {}
    for rank, merge in enumerate(raw["model"]["merges"]):
        merged.setdefault(merge.replace(" ", "") if isinstance(merge, str) else "".join(merge), rank)
    by_id = {number: text for text, number in raw["model"]["vocab"].items()}
    scores = [-float(merged.get(by_id.get(i, ""), 0)) for i in range(count)]
    return [
        ("tokenizer.ggml.model", "string", "llama"),
        ("tokenizer.ggml.pre", "string", "default"),
        ("tokenizer.ggml.scores", "array", scores),
        ("tokenizer.ggml.add_space_prefix", "bool", prefix),
    ]


def _tokens(raw: TokenizerJson, rows: int) -> tuple[list[str], list[int]]:
    """The text and the kind of every token of the embedding."""
    by_id = {number: text for text, number in raw["model"]["vocab"].items()}
    unknown = raw["model"].get("unk_token")
    kinds = dict.fromkeys(by_id, _NORMAL)
    if raw["model"].get("byte_fallback"):
        kinds |= {number: _BYTE for number, text in by_id.items() if _is_byte(text)}
    for added in raw["added_tokens"]:
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER
    kinds |= {number: _UNKNOWN for number, text in by_id.items() if text == unknown}
    return [by_id.get(i, f"[PAD{i}]") for i in range(rows)], [kinds.get(i, _UNUSED) for i in range(rows)]


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")

"""The tokenizer of a run: loads it, and finds what decides the ids of a text.

Equal files do not suffice for equal ids: transformers chooses the class of a tokenizer by
`model_type` of config.json, and a class may replace the normalizer and the pre-tokenizer of
tokenizer.json. So the cache of rows compares the tokenizer as it is loaded. That takes a second,
mostly for importing transformers: what was found is kept in CACHE/tokenizers/KEY.json until
anything that transformers looks at changes.
"""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from unisono.base.child import loading_modules
from unisono.base.errors import DataError, ModelError
from unisono.base.files import fault_of, read_object, write_json
from unisono.base.text import library_words

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
PROBE = (
    "Hello, wörld! 123 καλημέρα\n\t你好 🙂 def f(x): return x  # end  I'LL we've 3.14159 ½ ²\r\n\n   Ａｂ ﬁ"
    " e\u0301 नमस्ते สวัสดี مَرْحَبًا ____ <s></s><|im_end|> 👩‍👩‍👧 http://a.b/c?d=1\u00a0\u200b "
)
"""A text on which pre-tokenizers and normalizers of common families differ."""

# Without some of these, transformers loads or converts a tokenizer by other means.
_DECIDING_PACKAGES = ("transformers", "tokenizers", "mistral-common", "sentencepiece", "tiktoken", "protobuf")
_NO_IDS = ("version", "truncation", "padding", "decoder")  # of a tokenizer.json


def tokenizer_files(directory: Path) -> list[Path]:
    """The tokenizer's files that determine the tokens of a conversation, with the code of
    tokenizers that have some.
    """
    more = [*directory.glob("*.py"), *directory.glob("additional_chat_templates/*.jinja")]
    named = [*(directory / name for name in (*TOKENIZER_FILES, "generation_config.json")), *sorted(more)]
    return [file for file in named if file.is_file()]


def digest_file(path: Path, name: str) -> str:
    """The xxh3-128 of a file's bytes.

    Raises:
        DataError: if it cannot be read.
    """
    total = xxhash.xxh3_128()
    fault = fault_of(path, name)
    if fault is not None:
        raise DataError.of(fault.what, where=name, why=fault.why, fix=fault.fix)
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                total.update(block)
    except OSError as error:
        raise DataError.of(
            f"{name} cannot be read", where=name, why=str(error), fix="check its permissions"
        ) from error
    return total.hexdigest()


def load_tokenizer(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a directory.

    Raises:
        ModelError: if transformers cannot read it.
        DataError: if it cannot encode a text.
    """
    with loading_modules():
        from transformers import AutoTokenizer

        from unisono.trainer.data.text_encoder import probe_tokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # tokenizers raises a plain Exception for an invalid tokenizer.json
        usual = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)
        if type(error) is not Exception and not isinstance(error, usual):
            raise
        raise ModelError.of(
            "the tokenizer cannot be read",
            where=str(directory),
            why=library_words(error),
            fix="copy its files again, or set model.tokenizer",
        ) from error
    probe_tokenizer(tokenizer)
    return tokenizer


@dataclass
class RunTokenizer:
    """The tokenizer of a run, loaded when it is first needed.

    Attributes:
        directory: of its files.
        trust_remote_code: whether code in its files may run.
        cache_dir: where `traits` keeps what it found.
    """

    directory: Path
    trust_remote_code: bool
    cache_dir: Path

    @cached_property
    def loaded(self) -> Any:
        """The tokenizer of transformers; raises like `load_tokenizer`."""
        return load_tokenizer(self.directory, trust_remote_code=self.trust_remote_code)

    def traits(self) -> dict[str, str]:
        """`traits_of` this tokenizer, kept from an earlier start if all that transformers looks at
        is the same.

        Raises:
            DataError: if a file cannot be read.
            ModelError: if transformers cannot read the tokenizer.
        """
        if self._runs_code():  # which may be in other directories, and may look at anything
            return traits_of(self.loaded)
        key = self._key()
        file = self.cache_dir / "tokenizers" / f"{key}.json"
        kept = read_object(file).get("traits")
        if isinstance(kept, dict) and kept:
            return kept
        traits = traits_of(self.loaded)
        if self._key() == key:
            with contextlib.suppress(OSError):  # a full disk costs the next start a second
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"schema": 1, "traits": traits})
        return traits

    def _runs_code(self) -> bool:
        file = self.directory / "tokenizer_config.json"
        return self.trust_remote_code and "auto_map" in read_object(file)

    def _key(self) -> str:
        """The digest of all that decides how transformers loads a tokenizer; it compares names of
        directories, too.
        """
        files = [*tokenizer_files(self.directory), *self.directory.glob("config.json")]
        parts = [
            str(self.directory),
            *(f"{name} {_version(name)}" for name in _DECIDING_PACKAGES),
            *(f"{file.name} {digest_file(file, str(file))}" for file in files),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def traits_of(tokenizer: Any) -> dict[str, str]:
    """What decides the ids of a text: its class by name, and digests of its parts, by their names
    in tokenizer.json, and of the ids of PROBE.
    """
    traits = {"class": type(tokenizer).__name__, "special tokens": _digest(_special_tokens(tokenizer))}
    if not tokenizer.is_fast:
        return traits | {"encoding of a probe text": _digest(tokenizer(PROBE)["input_ids"])}
    backend = tokenizer.backend_tokenizer
    if not getattr(backend.model, "dropout", None):  # which draws
        ids = [backend.encode(PROBE, add_special_tokens=special).ids for special in (False, True)]
        traits["encoding of a probe text"] = _digest(ids)
    try:
        parts = json.loads(backend.to_str())
    except Exception as error:  # for a part that is written in Python the library raises Exception itself
        if type(error) is not Exception:
            raise
        return traits
    named = {name.replace("_", "-"): part for name, part in parts.items() if name not in _NO_IDS}
    return traits | {name: _digest(part) for name, part in named.items()}


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items()}


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())

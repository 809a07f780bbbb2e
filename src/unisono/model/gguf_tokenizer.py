"""A tokenizer of transformers in the keys of a GGUF file. How llama.cpp splits words is found by trying what it knows."""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from unisono.errors import ModelError
from unisono.model.gguf_files import Setting

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((_GPT2,), False),
    "qwen2": ((_LLAMA3 % "",), False),
    "llama-bpe": ((_LLAMA3 % "{1,3}",), True),
    "dbrx": ((_LLAMA3 % "{1,3}",), False),
    "smollm": ((r"\p{N}", _GPT2), False),
    "tekken": ((_CASED,), True),
    "bloom": ((r" ?[^(\s|.,!?…。，、।۔،)]+",), False),
}
"""llama.cpp's names for ways to split a text before merges; whether a word that is a token is taken without merging."""
_TEXTS = (
    "Hello, world! It's 10:45 on May 3rd, 2026; that'll be $1,234.50 (or €99).",
    "don't I'VE we'd THEY'LL 'still' 'title' \"quoted\" — dash – and…",
    "  two  spaces\tand\ttabs \n\n new lines\r\n   indented\n\n\nend  ",
    'def f(x):\n    return x**2 + 3*y_1  # comment\n\n{"intent": "timer", "minutes": 15}',
    "https://example.org/a?b=c&d=%20 me@mail.com #tag @user C:\\path\\file.txt",
    "你好，世界。今天是2026年5月3日！ こんにちは 안녕하세요 Привет мир Ελληνικά עברית العربية",
    "naïve café résumé Ångström ﬁ ½ ² 🙂🙃👩‍👩‍👧 ~`|^<>[]{}()=+-*/_",
    "('still) [\"'twas'] x't 'move",
    "a b c d e f 1 2 3 12 123 1234 12345 x1 1x A.B.C. e.g. i.e.",
)


def tokenizer_settings(
    tokenizer: Any, *, rows: int, template: str | None, end_of_turn: int | None
) -> list[Setting]:
    """The keys of a tokenizer.

    Args:
        tokenizer: of transformers, a fast one.
        rows: of the embedding: as many tokens are written. One without a text gets a placeholder; one without a row is not written.
        template: the chat template, as Jinja.
        end_of_turn: the token that ends an answer of the template.

    Raises:
        ModelError: if llama.cpp has no such tokenizer.
    """
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    if raw["model"].get("type") != "BPE":
        raise _unknown(f"a tokenizer of type {raw['model'].get('type')}")
    tokens, kinds = _tokens(raw, rows)
    found = _pieces(raw, rows) if raw["model"].get("byte_fallback") else _bytes(raw, tokenizer)
    found += [("tokenizer.ggml.tokens", "array", tokens), ("tokenizer.ggml.token_type", "array", kinds)]
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
        "unknown": tokenizer.unk_token_id,
        "eot": end_of_turn,
    }
    found += [
        (f"tokenizer.ggml.{name}_token_id", "uint32", number)
        for name, number in ids.items()
        if isinstance(number, int) and number < rows
    ]
    first = tokenizer("a").input_ids[0]
    found.append(("tokenizer.ggml.add_bos_token", "bool", first == tokenizer.bos_token_id))
    found.append(("tokenizer.ggml.add_eos_token", "bool", False))
    if template is not None:
        found.append(("tokenizer.chat_template", "string", template))
    return found


def _unknown(what: str) -> ModelError:
    return ModelError.of(
        f"llama.cpp has nothing for {what}",
        where="tokenizer.json",
        why="byte-level BPE and SentencePiece's BPE can be written",
        fix="convert a merged export with llama.cpp's convert_hf_to_gguf.py, or keep it for transformers and vLLM",
    )


def _bytes(raw: dict[str, Any], tokenizer: Any) -> list[Setting]:
    """The keys of byte-level BPE."""
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    return [
        ("tokenizer.ggml.model", "string", "gpt2"),
        ("tokenizer.ggml.pre", "string", find_split(raw, tokenizer.backend_tokenizer)),
        ("tokenizer.ggml.merges", "array", merges),
    ]


def find_split(raw: dict[str, Any], real: Tokenizer) -> str:
    """llama.cpp's name for a way to split texts that gives the same tokens for all of _TEXTS.

    Args:
        raw: tokenizer.json.
        real: the same tokenizer.

    Raises:
        ModelError: if there is none.
    """
    wanted = _encoded(real, _TEXTS)
    for name, (patterns, ignore_merges) in _SPLITS.items():
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
        if _encoded(Tokenizer.from_str(json.dumps(changed)), _TEXTS) == wanted:
            return name
    raise _unknown("the way in which this tokenizer splits texts")


def _encoded(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _pieces(raw: dict[str, Any], count: int) -> list[Setting]:
    """The keys of SentencePiece's BPE. tokenizer.json has no scores; their order is that of the merges."""
    merged: dict[str, int] = {}
    for rank, merge in enumerate(raw["model"]["merges"]):
        merged.setdefault(merge.replace(" ", "") if isinstance(merge, str) else "".join(merge), rank)
    by_id = {number: text for text, number in raw["model"]["vocab"].items()}
    scores = [-float(merged.get(by_id.get(i, ""), 0)) for i in range(count)]
    text = json.dumps([raw.get("normalizer"), raw.get("pre_tokenizer")])
    prefix = (
        '"Prepend"' in text or '"prepend_scheme": "always"' in text or '"prepend_scheme": "first"' in text
    )
    return [
        ("tokenizer.ggml.model", "string", "llama"),
        ("tokenizer.ggml.pre", "string", "default"),
        ("tokenizer.ggml.scores", "array", scores),
        ("tokenizer.ggml.add_space_prefix", "bool", prefix),
    ]


def _tokens(raw: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
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

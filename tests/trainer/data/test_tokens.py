"""Which tokens hold which characters, with tokenizers in Rust and in Python.

Run: .venv/bin/python -m pytest tests/trainer/data/test_tokens.py
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from tests import front_server
from unisono.base.errors import DataError
from unisono.trainer.data import Conversation, text_encoder
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.text_encoder import TextEncoder, _FastTokens
from unisono.trainer.data.token_table import Encoded
from unisono.trainer.data.tokenizer import load_tokenizer

TokenizerDir = Callable[..., Path]
_text = st.text(st.sampled_from("ab 12\n\té日🙂<|>"), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=_text, inside=_text, after=_text, trim=st.booleans())
def test_between_special_tokens_the_range_is_that_of_the_text_alone(
    tokenizer_dir: TokenizerDir, before: str, inside: str, after: str, *, trim: bool
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir(trim=trim), trust_remote_code=False)
    text = before + "<|im_start|>" + inside + "<|im_end|>" + after
    first = len(before) + len("<|im_start|>")
    (tokens,) = TextEncoder(tokenizer).encode([text], special=False)
    found = tokens.range(first, first + len(inside))
    assert found is not None
    assert tokens.ids == tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(tokens.ids[found[0] : found[1]], clean_up_tokenization_spaces=False) == inside


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=_text, inside=_text, after=_text, trim=st.booleans())
def test_anywhere_the_range_holds_all_the_characters_and_no_token_too_much(
    tokenizer_dir: TokenizerDir, before: str, inside: str, after: str, *, trim: bool
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir(trim=trim), trust_remote_code=False)
    text = before + inside + after
    (tokens,) = TextEncoder(tokenizer).encode([text], special=False)
    found = tokens.range(len(before), len(before) + len(inside))
    assert found is not None
    whole = tokenizer.decode(tokens.ids[found[0] : found[1]], clean_up_tokenization_spaces=False)
    shorter = tokenizer.decode(
        tokens.ids[found[0] + 1 : found[1] - 1], clean_up_tokenization_spaces=False
    ).strip("\ufffd")
    assert inside in whole or "\ufffd" in whole
    assert len(shorter) <= len(inside)


_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "trimmed offsets": {"post_processor": processors.ByteLevel(trim_offsets=True)},
    "NFC": {"normalizer": normalizers.NFC()},
    "lower case": {"normalizer": normalizers.Lowercase()},
    "prefixed": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "words": {"pre_tokenizer": pre_tokenizers.Whitespace()},
}


@pytest.fixture(params=_KINDS)
def byte_level(request: pytest.FixtureRequest, tokenizer_dir: TokenizerDir) -> Any:
    """A byte-level tokenizer with a part of its own."""
    tokenizer = load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    for part, value in _KINDS[request.param].items():
        setattr(tokenizer.backend_tokenizer, part, value)
    tokenizer.backend_tokenizer.add_tokens(
        [AddedToken("<wide>", lstrip=True, rstrip=True), AddedToken("a b")]
    )
    return tokenizer


_PIECES = ["a", "b", " ", "\n", "é", "e\u0301", "Å", "日", "🙂", "<wide>", "a b", "hello there", "<|im_end|>"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ranges_are_those_of_the_offsets(byte_level: Any, data: st.DataObject) -> None:
    """Also where the tokens of a byte-level tokenizer are not the bytes of the text: it changes the
    text, or drops spaces around a token.
    """
    text = "".join(data.draw(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=20)))
    first = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(first + 1, len(text)))
    encoding = byte_level.backend_tokenizer.encode(text, add_special_tokens=False)
    (tokens,) = TextEncoder(byte_level).encode([text], special=False)
    assert tokens.ids == encoding.ids
    assert tokens.range(first, end) == _FastTokens(encoding).range(first, end)


def test_tokens_with_enormous_numbers_have_the_ranges_of_their_offsets(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of tokens are kept in a list by number, which such a number would make as long."""
    monkeypatch.setattr(text_encoder, "_MOST_TOKENS", 60)
    text = "hello <wide> there a b"
    expected = _FastTokens(byte_level.backend_tokenizer.encode(text, add_special_tokens=False))
    (tokens,) = TextEncoder(byte_level).encode([text], special=False)
    assert max(tokens.ids) >= 60
    assert [tokens.range(i, i + 1) for i in range(len(text))] == [
        expected.range(i, i + 1) for i in range(len(text))
    ]


def test_offsets_are_recorded_if_token_bytes_are_seldom_those_of_texts(
    tokenizer_dir: TokenizerDir,
) -> None:
    """Encoding a text a second time must stay an exception: its time is that of the first."""
    tokenizer = load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    encoder = TextEncoder(tokenizer)
    kinds = []
    for text in ("hello", "e\u0301", "hello"):
        batch = encoder.encode([text] * 40, special=False)
        assert all(tokens.range(0, 1) for tokens in batch)
        kinds.append({type(tokens).__name__ for tokens in batch})
    assert kinds == [{"_ByteTokens"}, {"_ByteTokens"}, {"_FastTokens"}]


def test_a_tokenizer_in_python_gives_the_same_mask(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{{ eos_token if m['role'] == 'assistant'"
        " }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    encoder = Encoder(tokenizer, directory=tmp_path)
    (row,) = encoder.encode(
        [Conversation([{"role": "user", "content": "é?"}, {"role": "assistant", "content": "日🙂"}])]
    )
    assert isinstance(row, Encoded)
    assert tokenizer.decode(row.ids[row.targets].tolist()) == "日🙂</s>"
    assert row.ids.tolist() == tokenizer("user:é?assistant:日🙂</s>", add_special_tokens=False).input_ids


@pytest.mark.parametrize("special", [False, True])
def test_neither_cut_nor_padded_whatever_the_tokenizer_was_set_to(
    tokenizer_dir: TokenizerDir, *, special: bool
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    short, long = TextEncoder(tokenizer).encode(["a", "a b c d e f g"], special=special)
    assert (len(short.ids), len(long.ids) > 4) == (1, True)


PROGRAM = """import sys
import numpy as np
from pathlib import Path
from unisono.trainer.data.token_table import Encoded, TokenTable, TokenWriter, write_meta, write_split

folder = Path(sys.argv[1])
with TokenWriter(folder / "tokens.arrow") as writer:
    writer.add(Encoded(np.arange(4, dtype=np.int32), np.array([False, True, True, True])))
columns = {name: np.array([value]) for name, value in dict(stored=0, length=4, loss=3, file=0, number=0).items()}
write_split(folder, "train", columns, [[0]])
write_meta(folder, {}, files=[("rows.jsonl", True)])
print(TokenTable.open(folder, "train").row(0)[0].tolist(), "pandas" in sys.modules)
"""


def test_tokens_are_written_and_read_without_pandas(tmp_path: Path) -> None:
    """Its import would take longer than all others of a forked rank or task; `pa.array` and
    `to_numpy` of pyarrow need it.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[0, 1, 2, 3] False\n", done.stderr


def changed(source: Path, folder: Path, **parts: Any) -> Path:
    """A copy of a tokenizer's folder with other parts in its tokenizer.json."""
    shutil.copytree(source, folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"pre_tokenizer": split("(a+)+$|(a|aa)+$")}, "retry-limit-in-match over"),
        ({"pre_tokenizer": split("(?:x|xx)*y")}, "retry-limit-in-match over"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}}, "Missing [UNK] token"),
    ],
)
def test_a_tokenizer_that_cannot_encode_is_refused_when_it_is_loaded(
    tokenizer_dir: TokenizerDir, tmp_path: Path, parts: dict[str, Any], why: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match="the tokenizer cannot encode a text") as caught:
        load_tokenizer(changed(tokenizer_dir(), tmp_path / "t", **parts), trust_remote_code=False)
    assert why in caught.value.problems[0].why
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_text_on_which_a_pattern_backtracks_is_refused(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    folder = changed(tokenizer_dir(), tmp_path / "t", pre_tokenizer=split("(?:ab|abab)*c"))
    encoder = TextEncoder(load_tokenizer(folder, trust_remote_code=False))
    with pytest.raises(DataError, match="cannot encode a text"):
        encoder.encode(["ab" * 60 + "!c"], special=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"pre_tokenizer": split(r"(?:\w?\w?\w?){8}(?<=\x00)")}, "the tokenizer does not terminate"),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}] * 5,
                }
            },
            "the tokenizer needs too much memory",
        ),
    ],
    ids=["time", "memory"],
)
def test_a_tokenizer_that_ends_the_process_is_named(
    tokenizer_dir: TokenizerDir, tmp_path: Path, parts: dict[str, Any], what: str
) -> None:
    folder = changed(tokenizer_dir(), tmp_path / "t", **parts)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: 'builtin:tiny', tokenizer: {folder}}}\ndata: {{train: rows.jsonl}}\noutput_dir:"
        " out\n"
    )
    done = front_server.run(
        [sys.executable, "-m", "unisono", "data", "preview", "c.yaml"],
        timeout=300,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert f"error: {what}" in done.stderr
    assert "Traceback" not in done.stderr

"""Pickles of plain values are read, and nothing else is.

Run: pytest tests/guard/diagnosis/test_pickles.py
"""

import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unisono.guard.diagnosis.flight_recording import RefusedPickleError, read_pickle

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.tuples(inner, inner, inner, inner),
    max_leaves=20,
)  # fmt: skip


@given(plain, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"\x80\x02")
@example(b"(.")
@example(b"]a.")
@example(b"}(K\x01u.")
@example(b"\x80\x04\x95" + b"\xff" * 8)
@example(b"\x8d" + b"\xff" * 8)  # a string of 2^64 bytes
@example(b"Nr\xff\xff\xff\xff.")  # a memo of 2^32 places
@example(b"]]\x85d.")
@example(b"(](]u.")
@example(b"})" + b"\x85" * 100_000 + b"Ns.")  # a key of nested tuples
def test_junk_is_refused_or_read_and_nothing_else(data: bytes) -> None:
    with contextlib.suppress(RefusedPickleError):
        read_pickle(data)


@given(plain, st.data())
def test_a_pickle_that_is_cut_short_is_refused(value: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(value)
    with pytest.raises(RefusedPickleError):
        read_pickle(whole[: data.draw(st.integers(0, len(whole) - 1))])


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made"
    with pytest.raises(RefusedPickleError):
        read_pickle(pickle.dumps({"entries": [Evil(target)]}, protocol))
    assert not target.exists()


@pytest.mark.parametrize("name", ["eval", "list"])
def test_the_refusal_reports_what_the_pickle_asks_for(name: str) -> None:
    with pytest.raises(RefusedPickleError, match=rf"GLOBAL builtins\.{name}.*none of it was executed"):
        read_pickle(f"\x80\x02cbuiltins\n{name}\n(U\x011tR.".encode("latin-1"))


def test_classes_persistent_ids_and_extensions_are_refused_too() -> None:
    for data in (
        b"ibuiltins\nlist\n.",
        b"Pid\n.",
        b"\x82\x01.",
        b"N\x93.",
        b"NNR.",
        b"N}b.",
        b"(Nob.",
        b"\x97.",
        b"NQ.",
    ):
        with pytest.raises(RefusedPickleError, match="asks for"):
            read_pickle(b"\x80\x02" + data)

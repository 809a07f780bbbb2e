"""YAML is read with the line of every key, and what a config cannot need is refused early.

Run: pytest tests/config
"""

import os
import time
from pathlib import Path

import pytest

from unisono.base.errors import ConfigError
from unisono.trainer.config.yaml_file import parse_value, parse_yaml, read_config_text, read_yaml


def problem_of(text: str) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, name="t.yaml")
    return caught.value.problems[0].what, caught.value.problems[0].where


def test_every_key_has_its_line() -> None:
    value, lines = parse_yaml("a: 1\nb:\n  c: [x,\n    y]\n", name="t.yaml")
    assert value == {"a": 1, "b": {"c": ["x", "y"]}}
    assert lines == {("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "c", 0): 3, ("b", "c", 1): 4}


def test_a_key_that_appears_twice_is_refused_with_both_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml("a: 1\nb: {c: 1, c: 2}\na: 3\n", name="t.yaml")
    assert [(problem.what, problem.where, problem.why) for problem in caught.value.problems] == [
        ("duplicate key 'c'", "t.yaml:2", "it is also on line 2"),
        ("duplicate key 'a'", "t.yaml:3", "it is also on line 1"),
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: [1", "t.yaml:1:6"), ("a: b: c", "t.yaml:1:5"), ("a: 1\n\tb: 2", "t.yaml:2:1"), ("a: &b *c", "t.yaml:1:7"),
        ("a: \x07", "t.yaml:1"), ("x: 1\n---\ny: 2", "t.yaml:2:1"), ("? [a]\n: b", "t.yaml:1:3"),
        ("a: !!python/object/apply:os.system [ls]", "t.yaml:1:4"), ("a: " + "9" * 5000, "t.yaml:1:4"),
        ("a: 0x" + "f" * 5000, "t.yaml:1:4"), ("a: !!int 0x", "t.yaml:1:4"), ("a: " + "[" * 3000, "t.yaml"),
    ],
)  # fmt: skip
def test_what_is_not_yaml_is_refused_with_its_place(text: str, where: str) -> None:
    assert problem_of(text) == ("the config is not valid YAML", where)


@pytest.mark.parametrize("text", ["", "# nothing", "- a", "just text", "3", "1: a", "null: a"])
def test_what_is_not_a_mapping_of_words_is_refused(text: str) -> None:
    assert problem_of(text)[0] == "the config is not a mapping of keys to values"


def test_a_bomb_of_aliases_does_not_unfold() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    began = time.process_time()
    assert "nested deeper" in problem_of("\n".join(rows))[0]
    assert time.process_time() - began < 5


def test_a_value_that_holds_itself_is_refused() -> None:
    assert "nested deeper" in problem_of("a: &a [*a]")[0]


def test_a_plain_alias_and_a_merge_are_welcome() -> None:
    value, _ = parse_yaml("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}\n", name="t.yaml")
    assert value == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}


def test_a_date_stays_text_and_a_byte_order_mark_is_not_a_key(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 2026-11-21\r\nb: 1e-4\r\n")
    assert read_yaml(file)[0] == {"a": "2026-11-21", "b": "1e-4"}


@pytest.mark.parametrize(
    ("text", "value"), [("", ""), ("null", None), ("[a, 1]", ["a", 1]), ("3 epochs", "3 epochs")]
)
def test_the_value_of_an_override_is_yaml(text: str, value: object) -> None:
    assert parse_value(text, name="command line") == value


def test_config_in_another_encoding_is_named_with_the_converting_command(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        path.write_text("model: builtin:tiny\n", encoding=encoding)
        with pytest.raises(ConfigError, match="text") as caught:
            read_yaml(path)
        assert "iconv -f UTF-" in caught.value.problems[0].fix
    path.write_text("# Modèle préféré, à côté de l'été\nmodel: x\n", encoding="latin-1")
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        read_yaml(path)
    assert caught.value.problems[0].where == f"{path}:1:6"
    assert "iconv -f WINDOWS-1252" in caught.value.problems[0].fix
    path.write_text("model: x\n", encoding="utf-8-sig")
    assert read_yaml(path)[0] == {"model": "x"}


def test_a_pipe_as_config_is_not_waited_for_where_nobody_writes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "config.yaml")
    assert "named pipe" in caught.value.problems[0].why


def test_config_path_that_became_a_pipe_after_a_first_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: x\n", encoding="utf-8-sig")
    assert read_config_text(path) == "model: x\n"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a named pipe"):
        read_config_text(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xe9")
    large = tmp_path / "large.yaml"
    large.write_text("a: " + "x" * 300_000)
    for path in (tmp_path / "none.yaml", tmp_path, latin, large, Path("a\0b"), Path("/dev/zero")):
        with pytest.raises(ConfigError) as caught:
            read_yaml(path)
        (problem,) = caught.value.problems
        assert problem.where.startswith(str(path))
        assert problem.fix

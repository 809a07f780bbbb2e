"""Files of every kind give the same rows; whatever bytes they hold, what is wrong is said with its
place.

Run: .venv/bin/python -m pytest tests/trainer/data/test_readers.py
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.base.errors import DataError, Problem
from unisono.trainer.data import BadRow, RawRow, RowError, RowFile, readers
from unisono.trainer.data.formats import COLUMNS, FormatName, detect, to_example
from unisono.trainer.data.readers import READERS, kind_of, read_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "a,\"b\"\nc", "completion": "d"}, {"prompt": "日本", "completion": "\u2028 e"}, {"prompt": "x", "completion": " y "},
]  # fmt: skip


def read(path: Path) -> list[RawRow | BadRow]:
    return list(read_rows(RowFile(path, path.name, kind_of(path.name))))


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    table = pa.Table.from_pylist(ROWS)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
    elif kind in ("jsonl", "ndjson"):
        path.write_text(
            "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8"
        )
    else:
        import csv

        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(
                stream, ["prompt", "completion"], delimiter="\t" if kind == "tsv" else ","
            )
            writer.writeheader()
            writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "jsonl", "ndjson", "csv", "tsv"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = read(write(tmp_path, kind))
    assert [row.value for row in rows if isinstance(row, RawRow)] == ROWS


def test_the_stream_form_that_datasets_writes_is_read_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    assert len(read(tmp_path / "rows.arrow")) == 3


def test_keys_that_arrow_filled_with_null_are_no_keys(tmp_path: Path) -> None:
    rows = [{"tools": [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": 2}}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (row,) = read(tmp_path / "rows.parquet")
    assert isinstance(row, RawRow)
    assert row.value == rows[0]


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b\xe2\x80\xa8c"}\r\n{"text": "d"}')
    assert [str(row.place) for row in read(path) if isinstance(row, RawRow)] == [
        "rows.jsonl:1",
        "rows.jsonl:3",
        "rows.jsonl:4",
    ]


def test_lines_of_a_csv_are_those_where_a_row_begins(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text\n"a\nb"\nc\nd,e\n', encoding="utf-8")
    found = read(path)
    assert [row.place.number for row in found] == [2, 4, 5]
    assert isinstance(found[2], BadRow)
    assert "2 fields" in found[2].why


@pytest.mark.parametrize(
    ("line", "where", "why"),
    [
        (b'{"text": "a" "b"}', "rows.jsonl:2:14", "Expecting ',' delimiter"),
        (b'{"text": "a\xff"}', "rows.jsonl:2:12", "not UTF-8"),
        (b'["text"]', "rows.jsonl:2", "a list"),
        (b"[" * 100_000, "rows.jsonl:2", "nested"),
        (b"1" * 10_000, "rows.jsonl:2", "digits"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_with_its_column_and_the_rest_is_read(
    tmp_path: Path, line: bytes, where: str, why: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n')
    first, bad, last = read(path)
    assert isinstance(first, RawRow)
    assert isinstance(last, RawRow)
    assert isinstance(bad, BadRow)
    assert (bad.where, why in bad.why) == (where, True)


def test_a_malformed_json_file_is_refused_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n {"text": "a"},\n {"text" "b"}\n]', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.problems[0].where == "rows.json:3:10"


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ('[{"instruction":"a","input":"","output":"b"},]', "rows.json:1:46", "a comma before ]"),
        ('[\n {"text": "a",},\n {"text": "b"}\n]', "rows.json:2:15", "a comma before }"),
    ],
)
def test_a_comma_after_the_last_element_of_a_json_file_is_named(
    tmp_path: Path, text: str, where: str, why: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read(path)
    (problem,) = caught.value.problems
    assert (problem.where, problem.why) == (where, why)
    assert problem.fix == "remove it: JSON has no comma after the last element"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_comma_after_a_line_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"text": "a"},\n{"text": "b",}\n{"text": "c"}', encoding="utf-8")
    after, before, last = read(path)
    assert isinstance(after, BadRow)
    assert isinstance(before, BadRow)
    assert isinstance(last, RawRow)
    assert (after.column, after.why) == (14, "malformed JSON: a comma after the row")
    assert before.why == "malformed JSON: a comma before }"


def test_json_file_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "json")
    path.write_text(path.read_text()[:-1] + " " * 8192)
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError) as refused:
        read(path)
    assert "rows.json is too large for a .json file" in str(refused.value)
    assert "1.1 TB need about 4.4 TB" in refused.value.problems[0].why
    assert "jq -c '.[]' rows.json > NEW.jsonl" in refused.value.problems[0].fix


def test_json_lines_under_the_name_json_are_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert len(read(path)) == 2


def test_an_unknown_kind_of_file_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.docx").write_bytes(b"x")
    with pytest.raises(DataError, match="unsupported file type") as caught:
        read(tmp_path / "rows.docx")
    assert "jsonl" in caught.value.problems[0].fix


# Encodings, and files that are something else.

CHINESE = "我们的目标是让每一个人都可以在自己的电脑上训练模型。"


def refused(path: Path) -> Problem:
    with pytest.raises(DataError) as caught:
        read(path)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_utf_16_and_32_are_named_once_with_a_command_that_converts_them(
    tmp_path: Path, kind: str, encoding: str
) -> None:
    text = {
        "jsonl": '{"text": "a"}\n' * 300,
        "json": '[{"text": "a"}]',
        "csv": "text\na\n",
        "txt": "a word\n",
    }[kind]
    path = tmp_path / f"my rows.{kind}"
    path.write_text(text.replace("a", "ä", 1) if kind != "csv" else text, encoding=encoding)
    problem = refused(path)
    assert encoding[:6].upper() in problem.what
    command = problem.fix.removeprefix("convert it: ").partition(", and")[0]
    assert command.startswith("iconv -f UTF-")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert all(isinstance(row, RawRow) for row in read(tmp_path / f"my rows.utf8.{kind}"))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "txt"])
def test_utf_8_byte_order_mark_is_no_part_of_a_row_even_in_joined_files(tmp_path: Path, kind: str) -> None:
    mark = "\ufeff"
    text = {
        "jsonl": f'{mark}{{"text": "a"}}\n{mark}{{"text": "b"}}\n',
        "json": f'{mark}[{{"text": "a"}}]',
        "txt": f"{mark}a\n{mark}b\n",
    }
    (tmp_path / f"rows.{kind}").write_text(text.get(kind, f"{mark}text\na\n"), encoding="utf-8")
    rows = read(tmp_path / f"rows.{kind}")
    assert [row.value["text"] for row in rows if isinstance(row, RawRow)] == ["a", "b"][: len(rows)]


@pytest.mark.parametrize(
    ("text", "encoding", "guess"),
    [
        (CHINESE, "gbk", "GB18030"),
        ("我們的目標是讓每一個人都可以在自己的電腦上訓練模型。", "big5", "BIG5"),
        ("私たちの目標は、誰もが自分のコンピューターで訓練できることです。", "shift_jis", "SHIFT_JIS"),
        ("우리의 목표는 모든 사람이 자신의 컴퓨터에서 모델을 훈련하는 것입니다.", "euc_kr", "EUC-KR"),
        ("Notre but est que chacun puisse entraîner un modèle. Élève, où êtes-vous allé ?", "latin-1", "WINDOWS-1252"),
        ("Наша цель состоит в том, чтобы каждый мог обучать модели.", "cp1251", "WINDOWS-1251"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt"])
def test_a_different_encoding_is_guessed_where_it_is_sure(
    tmp_path: Path, kind: str, text: str, encoding: str, guess: str
) -> None:
    lines = {
        "jsonl": f'{{"text": "a"}}\n{{"text": "{text}"}}\n',
        "json": f'[{{"text": "a"}},\n{{"text": "{text}"}}]',
    }
    path = tmp_path / f"rows.{kind}"
    path.write_text(lines.get(kind, f"text\n{text}\n".replace(",", " ")), encoding=encoding)
    problem = refused(path)
    assert f"iconv -f {guess} -t UTF-8" in problem.fix
    assert ":2" in problem.where
    assert "byte 0x" in problem.why


def test_a_broken_byte_in_utf_8_is_one_bad_row_with_its_place_and_no_guess(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f'{{"text": "{CHINESE}"}}\n'.encode() * 3 + b'{"text": "\xe9\xe8\xe0 \xe7\xe9"}\n')
    *good, bad = read(path)
    assert all(isinstance(row, RawRow) for row in good)
    assert isinstance(bad, BadRow)
    assert (bad.where, bad.why) == ("rows.jsonl:4:11", "not UTF-8: byte 0xe9")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt", "json"])
def test_a_file_that_is_something_else_is_named_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100))
    assert "gzip" in refused(path).why
    assert "gunzip" in refused(path).fix
    path.write_bytes(b"PAR1" + bytes(100))
    assert "Parquet" in refused(path).why
    path.write_bytes(bytes(100_000))
    assert "zero" in refused(path).why


def test_a_packed_file_is_refused_with_the_command_that_unpacks_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    assert "gunzip -c rows.jsonl.gz >" in refused(path).fix
    path.write_bytes(b'{"text": "a"}\n')  # a gz that is none
    assert "jsonl" in refused(path).fix


def test_a_file_of_zeros_without_an_end_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "zero" in refused(path).why
    with path.open("r+b") as file:
        file.write(b'{"text": "a"}' + b" " * 5000)
    problem = refused(path)
    assert (problem.where, "longer than 256 MiB" in problem.what) == ("rows.jsonl:1", True)


def test_json_over_several_lines_under_the_name_jsonl_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=2), encoding="utf-8")
    assert "rename it to rows.json" in refused(path).fix


def test_rows_over_several_lines_are_one_bad_row_each_and_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "a"}, {"messages": [{"role": "user", "content": "b\n{"}], "n": [1, 2]}, {"text": "c"}]
    lines = [
        json.dumps(rows[0]),
        json.dumps(rows[1], indent=2),
        json.dumps(rows[2], indent=4),
        json.dumps(rows[0]),
    ]
    path.write_text("\n".join(lines) + '\n{"text": 1,\n{"text": "d"}\n', encoding="utf-8")
    first, talk, text, last, malformed, after = read(path)
    assert [row.place.number for row in (first, talk, text, last, malformed, after)] == [1, 2, 14, 17, 18, 19]
    for row in (talk, text):
        assert isinstance(row, BadRow)
        assert row.why == "the row is printed over several lines, and in this type of file each line is a row"
        assert "jq -c . rows.jsonl > NEW.jsonl" in row.fix
    assert isinstance(malformed, BadRow)
    assert malformed.why.startswith("malformed JSON")
    assert all(isinstance(row, RawRow) for row in (first, last, after))


# A key or a column that stands twice.


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_key_that_appears_twice_with_different_values_makes_a_bad_row(tmp_path: Path, kind: str) -> None:
    rows = [
        '{"text": "a", "text": "a"}', '{"text": "a", "text": "b"}', '{"text": "c", "x": [{"role": 1, "role": 2}]}', '{"text": "d"}',
    ]  # fmt: skip
    path = tmp_path / f"rows.{kind}"
    path.write_text("\n".join(rows) if kind == "jsonl" else f"[{','.join(rows)}]", encoding="utf-8")
    same, text, role, last = read(path)
    assert isinstance(same, RawRow)
    assert isinstance(last, RawRow)
    assert isinstance(text, BadRow)
    assert isinstance(role, BadRow)
    assert "duplicate key 'text'" in text.why
    assert "duplicate key 'role'" in role.why


def test_a_column_that_appears_twice_is_refused_in_a_csv_and_in_parquet(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,text\na,b\n", encoding="utf-8")
    assert "'text' occurs 2 times" in refused(tmp_path / "rows.csv").why
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "rows.parquet")
    assert "'text'" in refused(tmp_path / "rows.parquet").why


def test_a_csv_with_a_different_separator_is_reported_to_have_it(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt;completion\na;b\n", encoding="utf-8")
    assert "separated by ';'" in refused(tmp_path / "rows.csv").what
    (tmp_path / "rows.csv").write_text("prompt\tcompletion\na\tb\n", encoding="utf-8")
    assert "tsv" in refused(tmp_path / "rows.csv").fix


def test_empty_columns_and_blank_lines_of_a_spreadsheet_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\n\ntext,,\na,,\n", encoding="utf-8")
    (row,) = read(tmp_path / "rows.csv")
    assert isinstance(row, RawRow)
    assert (row.value["text"], row.place.number) == ("a", 4)


def test_rows_under_a_key_of_a_json_object_are_refused_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"data": [{"text": "a"}]}', encoding="utf-8")
    assert "under 'data'" in refused(path).what
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}', encoding="utf-8")
    assert len(read(path)) == 1


def write_arrow(path: Path, table: pa.Table) -> Path:
    """As written by Arrow, compressed; the kind follows from the suffix."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        with pa.ipc.new_file(
            str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as file:
            file.write_table(table)
    assert path.stat().st_size < 100_000
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_value_that_unfolds_beyond_the_limit_is_a_bad_row_with_its_size(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_LINE_LIMIT", 1_000_000)
    table = pa.table({"text": ["a", "b" * 3_000_000, "c"]})
    first, long, last = read(write_arrow(tmp_path / f"rows.{suffix}", table))
    assert isinstance(long, BadRow)
    assert long.why == "text has 3 MB; the maximum is 1 MB"
    assert [row.value for row in (first, last) if isinstance(row, RawRow)] == [{"text": "a"}, {"text": "c"}]


# A process of its own: memory that a long test process has mapped and freed would be used again
# within the limit.
_LIMITED = """
import resource, sys
from pathlib import Path
from unisono.trainer.data import RowFile, readers
from unisono.base.errors import DataError

readers._ARROW_BYTES = 100 << 20
path = Path(sys.argv[1])
before = resource.getrlimit(resource.RLIMIT_AS)
try:
    rows = list(readers.read_rows(RowFile(path, path.name, readers.kind_of(path.name))))
except DataError as error:
    (problem,) = error.problems
    print(problem.what, problem.why, resource.getrlimit(resource.RLIMIT_AS) == before, sep="\\n")
"""


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("nested", [False, True])
def test_few_bytes_that_unfold_into_gigabytes_are_refused_within_memory(
    tmp_path: Path, suffix: str, *, nested: bool
) -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 30), pa.array(["a" * 10_000_000]))
    column = pa.array([["a" * 10_000_000] * 30]) if nested else values
    if nested and suffix == "arrow":
        column = pa.ListArray.from_arrays(pa.array([0, 30], pa.int32()), values)
    path = write_arrow(tmp_path / f"rows.{suffix}", pa.table({"text": column}))
    process = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True, check=True
    )
    what, why, same_limit = process.stdout.splitlines()
    assert what == f"rows.{suffix} needs too much memory"
    assert "128 of its rows need more than 105 MB" in why
    assert same_limit == "True"


def test_one_batch_of_an_arrow_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_ARROW_BYTES", 300 << 20)
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000), pa.array(["a" * 1_000_000]))
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), pa.schema([("text", values.type)])) as file:
        file.write_table(pa.table({"text": values}), max_chunksize=2_000)  # two gigabytes as one list of rows
    rows = read_rows(RowFile(tmp_path / "rows.arrow", "rows.arrow", "arrow"))
    assert sum(isinstance(row, RawRow) for row in rows) == 2_000


@pytest.mark.parametrize("kind", ["csv", "txt", "jsonl"])
def test_a_line_without_an_end_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LINE_LIMIT", 1 << 20)
    (tmp_path / f"rows.{kind}").write_bytes(b"text\n" + b"a" * (1 << 20) + b"b")
    assert refused(tmp_path / f"rows.{kind}").what == f"line 2 of rows.{kind} is longer than 1 MiB"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([2**30], pa.date32()), "date32"), (pa.array([2**62], pa.duration("s")), "duration"),
        (pa.array([b"\xff"]).view(pa.string()), "string"), (pa.array([5], pa.timestamp("ms", tz="No/Where")), "timestamp"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_that_python_cannot_read_is_named(
    tmp_path: Path, values: Any, kind: str, suffix: str
) -> None:
    table, path = pa.table({"text": ["a"], "when": values}), tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    problem = refused(path)
    assert "the column when" in problem.what
    assert kind in problem.why


@pytest.mark.parametrize("content", [b"", b"PAR1" + bytes(100) + b"PAR1", b'{"text": "a"}\n', b"x" * 1000])
def test_a_broken_parquet_file_is_not_blamed_on_permissions(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.parquet").write_bytes(content)
    problem = refused(tmp_path / "rows.parquet")
    assert "as parquet" in problem.what
    assert "permissions" not in problem.fix
    assert ("JSON" in problem.fix) == content.startswith(b"{")


# Whatever a file holds, there is an answer with a place.

_pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"\n", b'"', b",", b"{", b"}", b"[", b"]", b'{"text": "a"}\n', b'{"messages": [{"role": "user"}]}\n', b"text\n", b"\x00", b"\xff\xfe", b"ARROW1\x00\x00", b"PAR1"]),
)  # fmt: skip


@pytest.mark.parametrize("kind", sorted(READERS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(_pieces, max_size=12))
def test_arbitrary_bytes_never_crash_a_reader(tmp_path: Path, kind: str, parts: list[bytes]) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(b"".join(parts))
    try:
        for row in read(path):
            assert str(row.place).startswith(f"rows.{kind}")
            assert isinstance(row, RawRow) or row.why
    except DataError as error:
        assert all(problem.where.startswith(f"rows.{kind}") for problem in error.problems)  # noqa: PT017 - either is right


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "from",
                    "value",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "type",
                    "text",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
_names = st.sampled_from([
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "system", "text", "tools", "other",
])  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(row=st.dictionaries(_names, _json, max_size=6), name=st.sampled_from(sorted(COLUMNS)))
def test_arbitrary_json_never_crashes_a_format(row: dict[str, Any], name: FormatName) -> None:
    found = detect(row, {})
    assert found is None or found[0] in COLUMNS
    try:
        to_example(name, row, {})
    except RowError as error:
        assert error.why  # noqa: PT017 - either outcome is right

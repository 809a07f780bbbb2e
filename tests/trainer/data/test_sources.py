"""Sources: paths, globs, URLs, hub ids, lists; what cannot be had is refused with the remedy.

Run: .venv/bin/python -m pytest tests/trainer/data/test_sources.py
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest

from unisono.base.errors import DataError, Problem
from unisono.trainer.config.data_sections import DataSection, SourceSection
from unisono.trainer.data import RawRow
from unisono.trainer.data.readers import read_rows
from unisono.trainer.data.sources import RowSource, fetch_hub, find_sources


def find(tmp_path: Path, train: Any, **more: Any) -> list[RowSource]:
    return find_sources(DataSection.model_validate({"train": train, **more}), cache_dir=tmp_path / "cache")


def texts(source: RowSource) -> list[object]:
    rows = [row for file in source.files for row in read_rows(file)]
    return [row.value["text"] for row in rows if isinstance(row, RawRow)]


def write(path: Path, *lines: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_a_glob_gives_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / "deep" / f"{name}.jsonl", name)
    (source,) = find(tmp_path, str(tmp_path / "**" / "*.jsonl"))
    assert texts(source) == ["a", "b", "c"]


def test_a_name_with_a_bracket_is_a_file_if_there_is_one(tmp_path: Path) -> None:
    (source,) = find(tmp_path, write(tmp_path / "rows[1].jsonl", "a"))
    assert texts(source) == ["a"]


def test_a_list_has_strings_and_sections_and_the_format_of_the_whole(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.jsonl", "a"), write(tmp_path / "2.jsonl", "b")
    train = [one, {"path": two, "format": "alpaca", "weight": 2}]
    sources = find(tmp_path, train, format="text", eval=one)
    assert [(s.section.path, s.section.format, s.section.weight, s.role) for s in sources] == [
        (one, "text", 1.0, "train"), (two, "alpaca", 2.0, "train"), (one, "text", 1.0, "eval"),
    ]  # fmt: skip


def test_every_source_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    train = [str(tmp_path / "no.jsonl"), str(tmp_path / "*.csv"), str(tmp_path / "folder")]
    with pytest.raises(DataError) as caught:
        find(tmp_path, train, eval="nowhere.parquet")
    assert [(problem.where, bool(problem.fix)) for problem in caught.value.problems] == [
        ("data.train.0", True), ("data.train.1", True), ("data.train.2", True), ("data.eval", True),
    ]  # fmt: skip


def test_a_directory_is_all_its_files_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json", "c.jsonl", ".hidden.csv"):
        write(tmp_path / "rows" / name, name)
    (source,) = find(tmp_path, str(tmp_path / "rows"))
    assert texts(source) == ["a.json", "b.jsonl", "c.jsonl"]
    assert source.files[0].name == str(tmp_path / "rows" / "a.json")


def test_a_directory_without_files_or_with_several_types_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    assert refusal(tmp_path, tmp_path / "rows").why == "it is empty"
    write(tmp_path / "rows" / "a.jsonl", "a")
    write(tmp_path / "rows" / "b.csv", "b")
    found = refusal(tmp_path, tmp_path / "rows")
    assert "a.jsonl and" in found.why
    assert "/rows/*.jsonl" in found.fix


def test_a_subset_is_refused_for_what_is_not_a_hub_dataset(tmp_path: Path) -> None:
    section = SourceSection(path=write(tmp_path / "rows.jsonl", "a"), subset="en")
    with pytest.raises(DataError, match="not a hub dataset") as caught:
        find(tmp_path, [section])
    assert caught.value.problems[0].where == "data.train.0.subset"


def refusal(tmp_path: Path, train: Path | str) -> Problem:
    with pytest.raises(DataError) as caught:
        find(tmp_path, str(train))
    (problem,) = caught.value.problems
    assert problem.where == "data.train"
    assert problem.fix
    return problem


def test_what_is_not_a_regular_file_is_called_what_it_is_and_never_opened(tmp_path: Path) -> None:
    pipe, loop, broken, name = (
        tmp_path / n for n in ("pipe.jsonl", "loop.jsonl", "broken.jsonl", "socket.jsonl")
    )
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    broken.symlink_to(tmp_path / "gone.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(name))
        printed = {
            path: refusal(tmp_path, path) for path in (pipe, loop, broken, name, "/dev/zero", "/dev/null")
        }
    assert "is a named pipe (FIFO)" in printed[pipe].what
    assert "a symbolic link loop" in printed[loop].what
    assert f"symbolic link to {tmp_path / 'gone.jsonl'}, which does not exist" in printed[broken].why
    assert "is a socket" in printed[name].what
    assert "is a character device" in printed["/dev/zero"].what
    assert "is a character device" in printed["/dev/null"].what


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("x" * 300 + ".jsonl", "File name too long"), ("a\0b.jsonl", "null"), ("rows.jsonl/more.jsonl", "Not a directory"),
        ("~nobody-of-this-name/rows.jsonl", "there is no file"), ("a/**b/*.jsonl", "**"), ("rows", "holds files only"),
    ],
)  # fmt: skip
def test_a_path_that_cannot_be_is_refused_with_the_reason(tmp_path: Path, named: str, words: str) -> None:
    write(tmp_path / "rows.jsonl", "a")
    (tmp_path / "rows" / "inner").mkdir(parents=True)
    problem = refusal(tmp_path, named if named.startswith("~") else f"{tmp_path}/{named}")
    assert words in problem.what + problem.why


def test_a_glob_reports_what_it_did_match_where_that_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").mkdir()
    problem = refusal(tmp_path, tmp_path / "*.jsonl")
    assert "named pipe" in problem.why
    assert "directory" in problem.why


@pytest.fixture
def as_user() -> Iterator[Path]:
    """A folder that everybody may enter, while this process is a user who may not read
    everything.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        if os.geteuid() != 0:
            yield Path(folder)
            return
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


def test_a_folder_without_permission_is_reported(as_user: Path) -> None:
    write(as_user / "closed" / "rows.jsonl", "a")
    (as_user / "closed").chmod(0)
    try:
        assert "Permission denied" in refusal(as_user, as_user / "closed" / "rows.jsonl").why
    finally:
        (as_user / "closed").chmod(0o700)


# URLs.


def test_a_url_is_downloaded_once_and_again_when_it_changed(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    for text in ("a", "a", "b"):
        if text == "b" or not fs.exists("/rows/train.jsonl"):
            fs.pipe("/rows/train.jsonl", json.dumps({"text": text}).encode())
        (source,) = find(tmp_path, "memory://rows/train.jsonl")
        assert texts(source) == [text]
        assert source.files[0].name == "memory://rows/train.jsonl"
    fs.rm("/rows", recursive=True)
    with pytest.raises(DataError, match="there is no memory://"):
        find(tmp_path, "memory://rows/train.jsonl")


def test_a_url_may_have_a_star(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    for name in ("2", "1"):
        fs.pipe(f"/many/{name}.jsonl", json.dumps({"text": name}).encode())
    (source,) = find(tmp_path, "memory://many/*.jsonl")
    assert texts(source) == ["1", "2"]
    fs.rm("/many", recursive=True)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    (source,) = find(tmp_path, "file://" + write(tmp_path / "rows.jsonl", "a"))
    assert texts(source) == ["a"]


@pytest.mark.parametrize(
    ("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs"), ("sftp", "paramiko")]
)
def test_scheme_without_its_package_is_refused_with_the_install_command(
    tmp_path: Path, scheme: str, package: str
) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"needs a machine without {package}")
    with pytest.raises(DataError, match=f"needs the package {package}") as caught:
        find(tmp_path, f"{scheme}://bucket/rows.jsonl")
    assert caught.value.problems[0].fix == f"pip install {package}"


def test_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown scheme") as caught:
        find(tmp_path, "htps://example.org/rows.jsonl")
    assert "https" in caught.value.problems[0].fix


# The hub.


def test_a_hub_dataset_is_written_once_and_then_needs_no_datasets(tmp_path: Path) -> None:
    """`datasets` takes a folder `owner/name` below the working directory for the hub's dataset of
    that name.
    """
    write(tmp_path / "owner" / "name" / "train.jsonl", "a", "b")
    write(tmp_path / "owner" / "name" / "test.jsonl", "c")
    cache = tmp_path / "cache"
    cache.mkdir()
    script = (
        "import sys; from pathlib import Path; from unisono.trainer.config.data_sections import SourceSection; from"
        " unisono.trainer.data.sources import fetch_hub\nfor splits in (['train'], ['validation', 'test']):\n   "
        f" print(fetch_hub(SourceSection(path='owner/name'), 'data.train', Path({str(cache)!r}),"
        " splits=splits)[0].name)\nprint('datasets' in sys.modules)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    for folder, needed in ((tmp_path, "True"), (cache, "False")):  # the second has no such folder
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == ["owner/name:train", "owner/name:test", needed], done.stderr
    section = SourceSection(path="owner/name")
    files = fetch_hub(section, "data.train", cache, splits=["train"])
    assert texts(RowSource(section, files)) == ["a", "b"]


def test_a_subset_and_a_folder_of_a_hub_dataset_are_downloads_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "owner" / "name"
    for name, text in (("en/train", "a"), ("de/train", "b"), ("more/train", "c")):
        write(root / f"{name}.jsonl", text)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("en", "de"))
    (root / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    script = (
        "from pathlib import Path; from unisono.trainer.config.data_sections import SourceSection; from"
        " unisono.trainer.data.sources import fetch_hub\nfrom unisono.trainer.data.readers import read_rows\nfor more in"
        " ({'subset': 'de'}, {'subset': 'en'}, {'folder': 'more'}):\n    (file,) ="
        f" fetch_hub(SourceSection(path='owner/name', **more), 'data.train', Path({str(tmp_path)!r}),"
        " splits=['train'])\n    print(*(row.value['text'] for row in read_rows(file)))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["b", "a", "c"], done.stderr


def test_a_hub_id_that_is_not_to_be_had_is_refused(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from unisono.trainer.config.data_sections import DataSection; from unisono.trainer.data.sources"
        " import find_sources\nfrom unisono.base.errors import DataError\ntry:\n   "
        f" find_sources(DataSection(train='nobody/nothing'), cache_dir=Path({str(tmp_path)!r}))\nexcept"
        " DataError as error:\n    print(error.problems[0].what); print(error.problems[0].where)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "nobody/nothing is neither a file on this machine nor an accessible dataset of the hub",
        "data.train",
    ], done.stderr
    silent = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | silent, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("nobody/nothing is neither a file on this machine nor can it be downloaded")
    assert "Retrying" not in done.stderr

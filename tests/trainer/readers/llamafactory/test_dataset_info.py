"""LLaMA-Factory's dataset_info.json gives the sources that LLaMA-Factory would read, or every
problem with file and line.

Run: pytest tests/trainer/readers/llamafactory/test_dataset_info.py
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.errors import ConfigError, Problem
from unisono.trainer.config.data_sections import SourceSection, TagsSection
from unisono.trainer.readers.llamafactory.dataset_info import key_lines, read_datasets

OFF = {"history": None, "system": None, "tools": None}
TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.json").write_text("[]")
    monkeypatch.chdir(tmp_path)


def write(entries: Any) -> None:
    Path("data/dataset_info.json").write_text(
        entries if isinstance(entries, str) else json.dumps(entries, indent=2)
    )


def read(
    *names: str, stage: str = "sft", max_samples: int | None = None, **options: Any
) -> list[dict[str, Any]]:
    return read_datasets(names, "data", where="lf.yaml:7", stage=stage, max_samples=max_samples, **options)


def problems(*names: str, stage: str = "sft") -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        read(*names, stage=stage)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def source(
    entry: dict[str, Any], *, stage: str = "sft", options: dict[str, bool] | None = None
) -> dict[str, Any]:
    write({"d": {"file_name": "rows.json"} | entry})
    (found,) = read("d", stage=stage, **(options or {}))
    return found


def test_an_entry_without_columns_has_the_default_ones() -> None:
    assert source({}) == {"path": "data/rows.json", "format": "alpaca", "columns": OFF}
    assert source({"formatting": "sharegpt"}) == {
        "path": "data/rows.json", "format": "sharegpt", "columns": {"messages": None, "system": None, "tools": None}, "tags": TAGS,
    }  # fmt: skip


def test_naming_one_column_switches_the_others_off() -> None:
    assert source({"columns": {"prompt": "text"}})["columns"] == {
        "instruction": "text", "input": None, "output": None, **OFF,
    }  # fmt: skip
    assert source({"columns": {"prompt": "instruction", "query": "input", "response": "output", "system": "s"}})["columns"] == {
        "history": None, "tools": None, "system": "s",
    }  # fmt: skip


def test_naming_one_tag_switches_the_others_off() -> None:
    four = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    found = source({"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": four})
    assert found["tags"] == four | dict.fromkeys(("observation_tag", "function_tag", "system_tag"))
    assert found["columns"] == {"conversations": "messages", "messages": None, "system": None, "tools": None}


def test_every_source_fits_our_schema_and_default_tags_are_its_defaults() -> None:
    for entry in ({}, {"formatting": "sharegpt"}, {"formatting": "openai"}, {"num_samples": 9}):
        SourceSection.model_validate(source(entry))
    assert TagsSection().model_dump() == TAGS


def test_rows_are_limited_by_the_file_and_by_the_entry() -> None:
    write({"d": {"file_name": "rows.json", "num_samples": 50}})
    (found,) = read("d", max_samples=20)
    assert (found["samples"], found["rows"]) == (50, 20)


def test_names_may_have_spaces_and_count_once() -> None:
    write({"a": {"file_name": "rows.json"}, "b": {"file_name": "rows.json", "columns": {"prompt": "text"}}})
    assert [len(entry["columns"]) for entry in read("a", " b", "a ")] == [3, 6]


def test_a_hub_dataset_has_its_subset_split_and_folder() -> None:
    found = source(
        {"hf_hub_url": "org/name", "subset": "en", "folder": "f", "script_url": "x", "cloud_file_name": "y"}
    )
    assert {key: found[key] for key in ("path", "subset", "folder", "split")} == {
        "path": "org/name", "subset": "en", "folder": "f", "split": "train",
    }  # fmt: skip
    assert source({"hf_hub_url": "org/name", "split": "test"})["split"] == "test"


def test_other_hubs_are_refused_unless_there_is_one_that_we_read() -> None:
    entry = {"hf_hub_url": "org/name", "ms_hub_url": "ms/name", "om_hub_url": "om/name"}
    assert source(entry)["path"] == "org/name"
    for option, url in (("use_modelscope", "ms_hub_url"), ("use_openmind", "om_hub_url")):
        with pytest.raises(ConfigError) as caught:
            source(entry, options={option: True})
        assert caught.value.problems[0].where == f"data/dataset_info.json:{[*entry].index(url) + 4}"
    write({"d": {"ms_hub_url": "ms/name", "file_name": "rows.json"}})
    assert "ModelScope" in problems("d")[0].what


def test_an_unknown_name_hides_no_problem_of_the_others() -> None:
    write({"d": {"file_name": "rows.json", "formating": "alpaca"}})
    with pytest.raises(ConfigError) as caught:
        read("other", "d")
    assert [problem.where for problem in caught.value.problems] == ["lf.yaml:7", "data/dataset_info.json:4"]


def test_online_names_are_hub_ids() -> None:
    (found,) = read_datasets(["org/name"], "ONLINE", where="x:1", stage="sft", max_samples=None)
    assert found == {"path": "org/name", "format": "alpaca", "columns": OFF, "split": "train"}


REMOTE = """
from unisono.trainer.readers.llamafactory.dataset_info import read_datasets
from unisono.base.errors import ConfigError
try:
    print(read_datasets(["d"], "REMOTE:org/repo", where="x:1", file_where="x:2", stage="sft", max_samples=None)[0]["path"])
except ConfigError as error:
    print(error.problems)
"""


@contextmanager
def hub(answer: Callable[[bytes], bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Its address, and all requests, each with `answer` as its answer; without one the connection
    is closed.
    """
    calls: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):  # closed at the end
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    calls.append(connection.recv(1 << 16))
                    connection.sendall(answer(calls[-1]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", calls


def remote(cache: Path, endpoint: str, **env: str) -> str:
    """What is read, or the problems, in a process of its own: the hub's client reads the
    environment when it is imported.
    """
    variables = {
        "HF_HUB_CACHE": str(cache),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", REMOTE], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def answer_with(entry: dict[str, str]) -> Callable[[bytes], bytes]:
    """The answers of a hub whose dataset_info.json has this entry."""
    text = json.dumps({"d": entry}).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(text)}\r\nETag:"
        f' "{"a" * 40}"\r\nX-Repo-Commit: {"b" * 40}\r\n\r\n'
    ).encode()

    def answer(asked: bytes) -> bytes:
        if b"/datasets/org/repo/" not in asked.split(b"\r\n")[0]:
            return b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        return head if asked.startswith(b"HEAD") else head + text

    return answer


@pytest.mark.parametrize("key", ["file_name", "hf_hub_url"])
def test_a_file_of_the_hub_names_no_file_of_this_machine(key: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text("{}\n")
    for name in (str(secret), "../" * 20 + str(secret)[1:]):
        with hub(answer_with({key: name})) as (endpoint, _):
            printed = remote(tmp_path / f"hub{len(name)}", endpoint)
        assert f"{key} of the dataset d is not used" in printed
        assert "is not a relative path without `..`" in printed


def test_remote_directory_is_a_hub_dataset_and_is_kept_in_its_cache(tmp_path: Path) -> None:
    with hub(answer_with({"hf_hub_url": "org/rows"})) as (endpoint, calls):
        assert remote(tmp_path / "hub", endpoint) == "org/rows"
        assert calls
    assert remote(tmp_path / "hub", endpoint) == "org/rows"  # nobody answers there now
    assert remote(tmp_path / "hub", endpoint, HF_HUB_OFFLINE="1") == "org/rows"


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    """Its client would ask six times for the file, in half a minute."""
    with hub(lambda _: b"") as (endpoint, calls):
        said = remote(tmp_path / "hub", endpoint)
        assert calls[0].startswith(b"HEAD / ")
        assert "HF_HUB_OFFLINE turns access to the hub off" in remote(
            tmp_path / "hub", endpoint, HF_HUB_OFFLINE="1"
        )
        assert not any(b"/datasets/" in asked for asked in calls)
    assert f"{endpoint} does not answer" in said
    assert "where='x:2'" in said
    assert "set dataset_dir to a directory" in said


def test_a_cloud_file_is_a_url_and_goes_before_a_file() -> None:
    assert source({"cloud_file_name": "s3://b/rows.jsonl"})["path"] == "s3://b/rows.jsonl"
    write({"d": {"cloud_file_name": "https://b/rows.jsonl"}})
    assert "not a URL of a cloud storage" in problems("d")[0].what


def test_a_directory_is_a_source() -> None:
    Path("data/many").mkdir()
    assert source({"file_name": "many"})["path"] == "data/many"


def test_pretraining_takes_the_text_of_prompt_and_query() -> None:
    assert source({"columns": {"prompt": "body"}}, stage="pt") == {
        "path": "data/rows.json", "format": "text", "columns": {"text": "body"},
    }  # fmt: skip
    assert source({}, stage="pt")["columns"] == {"text": "instruction", "input": "input"}


def test_pairs_and_labels_are_preferences() -> None:
    pairs = {"prompt": "instruction", "query": "input", "chosen": "good", "rejected": "bad"}
    found = source({"ranking": True, "columns": pairs}, stage="dpo")
    assert found["format"] == "preference"
    assert found["columns"] == {
        "conversations": None, "messages": None, **OFF, "chosen": "good", "rejected": "bad", "label": None,
    }  # fmt: skip
    turns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    found = source({"ranking": True, "formatting": "sharegpt", "columns": turns}, stage="rm")
    assert found["columns"]["instruction"] is None
    assert found["tags"] == TAGS
    label = {"messages": "messages", "kto_tag": "label"}
    found = source({"formatting": "sharegpt", "columns": label}, stage="kto")
    assert (found["format"], found["columns"]["label"], found["columns"]["chosen"]) == (
        "preference",
        "label",
        None,
    )


@pytest.mark.parametrize(
    ("entry", "stage", "key", "words"),
    [
        ({"ranking": True, "columns": {"prompt": "p", "chosen": "c", "rejected": "r"}}, "sft", "ranking", "has pairs"),
        ({"ranking": True, "columns": {"prompt": "p", "chosen": "c", "rejected": "r"}}, "kto", "ranking", "has pairs"),
        ({}, "rm", "", "has no pairs"),
        ({}, "dpo", "", "has no pairs"),
        ({}, "kto", "", "has no kto_tag"),
        ({"columns": {"prompt": "p", "kto_tag": "label"}}, "sft", "kto_tag", "has a kto_tag"),
        ({"ranking": True}, "rm", "", "without the columns chosen and rejected"),
        ({"columns": {"response": "r"}}, "sft", "columns", "neither prompt nor query"),
        ({"formatting": "sharegpt", "columns": {"system": "s"}}, "sft", "columns", "no column of messages"),
        ({"formatting": "sharegpt", "tags": {"user_tag": "u"}}, "sft", "tags", "no role_tag"),
        ({"formatting": "sharegpt"}, "pt", "formatting", "stage is pt"),
        ({"formatting": "sharegtp"}, "sft", "formatting", "'sharegtp'"),
        ({"columns": {"promt": "p"}}, "sft", "promt", "unknown key `columns.promt`"),
        ({"columns": {"prompt": "p", "videos": "videos"}}, "sft", "videos", "text and pictures only"),
        ({"columns": {"prompt": "p", "images": "images"}}, "pt", "images", "stage is pt"),
        ({"tags": {"roletag": "p"}}, "sft", "roletag", "unknown key `tags.roletag`"),
        ({"colums": {}}, "sft", "colums", "unknown key `colums`"),
        ({"num_samples": 0}, "sft", "num_samples", "is 0"),
        ({"num_samples": True}, "sft", "num_samples", "a boolean, not a whole number"),
        ({"ranking": "yes"}, "sft", "ranking", "text, not true or false"),
        ({"columns": ["a"]}, "sft", "columns", "a list, not an object"),
        ({"script_url": "load.py"}, "sft", "script_url", "a loading script"),
        ({"file_name": "no.json"}, "sft", "file_name", "there is no file data/no.json"),
        ({"file_name": "dataset_info"}, "sft", "file_name", "there is no file"),
        ({"split": "test"}, "sft", "split", "the split 'test' of a file"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_entry_is_told_with_its_line(
    entry: dict[str, Any], stage: str, key: str, words: str
) -> None:
    text = json.dumps({"other": {}, "d": {"file_name": "rows.json"} | entry}, indent=1)
    write(text)
    found = problems("d", stage=stage)
    assert words in found[0].what
    name, _, number = found[0].where.rpartition(":")
    assert name == "data/dataset_info.json"
    assert f'"{key or "d"}"' in text.splitlines()[int(number) - 1]


def test_all_problems_of_all_entries_are_told_at_once() -> None:
    write({"a": {"file_nam": "x"}, "b": [], "c": {}, "d": {"file_name": "rows.json", "rankin": True}})
    found = problems("a", "b", "c", "d")
    assert [problem.where.rpartition(":")[2] for problem in found] == ["3", "5", "6", "9"]
    assert "did you mean `file_name`?" in found[0].fix
    assert "has no source" in found[2].what


def test_a_name_that_is_not_in_it_is_answered_with_the_nearest() -> None:
    write({"identity": {"file_name": "rows.json"}, "alpaca_en_demo": {"file_name": "rows.json"}})
    found, other = problems("identty", "zzz")
    assert (found.where, found.fix) == ("lf.yaml:7", "did you mean `identity`?")
    assert "identity, alpaca_en_demo" in other.why


def test_a_credential_anywhere_in_the_file_is_refused_without_showing_it() -> None:
    write({"a": {"file_name": "rows.json"}, "b": {"cloud_file_name": "s3://user:secretword@b/rows.jsonl"}})
    (found,) = problems("a")
    assert found.where == "data/dataset_info.json:6"
    assert "secretword" not in str(found)


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("[]", ":1", "it is a list"),
        ("3", ":1", "it is a number"),
        ('{"a": {},\n "b" {}}', ":2:6", "delimiter"),
        ("[" * 200 + "]" * 200, ":1", "levels"),
        ("", ":1:1", "Expecting value"),
    ],
)
def test_a_file_that_is_no_object_is_refused(text: str, where: str, words: str) -> None:
    write(text)
    (found,) = problems("a")
    assert found.where == f"data/dataset_info.json{where}"
    assert words in found.why


def test_a_missing_file_is_told_at_the_place_that_names_it() -> None:
    (found,) = problems("a")
    assert (found.what, found.where) == ("there is no file data/dataset_info.json", "lf.yaml:7")
    os.mkfifo("data/dataset_info.json")
    assert "named pipe" in problems("a")[0].what


def test_bytes_that_are_not_utf8_are_refused() -> None:
    Path("data/dataset_info.json").write_bytes(b'{"a": "\xff"}')
    assert "not UTF-8" in problems("a")[0].what


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(
    tree=st.dictionaries(st.text(max_size=5), trees, max_size=4),
    indent=st.sampled_from([None, 1, "\t"]),
    ascii_only=st.booleans(),
)
def test_every_key_of_a_json_text_has_the_line_on_which_it_is(
    *, tree: dict[str, Any], indent: int | str | None, ascii_only: bool
) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_only)
    lines = text.split("\n")

    def keys(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
        if isinstance(value, list):
            return set().union(*(keys(inner, (*path, i)) for i, inner in enumerate(value)))
        if not isinstance(value, dict):
            return set()
        return {(*path, k) for k in value}.union(*(keys(inner, (*path, k)) for k, inner in value.items()))

    found = key_lines(text)
    assert found.keys() == keys(tree)
    for path, line in found.items():
        assert json.dumps(path[-1], ensure_ascii=ascii_only) + ":" in lines[line - 1]

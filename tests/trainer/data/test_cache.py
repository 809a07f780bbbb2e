"""The cache: a second start maps the table quickly, a change is named, and a table is whole or not
there.

Run: .venv/bin/python -m pytest tests/trainer/data/test_cache.py
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from unisono.base.errors import DataError, UnfitError
from unisono.base.events import Reporter
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data.prepare import prepare_data, writing_table
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.data.tokenizer import RunTokenizer
from unisono.trainer.plan import DataSummary

TokenizerDir = Callable[..., Path]

PREPARE = """
import json, sys
from pathlib import Path
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data.prepare import prepare_data
from unisono.base.events import Reporter
config = RunConfig.model_validate(json.loads(sys.argv[1]))
summary = prepare_data(config, tokenizer=Path(sys.argv[2]), vocab_size=10000, cache_dir=Path(sys.argv[3]), report=Reporter(None))
heavy = sorted({"torch", "transformers", "datasets", "tokenizers"} & set(sys.modules))
print(json.dumps([summary.cache_dir, summary.cache_hit, heavy]))
"""


def write(path: Path, n: int = 4) -> dict[str, Any]:
    path.write_text(
        "".join(json.dumps({"prompt": f"q{i}", "completion": "a"}) + "\n" for i in range(n)), encoding="utf-8"
    )
    return {"train": str(path)}


def body(data: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "data": data, "output_dir": "o", **more}


def prepare(data: dict[str, Any], tokenizer: Path, folder: Path, **more: Any) -> DataSummary:
    config = RunConfig.model_validate(body(data, **more))
    return prepare_data(
        config, tokenizer=tokenizer, vocab_size=10_000, cache_dir=folder / "cache", report=Reporter(None)
    )


def test_the_second_start_is_a_hit_with_the_same_summary(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl")
    first, second = (prepare(data, tokenizer_dir(), tmp_path) for _ in range(2))
    assert (first.cache_hit, second.cache_hit) == (False, True)
    assert first.cache_reason == "first use of these sources"
    assert second == first.model_copy(update={"cache_hit": True, "cache_reason": second.cache_reason})


def test_what_does_not_shape_rows_does_not_make_a_new_table(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    data = write(tmp_path / "rows.jsonl")
    prepare(data, tokenizer_dir(), tmp_path)
    assert prepare(
        data, tokenizer_dir(), tmp_path, duration="9 steps", seed=5, batch={"global": 2}, restarts=0
    ).cache_hit


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_length": 64}, "data.max_length was 1024, is 64"),
        ({"packing": False}, "data.packing was True, is False"),
        ({"eval": 0.5}, "data.eval was None, is 0.5"),
    ],
)
def test_a_changed_setting_is_named(
    tokenizer_dir: TokenizerDir, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    data = write(tmp_path / "rows.jsonl")
    prepare(data, tokenizer_dir(), tmp_path)
    summary = prepare(data | change, tokenizer_dir(), tmp_path)
    assert not summary.cache_hit
    assert reason in summary.cache_reason


def test_changed_bytes_are_named_by_their_file(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl")
    prepare(data, tokenizer_dir(), tmp_path)
    write(tmp_path / "rows.jsonl", 5)
    assert (
        f"the file {tmp_path / 'rows.jsonl'} (source 1) changed"
        in prepare(data, tokenizer_dir(), tmp_path).cache_reason
    )


def test_a_changed_tokenizer_or_template_is_named(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl") | {"template": str(tmp_path / "t.jinja")}
    shutil.copy(Path(__file__).parent / "templates" / "marked.jinja", tmp_path / "t.jinja")
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir(), tokenizer)
    prepare(data, tokenizer, tmp_path)
    (tokenizer / "chat_template.jinja").write_text("{# other #}", encoding="utf-8")
    assert prepare(data, tokenizer, tmp_path).cache_reason == "the tokenizer's chat_template.jinja changed"
    shutil.copy(Path(__file__).parent / "templates" / "chatml_tools.jinja", tmp_path / "t.jinja")
    assert prepare(data, tokenizer, tmp_path).cache_reason == "data.template changed"


def _as_model(tokenizer: Path, folder: Path, model_type: str) -> Path:
    """A model's folder with the tokenizer's files, byte for byte, and a config.json of this
    type.
    """
    shutil.copytree(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return folder


def test_models_of_other_types_share_no_rows_despite_equal_tokenizer_files(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    """transformers chooses the class by model_type, and Qwen2's brings its own pre-tokenizer, which
    separates digits.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1234 won't", "completion": "56789"}) + "\n", encoding="utf-8")
    data = {"train": str(rows)}
    models = [_as_model(tokenizer_dir(), tmp_path / name, name) for name in ("llama", "qwen2")]
    llama, qwen = (prepare(data, model, tmp_path) for model in models)
    assert not qwen.cache_hit
    assert "the loaded tokenizer's class was TokenizersBackend, is Qwen2Tokenizer" in qwen.cache_reason
    assert qwen.train.tokens > llama.train.tokens
    assert qwen.tokenizer_digest == llama.tokenizer_digest
    assert qwen.tokenizer_traits != llama.tokenizer_traits
    for model, first in zip(models, (llama, qwen), strict=True):
        loaded = AutoTokenizer.from_pretrained(model)
        table = TokenTable.open(Path(first.cache_dir), "train")
        assert table.row(0)[0].tolist() == loaded(loaded.decode(table.row(0)[0])).input_ids
        assert prepare(data, model, tmp_path).cache_hit


def test_a_config_that_changes_no_token_does_not_make_a_new_table(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    data = write(tmp_path / "rows.jsonl")
    hits = [
        prepare(data, _as_model(tokenizer_dir(), tmp_path / name, name), tmp_path).cache_hit
        for name in ("llama", "mistral")
    ]
    assert hits == [False, True]


def test_tokenizer_traits_are_found_anew_after_changes_transformers_sees(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    tokenizer = _as_model(tokenizer_dir(), tmp_path / "model", "llama")

    def traits() -> dict[str, str]:
        return RunTokenizer(tokenizer, trust_remote_code=False, cache_dir=tmp_path).traits()

    first = traits()
    assert traits() == first
    assert len(list((tmp_path / "tokenizers").iterdir())) == 1
    (tokenizer / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")
    changed = {name for name, value in traits().items() if first[name] != value}
    assert {"class", "pre-tokenizer", "encoding of a probe text"} <= changed
    (tokenizer / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    body = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    body["normalizer"] = {"type": "Lowercase"}
    (tokenizer / "tokenizer.json").write_text(json.dumps(body), encoding="utf-8")
    changed = {name for name, value in traits().items() if first[name] != value}
    assert changed == {"normalizer", "encoding of a probe text"}


def test_the_digest_is_of_the_rows_and_not_of_their_path(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    here, there = (
        prepare(write(tmp_path / name), tokenizer_dir(), tmp_path) for name in ("here.jsonl", "there.jsonl")
    )
    other = prepare(write(tmp_path / "here.jsonl", 5), tokenizer_dir(), tmp_path)
    assert here.digest == there.digest != other.digest


@pytest.mark.parametrize("damage", ["cut", "remove", "meta"])
def test_a_damaged_table_is_built_again(tokenizer_dir: TokenizerDir, tmp_path: Path, damage: str) -> None:
    data = write(tmp_path / "rows.jsonl")
    first = prepare(data, tokenizer_dir(), tmp_path)
    tokens = Path(first.cache_dir) / "tokens.arrow"
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-8])
    elif damage == "remove":
        tokens.unlink()
    else:
        (Path(first.cache_dir) / "meta.json").write_text("{", encoding="utf-8")
    again = prepare(data, tokenizer_dir(), tmp_path)
    assert not again.cache_hit
    assert "damaged" in again.cache_reason
    assert TokenTable.open(Path(again.cache_dir), "train").rows == 4
    assert prepare(data, tokenizer_dir(), tmp_path).cache_hit


def test_a_refused_or_broken_build_leaves_nothing(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl")
    with pytest.raises(DataError):
        prepare(data | {"max_length": 8}, tokenizer_dir(), tmp_path)
    target = tmp_path / "cache" / "tables" / "key"
    with pytest.raises(KeyError), writing_table(target) as temporary:  # noqa: PT012 - dies in the middle
        (temporary / "meta.json").write_text("{}", encoding="utf-8")
        raise KeyError
    assert not list((tmp_path / "cache" / "tables").iterdir())


class _Meddler(Reporter):
    """Changes a file after its rows were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(None)
        self._path = path

    def phase(self, name: str, text: str, *, done: int | None = None, total: int | None = None) -> None:
        if name == "pack":
            self._path.write_text('{"prompt": "other", "completion": "rows"}\n', encoding="utf-8")


def test_a_file_that_changes_while_it_is_read_is_refused(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    config = RunConfig.model_validate(body(write(tmp_path / "rows.jsonl")))
    with pytest.raises(DataError, match=r"rows\.jsonl .* changed while it was read"):
        prepare_data(
            config, tokenizer=tokenizer_dir(), vocab_size=None, cache_dir=tmp_path / "cache", report=_Meddler(tmp_path / "rows.jsonl")
        )  # fmt: skip
    assert not list((tmp_path / "cache" / "tables").iterdir())


def test_what_a_dead_writer_left_is_swept_away(tmp_path: Path) -> None:
    import socket

    process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    left = tmp_path / f".tmp-{socket.gethostname()}-{process.stdout.strip()}-00"
    left.mkdir()
    with writing_table(tmp_path / "key") as temporary:
        (temporary / "meta.json").write_text("{}", encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_cache_that_cannot_be_written_is_an_unfit_machine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with (
        pytest.raises(UnfitError, match="cannot be written") as caught,
        writing_table(tmp_path / "file" / "tables" / "key"),
    ):
        raise AssertionError
    assert caught.value.exit_code == 6


def test_two_writers_at_once_make_one_whole_table_and_a_restart_is_light(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    config = json.dumps(body(write(tmp_path / "rows.jsonl", 500)))
    command = [sys.executable, "-c", PREPARE, config, str(tokenizer_dir()), str(tmp_path / "cache")]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = [json.loads(writer.communicate(timeout=120)[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert found[0][0] == found[1][0]
    tables = [path.name for path in (tmp_path / "cache" / "tables").iterdir()]
    assert tables == [Path(found[0][0]).name]
    _, hit, heavy = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (hit, heavy) == (True, [])


_LIMITED = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from unisono.trainer.data.prepare import writing_table
from unisono.base.errors import UnfitError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    with writing_table(Path(sys.argv[1]) / "tables" / "x") as folder:
        pa.OSFile(str(folder / "tokens.arrow"), "wb").write(b"x" * 5000)
except UnfitError as error:
    print(chr(10).join(error.lines()))
"""


def test_file_size_limit_is_named_with_its_value_and_what_raises_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "the cache of token tables cannot be written: File too large" in printed
    assert "the file size limit is 1000 bytes" in printed
    assert "ulimit -f unlimited" in printed
    assert "free space" not in printed

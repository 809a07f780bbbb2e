"""UNISONO_LANG=zh: what a person reads is Chinese; JSON, files and logs are not.

Run: pytest tests/front/cli/test_chinese.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.front_server import run as run_front
from unisono.base.causes import CATALOGUE, Evidence, Verdict
from unisono.base.errors import Problem
from unisono.base.locale import PLACEHOLDER, Chinese, chinese, read_entries
from unisono.base.text import columns, wrapped
from unisono.front.cli.app import command_names, main
from unisono.front.cli.output import choose_language

UNISONO = [sys.executable, "-m", "unisono"]
ENTRIES = read_entries()
TRANSLATED = {english: text for english, text in ENTRIES.items() if english != text}
ZH = chinese()
VALUE = st.from_regex(r"[a-z][0-9]{1,6}(\.[a-z]{2,4})?", fullmatch=True)


def run(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", "UNISONO_LANG": "en", **variables}
    return run_front([*UNISONO, *words], cwd=cwd, env=environment)


def squeezed(text: str) -> str:
    """Without blanks: one is put between Chinese and letters of a value."""
    return text.replace(" ", "")


def filled(template: str, values: dict[str, str]) -> str:
    return PLACEHOLDER.sub(lambda one: values[one[0]], template)


def test_each_text_with_values_in_it_is_found_by_its_own_template() -> None:
    """Also: no two templates are so much alike that one is taken for the other."""
    wrong = []
    for number, (english, text) in enumerate(TRANSLATED.items()):
        names = PLACEHOLDER.findall(english)
        values = {
            name: f"{number}{at}" if name == "{n}" else f"x{number}{at}.y" for at, name in enumerate(names)
        }
        shown = ZH.sentence(filled(english, values))
        if shown is None or squeezed(shown) != squeezed(filled(text, values)):
            wrong.append((english, shown))
    assert wrong == []


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(TRANSLATED)), st.data())
def test_values_stand_in_the_translation_as_they_were(english: str, data: st.DataObject) -> None:
    values = {
        name: data.draw(st.integers(0, 99999).map(str) if name == "{n}" else VALUE)
        for name in PLACEHOLDER.findall(english)
    }
    shown = ZH.sentence(filled(english, values))
    assert shown is not None
    assert squeezed(shown) == squeezed(filled(TRANSLATED[english], values))


@pytest.mark.parametrize(
    "foreign",
    [
        "remind me on Tuesday at nine to call my mother",
        "RuntimeError: the size of tensor a must match the size of tensor b",
        "sure, here is the answer: the cat sat on the mat",
        "[rank1]: Connection reset by peer [127.0.0.1]:10156",
        "step by step, we go on and on",
        "",
        "   ",
    ],
)
def test_what_the_catalogue_does_not_have_stays_as_it_is(foreign: str) -> None:
    assert ZH(foreign) == foreign


def test_a_sentence_of_several_texts_is_joined_from_their_translations() -> None:
    zh = Chinese(
        {
            "error": "错误",
            "{name}: must be {annotation}{input}": "{name}：必须是{annotation}{input}",
            "one of {known}": "{known} 中的一个",
            ", got {value}": "，实际为 {value}",
        }
    )
    assert (
        zh("error: optim.schedule: must be one of `cosine`, `linear`, got 'cosin'")
        == "错误：optim.schedule：必须是`cosine`, `linear` 中的一个，实际为 'cosin'"
    )
    assert (
        zh("error: optim.schedule: must be as green as grass")
        == "错误：optim.schedule: must be as green as grass"
    )


def test_a_verdict_is_one_chinese_block_whose_columns_are_aligned() -> None:
    verdict = Verdict(
        cause="nproc_mismatch",
        when="before",
        summary="node 1 (b) would start 1 rank, nodes 0 (a) and 2 (c) would start 2 ranks",
        ranks=(1,),
        hosts=("b",),
        phase="agree.nodes",
        evidence=(
            Evidence(where="node 1 (b)", text="CUDA_VISIBLE_DEVICES=0 (set), nproc_per_node 1 inferred"),
        ),
        fix=("unset CUDA_VISIBLE_DEVICES on node 1 (b), or pass --nproc 2 on every node",),
        named_after_s=0.8,
    )
    assert [ZH(line) for line in verdict.lines()] == [
        "问题      node 1 (b) 要启动 1 个 rank，node 0 (a) 和 2 (c) 要启动 2 个 rank  [nproc_mismatch]",
        "责任方    rank 1，主机 b",
        "检出      0.8 秒后（阶段 agree.nodes）",
        "证据      node 1 (b)：CUDA_VISIBLE_DEVICES=0（已设置），nproc_per_node 1（推断）",
        "解决      在 node 1 (b) 上取消设置 CUDA_VISIBLE_DEVICES，或在每个节点上加 --nproc 2",
    ]


def test_every_cause_is_explained_in_chinese() -> None:
    from unisono.front.cli.diagnose import cause_lines

    for cause in CATALOGUE.values():
        for line in cause_lines(cause):
            shown = ZH(line)
            plain = re.sub(r"`[^`]*`", "", shown)
            assert re.search("[\u4e00-\u9fff]", shown) or not re.search(
                r"[a-z]{3,} [a-z]{3,} [a-z]{3,} [a-z]{3,}", plain
            ), shown


def test_a_line_is_wrapped_between_characters_but_not_before_a_comma() -> None:
    line = "证据      " + "所有 rank 都在等待，而它们发送的内容没有到达；" * 6
    lines = wrapped(line, 80).split("\n")
    assert max(map(columns, lines)) <= 80
    assert min(map(columns, lines[:-1])) > 70
    assert all(one.startswith(" " * 10) for one in lines[1:])
    assert not any(one.lstrip()[0] in "，；。：）" for one in lines)


@pytest.mark.parametrize(
    ("asked", "variables", "language"),
    [
        (None, {}, "en"),
        (None, {"LANG": "zh_CN.UTF-8"}, "zh"),
        (None, {"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        (None, {"LC_MESSAGES": "zh_CN.GB18030", "LANG": "en_US.UTF-8"}, "zh"),
        (None, {"LANG": "fr_FR.UTF-8"}, "en"),
        (None, {"UNISONO_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
        (None, {"UNISONO_LANG": "zh_CN"}, "zh"),
        ("zh", {"UNISONO_LANG": "en"}, "zh"),
        ("en", {"UNISONO_LANG": "nonsense"}, "en"),
    ],
)
def test_the_language_is_that_of_the_option_the_variable_or_the_locale(
    asked: str | None, variables: dict[str, str], language: str
) -> None:
    assert choose_language(asked, variables) == language


def test_an_unknown_language_is_refused_in_words() -> None:
    for done in (run("explain", "nan_loss", "--lang", "fr"), run("explain", "nan_loss", UNISONO_LANG="fr")):
        assert done.returncode == 2
        assert "fr is not a language of this program" in done.stderr
        assert "use en or zh" in done.stderr
    assert run("explain", "nan_loss", "--lang").returncode == 2


def test_a_bad_config_is_refused_in_chinese_and_its_json_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "model: {path: builtin:tiny}\ndata: {train: no.jsonl, max_lenght: 5}\noptim: {lr: fast, schedule:"
        " cosin}\nbatch: {micro: 0}\n"
    )
    done = run("train", "bad.yaml", cwd=tmp_path, UNISONO_LANG="zh")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    places = [line.partition("：")[2] for line in lines if line.startswith("  位置：")]
    assert places == ["bad.yaml:2", "bad.yaml:3", "bad.yaml:3", "bad.yaml:4", "bad.yaml"]
    assert {line.partition("：")[0].strip() for line in lines} == {"错误", "位置", "原因", "解决"}
    english, same = (
        run("train", "bad.yaml", "--json", *words, cwd=tmp_path) for words in ((), ("--lang", "zh"))
    )
    drop = ("wall_time_s", "time")
    assert [
        {name: value for name, value in json.loads(line).items() if name not in drop}
        for line in same.stdout.splitlines()
    ] == [
        {name: value for name, value in json.loads(line).items() if name not in drop}
        for line in english.stdout.splitlines()
    ]


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("trian",), "错误：`unisono` 没有命令 `trian`"),
        (("train",), "错误：`unisono train` 缺少 config"),
        (("train", "--nonsense", "x.yaml"), "错误：`unisono train` 没有选项 --nonsense"),
        (("train", "x.yaml", "--restarts", "many"), "错误：--restarts many 无效"),
        (("explain", "nan_los"), "错误：没有名为 nan_los 的原因或变量"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_in_chinese(
    words: tuple[str, ...], first: str, tmp_path: Path
) -> None:
    done = run(*words, cwd=tmp_path, UNISONO_LANG="zh")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, first)


@pytest.mark.parametrize(
    "words", [("explain", "nan_loss"), ("explain", "NCCL_P2P_DISABLE"), ("drill", "--list")]
)
def test_json_is_equal_byte_for_byte(words: tuple[str, ...]) -> None:
    assert run(*words, "--json", UNISONO_LANG="zh").stdout == run(*words, "--json").stdout != ""


def test_an_encoding_without_chinese_gives_english() -> None:
    done = run("explain", "nan_loss", UNISONO_LANG="zh", PYTHONIOENCODING="latin-1")
    assert done.stdout == run("explain", "nan_loss").stdout
    assert "梯度" in run("explain", "nan_loss", UNISONO_LANG="zh", LC_ALL="C").stdout
    gb = subprocess.run(
        [*UNISONO, "explain", "nan_loss"],
        env={**os.environ, "UNISONO_LANG": "zh", "PYTHONIOENCODING": "gb18030"},
        capture_output=True,
        check=True,
    )
    assert "梯度" in gb.stdout.decode("gb18030")


def test_help_is_chinese_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in command_names():
        with pytest.raises(SystemExit):
            main(["--lang", "zh", *words, "--help"])
        shown = capsys.readouterr().out
        assert "用法：" in shown
        assert "选项：" in shown
        for line in shown.splitlines():
            assert columns(line) <= 80 or "用法" in line, line
            described = re.sub(r"^ *(-\S+|\S+)( [A-Z|:\[\]=…,-]+| <\S+)*  +", "", line)
            assert not re.search(r"\b(the|of|with|from|that|this|each)\b", described), line
    with pytest.raises(SystemExit):
        main(["--lang", "en", "train", "--help"])
    assert "Usage: " in capsys.readouterr().out


def test_diagnose_and_doctor_speak_chinese(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    done = run("diagnose", "log", cwd=tmp_path, UNISONO_LANG="zh")
    labels = [line.split()[0] for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert labels[0] == "问题"
    assert "解决" in labels
    assert run("diagnose", "log", "--json", cwd=tmp_path, UNISONO_LANG="zh").stdout == run("diagnose", "log", "--json", cwd=tmp_path).stdout  # fmt: skip
    found = run("doctor", cwd=tmp_path, UNISONO_LANG="zh").stdout.splitlines()
    assert found[0].startswith("unisono ")
    assert "，主机 " in found[0]
    assert {"本机", "环境变量", "设备", "网络"} <= set(found)
    assert re.fullmatch(r"\d+ 项检查：.*", found[-1])


def test_english_is_unchanged_and_does_not_read_the_catalogue() -> None:
    assert Problem("a", "b").lines() == ["error: a", "  where: b"]
    code = (
        "import sys; from unisono.front.cli.app import main\ntry: main(['explain', 'nan_loss'])\nexcept SystemExit:"
        " pass\nassert 'unisono.base.locale' not in sys.modules"
    )
    variables = {
        name: value for name, value in os.environ.items() if not re.match(r"UNISONO_LANG|LC_|LANG", name)
    }
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=variables)


@pytest.mark.parametrize(
    ("english", "translated"),
    [
        ("device                       command line", "device                       命令行"),
        ("model.path                   command line", "model.path                   命令行"),
        ("device    1 CPU", "设备      1 CPU"),
    ],
)
def test_keys_of_a_table_stay_and_labels_are_translated(english: str, translated: str) -> None:
    assert chinese()(english) == translated

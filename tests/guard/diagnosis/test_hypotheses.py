"""The ranking of causes: its table, its scores and its questions.

Run: pytest tests/guard/diagnosis/test_hypotheses.py
"""

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.front.cli.test_explain import run
from unisono.base.causes import CATALOGUE
from unisono.base.causes.entries import all_entries
from unisono.front.cli.app import main
from unisono.guard.diagnosis import stated_versions
from unisono.guard.diagnosis.hypotheses import DENIED_SHARE, NO_FAILURE, default_table, rank, scores
from unisono.guard.diagnosis.report_terms import Feature, feature_names, find_features, pattern_of
from unisono.guard.diagnosis.report_text import sentences_of

TABLE = default_table()
FOLDER = files("unisono.guard.diagnosis")
NAMES = sorted({name for entry in TABLE.entries.values() for name in entry.weights})
FEATURES = st.lists(st.sampled_from(NAMES), unique=True, max_size=12)


def feature(name: str) -> Feature:
    return Feature(name, "r.md:1", name, "symptom")


def test_every_cause_of_the_catalogue_has_signs_and_a_check() -> None:
    assert set(TABLE.entries) == (set(CATALOGUE) - {"healthy", "undetermined"}) | {NO_FAILURE}
    for entry in all_entries():
        assert (entry.signs is None) == (entry.cause.id in ("healthy", "undetermined")), entry.cause.id
        assert entry.signs is None or entry.signs.own or entry.signs.strong or entry.signs.some, (
            entry.cause.id
        )
        assert entry.signs is None or entry.signs.check, entry.cause.id


def test_every_feature_of_the_table_is_one_of_the_dictionaries() -> None:
    known = feature_names() | {stated_versions.FEATURE}
    used = {name.rpartition(":")[2] for name in NAMES} - set(CATALOGUE) | {
        one.feature.rpartition(":")[2] for one in TABLE.questions
    }
    assert used <= known


def test_both_dictionaries_have_the_same_features() -> None:
    english, chinese = (
        tomllib.loads(FOLDER.joinpath("terms", f"{language}.toml").read_text(encoding="utf-8"))
        for language in ("en", "zh")
    )
    assert {section: set(english[section]) for section in english} == {
        section: set(chinese[section]) for section in chinese
    }
    for dictionary in (english, chinese):
        for features in dictionary.values():
            for name, phrases in features.items():
                assert phrases, name
                for phrase in phrases:
                    assert phrase == phrase.lower(), phrase
                    assert not re.compile(pattern_of(phrase)).search(""), f"{phrase} matches anything"


def test_a_phrase_with_an_open_bracket_is_refused() -> None:
    with pytest.raises(ValueError, match="brackets"):
        pattern_of("one [of|these")


@pytest.mark.parametrize(
    ("phrase", "yes", "no"),
    [
        ("hang*", "it hangs", "it changes"),
        ("out of memory", "out-of-memory", "outofmemory"),
        ("one [gpu|card] .. works", "one gpu always works", "one gpu. it works"),
        ("node #", "node 12", "node a"),
        ("卡住", "训练卡住了", "卡不住"),
        ("保存..[卡|挂]", "保存模型时卡住", "保存模型,没有卡"),
    ],
)
def test_the_syntax_of_phrases(phrase: str, yes: str, no: str) -> None:
    pattern = re.compile(pattern_of(phrase), re.ASCII)
    assert pattern.search(yes)
    assert not pattern.search(no)


@given(FEATURES)
def test_scores_are_probabilities(names: list[str]) -> None:
    found = scores(names, TABLE)
    assert abs(sum(found.values()) - 1) < 1e-9
    assert set(found) == set(CATALOGUE) - {"healthy", "undetermined"}


@given(FEATURES, st.sampled_from(NAMES))
def test_evidence_for_a_cause_never_lowers_its_odds_against_a_neutral_one(
    names: list[str], added: str
) -> None:
    before, after = scores(names, TABLE), scores([*names, added], TABLE)
    neutral = next(cause for cause in before if TABLE.weight(cause, added) == 0)
    for cause in before:
        if TABLE.weight(cause, added) >= 0:
            assert after[cause] / after[neutral] >= before[cause] / before[neutral] * (1 - 1e-9)


@given(FEATURES)
def test_a_ranking_is_sorted_short_and_explained(names: list[str]) -> None:
    found = rank([feature(name) for name in names], is_failure=True)
    listed = [one.score for one in found.hypotheses]
    assert listed == sorted(listed, reverse=True)
    assert len(listed) <= 5
    for one in found.hypotheses:
        assert all(TABLE.weight(one.cause, item.id) > 0 for item in one.because)
        assert all(TABLE.weight(one.cause, item.id) < 0 for item in one.against)
        assert one.fix
        assert one.check
    assert len(found.questions) <= 3
    assert not {one.feature for one in found.questions} & set(names)


def test_a_denied_feature_weighs_a_share_against() -> None:
    weight = TABLE.weight("cuda_oom", "gpu_memory")
    assert TABLE.weight("cuda_oom", "not:gpu_memory") == -DENIED_SHARE * weight < 0


def test_an_answer_moves_the_ranking() -> None:
    said = [feature(name) for name in ("hang", "multi_gpu", "gpu_busy")]
    before = rank(said, is_failure=True)
    question = before.questions[0].feature
    after, denied = (rank([*said, feature(name)], is_failure=True) for name in (question, f"not:{question}"))
    assert after.hypotheses[0].score != denied.hypotheses[0].score


COMMANDS = sorted(
    {
        line
        for entry in TABLE.entries.values()
        for line in (*entry.check, entry.here)
        if line.startswith("unisono ")
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_table_exist_with_these_options(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split(",")[0].split()[1:]
    with pytest.raises(SystemExit):
        main([words[0], "--help"])
    text = capsys.readouterr().out
    for option in (word for word in words if word.startswith("--")):
        assert option in text, f"{line}: {words[0]} has no {option}"


def test_symptoms_in_words_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--symptom", "CUDA out of memory at the first step, batch size 1")
    assert (code, err) == (0, "")
    assert re.search(r"^  1  cuda_oom +likely", out, re.MULTILINE)
    code, out, _ = run(
        capsys, "--symptom", "多机训练，加载完模型就卡住，只有一台机器设置了 CUDA_VISIBLE_DEVICES"
    )
    assert re.search(r"^  1  nproc_mismatch", out, re.MULTILINE)


def test_words_that_say_nothing_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--symptom", "qwertz")
    assert (code, out) == (2, "")
    assert "hangs after the model is loaded" in err
    code, _, err = run(capsys, "nan_loss", "--symptom", "hang")
    assert code == 2
    assert "exclude each other" in err


def test_json_has_the_fields_that_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--json", "explain", "--symptom", "my training on 4 GPUs hangs, no error"])
    body = json.loads(capsys.readouterr().out)
    first = body["hypotheses"][0]
    assert set(first) == {"cause", "likelihood", "score", "because", "against", "check", "fix", "fix_here"}
    assert first["likelihood"] in ("likely", "possible", "remote")
    assert set(first["because"][0]) == {"where", "text", "kind"}
    assert body["questions"]


def test_the_negation_of_a_symptom_is_kept_apart() -> None:
    names = {one.id for one in find_features("r", sentences_of("没有爆显存，但是卡住了"))}
    assert "hang" in names
    assert "gpu_memory" not in names


def test_complete_logs_rule_causes_out_and_cut_ones_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait = (
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"
        " to complete"
    )
    files = []
    for number in range(2):
        files.append(tmp_path / f"rank_{number}.log")
        files[-1].write_text(f"rank {number} of 2 ready\n[rank{number}]: {wait}\n", encoding="utf-8")

    def ruled_out(*paths: Path) -> list[str]:
        with pytest.raises(SystemExit):
            main(["--json", "diagnose", *map(str, paths)])
        found: list[str] = json.loads(capsys.readouterr().out)["ruled_out"]
        return found

    assert ruled_out(*files) == ["cuda_oom", "disk_full", "port_in_use"]
    assert ruled_out(files[0]) == []  # the other rank's log may have such a line

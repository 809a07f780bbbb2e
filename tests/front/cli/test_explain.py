"""`unisono explain` knows every cause and variable, and the nearest to a typo.

Run: pytest tests/front/cli/test_explain.py
"""

import json

import pytest

from unisono.base.causes import CATALOGUE
from unisono.base.causes.variables import VARIABLES
from unisono.front.cli.app import main
from unisono.front.cli.diagnose import cause_lines, variable_lines


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_a_cause_is_explained_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "nan_loss")
    assert (code, err) == (0, "")
    assert out.startswith("nan_loss: the loss or its gradient is NaN or infinite")
    assert "Fix:\n  1. " in out


def test_a_cause_that_can_be_drilled_reports_how(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "user_code_stuck")
    assert out.endswith("To try it on this machine:\n  unisono drill sleep\n  unisono drill spin\n")
    _, out, _ = run(capsys, "rdzv_timeout")
    assert "unisono drill" not in out


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "nccl_socket_ifname"])
def test_a_variable_is_explained(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, name)
    assert code == 0
    assert "may differ between nodes" in out


@pytest.mark.parametrize(
    ("typo", "meant"), [("nan_los", "nan_loss"), ("NCCL_SOCKET_IFNAM", "NCCL_SOCKET_IFNAME")]
)
def test_a_typo_ends_with_2_and_the_nearest_name(
    capsys: pytest.CaptureFixture[str], typo: str, meant: str
) -> None:
    code, out, err = run(capsys, typo)
    assert (code, out) == (2, "")
    assert f"did you mean `unisono explain {meant}`?" in err


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "cuda_oom", "--json")
    entry = json.loads(out)
    assert (code, err, entry["schema"], entry["id"], entry["exit_code"]) == (0, "", 1, "cuda_oom", 5)
    assert entry["remedy"]


def test_without_a_name_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys)
    assert all(cause.id in out for cause in CATALOGUE.values())
    assert all(variable.name in out for variable in VARIABLES)
    _, out, _ = run(capsys, "--json")
    assert len(json.loads(out)["causes"]) == len(CATALOGUE)


def test_every_entry_can_be_shown() -> None:
    assert all(cause_lines(cause)[0].startswith(cause.id) for cause in CATALOGUE.values())
    assert all(variable_lines(variable)[0].startswith(variable.name) for variable in VARIABLES)


def test_control_characters_of_a_name_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "\x1b[31mred\x07")
    assert code == 2
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("oom", "cuda_oom"), ("nan", "nan_loss"), ("out of memory", "cuda_oom"), ("hang", "unequal_steps"), ("slow", "data_starved"),
        ("disk", "disk_full"), ("port", "port_in_use"), ("killed", "rank_killed"), ("memory", "cuda_oom"), ("显存不足", "cuda_oom"),
        ("timeout", "rdzv_timeout"), ("loss is nan", "nan_loss"), ("OOM", "host_oom_killed"), ("卡住", "unequal_steps"),
    ],
)  # fmt: skip
def test_a_usual_word_ends_with_2_and_the_causes_that_it_may_mean(
    capsys: pytest.CaptureFixture[str], word: str, meant: str
) -> None:
    code, out, err = run(capsys, word)
    assert (code, out) == (2, "")
    assert f"`unisono explain {meant}`" in err
    assert err.count("`unisono explain ") <= 3


def test_a_word_that_means_nothing_leads_to_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "xyzzy")
    assert "`unisono explain` lists all of them" in err

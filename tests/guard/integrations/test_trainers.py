"""The callbacks in real trainers, without `unisono run`: one process, and two over gloo.

Run: pytest tests/guard/integrations/test_trainers.py
"""

import signal
from pathlib import Path

import pytest

from tests.guard.integrations.launched_programs import train

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

_OTHERS = [
    pytest.param(name, marks=pytest.mark.long)
    for name in ("trl_sft.py", "lightning_fit.py", "accelerate_loop.py")
]
_TRAINERS = ["hf_trainer.py", *_OTHERS]
_WORDS = "unisono.base.errors.Disagreed: "
# Without `unisono run` gloo's thread may abort a process that has done all its work (torch 2.13,
# pytorch#190489).
_DONE = {0, -signal.SIGABRT}


def _last_words(output: str) -> str:
    """The line that the refusal has in a traceback."""
    return next((line.partition(_WORDS)[2] for line in output.splitlines() if _WORDS in line), "")


@pytest.mark.long
@pytest.mark.parametrize("program", _TRAINERS)
def test_two_ranks_train_to_the_same_bits_with_the_callback_and_without(program: str, tmp_path: Path) -> None:
    with_it = train(program, tmp_path / "with", "--callback", ranks=2)
    without = train(program, tmp_path / "without", ranks=2)
    assert {*with_it.codes, *without.codes} <= _DONE, with_it.outputs
    assert with_it.losses == without.losses
    assert [len(losses) for losses in with_it.losses] == [6, 6]


@pytest.mark.long
@pytest.mark.parametrize("program", _TRAINERS)
def test_one_process_trains_to_the_same_bits_and_has_no_group(program: str, tmp_path: Path) -> None:
    with_it = train(program, tmp_path / "with", "--callback", ranks=1)
    without = train(program, tmp_path / "without", ranks=1)
    assert with_it.codes == without.codes == [0], with_it.outputs
    assert with_it.losses == without.losses


@pytest.mark.parametrize("program", _TRAINERS)
def test_unseeded_split_is_refused_on_every_rank_with_the_same_words(program: str, tmp_path: Path) -> None:
    ended = train(program, tmp_path, "--callback", "--fault", "unseeded", ranks=2)
    words = [_last_words(output) for output in ended.outputs]
    assert words[0] == words[1], ended.outputs
    assert words[0].endswith("[split_mismatch]")
    assert ended.losses == [[], []]
    assert all(ended.codes)
    assert all("same fixed seed" in output for output in ended.outputs)


@pytest.mark.long
@pytest.mark.parametrize("program", _TRAINERS)
def test_unequal_steps_are_refused_on_every_rank_before_the_first(program: str, tmp_path: Path) -> None:
    ended = train(program, tmp_path, "--callback", "--fault", "steps", ranks=2)
    words = [_last_words(output) for output in ended.outputs]
    assert words[0] == words[1], ended.outputs
    assert words[0].endswith("[unequal_steps]")
    assert ended.losses == [[], []]
    assert all(ended.codes)

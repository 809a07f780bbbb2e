"""Pictures in a chat, each a real process.

Run: pytest tests/front/talk/test_pictures.py
"""

import json
from pathlib import Path

import pytest

from tests import needs
from tests.front.talk.test_commands import run
from tests.vision_models import draw, qwen2_5_vl
from unisono.base.events import Reporter
from unisono.trainer.plan.task_requests import GenerateRequest, RequestedModel
from unisono.trainer.task import generation

pytestmark = pytest.mark.slow  # each process imports torch


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    """A model that reads pictures, and three files beside it, of which one is broken."""
    needs.package("PIL")
    qwen2_5_vl(tmp_path / "seeing")
    draw("red", "circle").save(tmp_path / "a.png")
    draw("blue", "square", size=(70, 130)).save(tmp_path / "b.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:150])
    return tmp_path / "seeing"


def test_attached_pictures_are_those_of_the_next_message(seeing: Path, tmp_path: Path) -> None:
    a, b, saved = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "talk.jsonl"
    lines = (
        f"/image {a}", "what is this?", "/clear", f"/image {b}", f"/image {a}", "<image> and <image>?",
        f"/save {saved}", "and now?",
    )  # fmt: skip

    done = run("chat", seeing, "--json", "--max-tokens", 6, text="\n".join(lines))

    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    for text, images, answer in (
        ("what is this?", (a,), answers[0]),
        ("<image> and <image>?", (b, a), answers[1]),
    ):
        asked = GenerateRequest(
            model=RequestedModel(str(seeing)), prompt=text, images=tuple(map(str, images)), max_tokens=6
        )
        assert generation.run_generate(asked, Reporter(None))["answers"][0]["answer"] == answer
    assert len(answers) == 3  # the pictures of earlier messages belong to the conversation
    assert f"attached {a} to the next message: 96 × 64 pixels, " in done.stderr
    row = json.loads(saved.read_text())
    assert row["images"] == [str(b), str(a)]
    assert row["messages"][0] == {"role": "user", "content": "<image> and <image>?"}


def test_a_picture_that_cannot_be_used_is_refused_and_the_conversation_goes_on(
    seeing: Path, tmp_path: Path
) -> None:
    lines = (
        "/image",
        f"/image {tmp_path / 'broken.png'}",
        f"/image {tmp_path / 'none.png'}",
        "hello",
        "/help",
    )

    done = run("chat", seeing, "--json", "--max-tokens", 3, text="\n".join(lines))

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    for why in (
        "name of the file is missing",
        "truncated or damaged",
        "none.png",
        "/image FILE ",
    ):
        assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_pictures_refuses_them_by_name(model_dir: Path, seeing: Path, tmp_path: Path) -> None:
    done = run("chat", model_dir, "--max-tokens", 3, text=f"/image {tmp_path / 'a.png'}\nhello\n")

    assert done.returncode == 0, done.stderr
    assert f"{model_dir} reads no pictures" in done.stderr

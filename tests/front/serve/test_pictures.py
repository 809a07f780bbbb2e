"""Pictures in requests, sent with OpenAI's client to a run that was trained on pictures.

Run: pytest tests/front/serve/test_pictures.py
"""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.front.serve.conftest import Served, start
from tests.trainer.vision.conftest import Gallery, gallery, picture_rows  # noqa: F401 - fixtures
from tests.vision_models import chatml, draw
from unisono.base.events import Reporter
from unisono.trainer.plan.task_requests import GenerateRequest, RequestedModel
from unisono.trainer.task import generation

pytestmark = pytest.mark.slow  # each process imports torch
FAMILIES = ("idefics3", "qwen2_5_vl")
PICTURES = (
    draw("red", "circle"), draw("blue", "square", size=(70, 130)), draw("green", "circle", size=(64, 64)),
)  # fmt: skip
QUESTIONS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("<image>what is this?", (0,)),
    ("what is red?", ()),
    ("<image> and <image> are?", (1, 2)),
    ("what is this?<image>", (1,)),
    ("<image><image><image>what are these?", (2, 0, 1)),
    ("a long question about what is blue and what is green in the picture", ()),
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def data_url(image: Any, kind: str = "PNG") -> str:
    stream = io.BytesIO()
    image.save(stream, kind)
    return encoded(stream.getvalue(), kind.lower())


def encoded(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def parts(text: str, chosen: tuple[int, ...]) -> list[dict[str, Any]]:
    """A message with the pictures in their places."""
    left = list(chosen)
    content: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split("<image>")):
        content += [picture(data_url(PICTURES[left.pop(0)]))] if number else []
        content += [{"type": "text", "text": piece}] if piece else []
    return content


def ask(served: Served, content: Any, **options: Any) -> Any:
    settings: Any = {"temperature": 0, "max_tokens": 12} | options
    messages: Any = [{"role": "user", "content": content}]
    return served.client.chat.completions.create(model=served.model, messages=messages, **settings)


def refusal(served: Served, messages: Any) -> str:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(model=served.model, messages=messages)
    return str(caught.value.message)


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(
    request: pytest.FixtureRequest,
    gallery: Gallery,  # noqa: F811
    own_cache: None,
) -> Iterator[Served]:
    """A server of a run with pictures."""
    one = start(gallery.alone(gallery.plan(request.param, optim={"lr": 1e-3})).directory)
    yield one
    one.close()
    assert one.end() == 0
    one.process.communicate()


def test_answers_about_pictures_are_those_of_generate_alone_at_once_and_streamed(
    seeing: Served, tmp_path: Path
) -> None:
    for number, image in enumerate(PICTURES):
        image.save(tmp_path / f"{number}.png")
    wanted = []
    for text, chosen in QUESTIONS:
        asked = GenerateRequest(
            model=RequestedModel(seeing.model),
            prompt=text,
            images=tuple(str(tmp_path / f"{number}.png") for number in chosen),
            max_tokens=12,
        )
        wanted.append(generation.run_generate(asked, Reporter(None))["answers"][0]["answer"])
    assert len(set(wanted)) > 2

    contents = [parts(text, chosen) for text, chosen in QUESTIONS]
    alone = [ask(seeing, content) for content in contents]
    with ThreadPoolExecutor(len(contents)) as pool:
        at_once = list(pool.map(lambda content: ask(seeing, content), contents))

    assert [answer.choices[0].message.content for answer in alone] == wanted
    assert [answer.choices[0].message.content for answer in at_once] == wanted
    assert alone[0].usage.prompt_tokens > alone[1].usage.prompt_tokens  # those of the picture count
    chunks = list(ask(seeing, contents[2], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted[2]


def test_pictures_that_cannot_be_used_are_refused_by_their_number_with_the_reason(seeing: Served) -> None:
    good = data_url(PICTURES[0])
    whole = base64.b64decode(good.partition(",")[2])
    bomb = data_url(Image.new("1", (12_000, 8_000)))
    cases = {
        "picture 2 cannot be used: it is truncated or damaged": [
            picture(good),
            picture(encoded(whole[:150])),
        ],
        "picture 1 cannot be used: 12000 × 8000 pixels are more than": [picture(bomb)],
        "it is a GIF picture": [picture(data_url(PICTURES[0], "GIF"))],
        "it is an SVG drawing": [picture(encoded(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"))],
        "picture 1 is not valid base64": [picture("data:image/png;base64,!!!!")],
        "picture 1 is not a data URL in base64": [picture("data:image/png,abc")],
        "picture 1 has no URL": [{"type": "image_url"}],
        "is neither auto nor high": [picture(good, detail="low")],
        "17 pictures, and at most 16": [picture(good)] * 17,
        "http and https URLs are refused; --image-hosts": [picture("http://127.0.0.1/a.png")],
        "file URLs are refused; --image-folders": [picture("file:///etc/hostname")],
        "send it as a data URL": [picture("/etc/hostname")],
        "which stands for a picture": [{"type": "text", "text": "<image> <|image_pad|>"}],
    }

    for why, content in cases.items():
        assert why in refusal(seeing, [{"role": "user", "content": content}])
    of_model = {"role": "assistant", "content": [picture(good)]}
    asked = {"role": "user", "content": "so?"}
    assert "of the role assistant has a picture" in refusal(seeing, [asked, of_model, asked])
    assert ask(seeing, parts(*QUESTIONS[0])).choices[0].message.content  # it serves on


def test_pictures_of_too_many_tokens_are_too_long_a_prompt(seeing: Served) -> None:
    import openai

    content = [picture(data_url(PICTURES[1]))] * 16 + [{"type": "text", "text": "what is this? " * 200}]

    with pytest.raises(openai.APIStatusError, match="and the model reads 512") as caught:
        ask(seeing, content)

    assert caught.value.status_code == 413


def test_tools_and_pictures_go_together(gallery: Gallery, own_cache: None, tmp_path: Path) -> None:  # noqa: F811
    import shutil

    model = tmp_path / "llava"
    shutil.copytree(gallery.model("llava"), model)
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + chatml("<image>")
    (model / "chat_template.jinja").write_text(template)
    served = start(model)
    try:
        content = parts(*QUESTIONS[0])
        plain, with_tool = ask(served, content), ask(served, content, tools=[TOOL])
        assert with_tool.usage.prompt_tokens > plain.usage.prompt_tokens
        assert with_tool.choices[0].finish_reason == "length"
    finally:
        served.close()
        assert served.end() == 0
        served.process.communicate()


def test_a_model_without_pictures_says_so(server: Served) -> None:
    message = refusal(server, [{"role": "user", "content": [picture(data_url(PICTURES[0]))]}])

    assert f"{server.model} reads no pictures" in message

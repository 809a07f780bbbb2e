"""A chat template is a program by somebody else: whatever it does, it ends, within its memory, and
its name is said.

Run: .venv/bin/python -m pytest tests/trainer/data/test_rendering.py
"""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import front_server
from unisono.base.errors import DataError, Problem
from unisono.trainer.data import Conversation, Message, Messages, RowError, template
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.template import ChatTemplate, choose_template
from unisono.trainer.data.tokenizer import load_tokenizer

TALK: list[Message] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
DOUBLING = (
    "{% set ns = namespace(a=[], b=[]) %}\n"
    "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}\n"
)


@pytest.fixture
def tokenizer(tokenizer_dir: Callable[..., Path]) -> Any:
    return load_tokenizer(tokenizer_dir(), trust_remote_code=False)


@pytest.fixture
def render(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.setattr(template, "CPU_S", 1.0)

    def of(text: str) -> str:
        file = tmp_path / "t.jinja"
        file.write_text(text, encoding="utf-8")
        template = choose_template(tokenizer, str(file))
        assert template is not None
        return template.render(TALK)

    return of


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", 2),
        ("\n\n{{ lipsum(n=100000, max=1000) }}", 3),
        (DOUBLING + "{{ ns.a|pprint }}", 3),
    ],
)
def test_a_template_without_an_end_is_ended_with_its_file_and_line(
    render: Callable[[str], str], tmp_path: Path, text: str, line: int
) -> None:
    with pytest.raises(DataError, match="does not terminate") as caught:
        render(text)
    (problem,) = caught.value.problems
    assert problem.where == f"{tmp_path / 't.jinja'}:{line}"
    assert signal.getitimer(signal.ITIMER_PROF) == signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10**10 }}",
        "{{ '%3000000000d' % 1 }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    ],
)
def test_template_that_fills_the_memory_is_ended_and_the_limit_removed(
    render: Callable[[str], str], text: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match=r"too much memory|does not terminate"):
        render(text)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_template_that_writes_more_than_it_was_given_is_refused(render: Callable[[str], str]) -> None:
    with pytest.raises(DataError, match=r"renders a conversation of .* characters to 20,000,000"):
        render("{{ 'a' * 20000000 }}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\n{% for i in range(10**9) %}{% endfor %}", "t.jinja:2): Range too big"),
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "t.jinja:1): maximum recursion"),
        ("\n\n{{ messages[7].x.y }}", "t.jinja:3)"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('only in pairs') }}", "only in pairs"),
        ("{% include 'other' %}", "no loader"),
        ("{{ '\\ud800' }}", "an unpaired surrogate"),
    ],
)
def test_any_failure_of_rendering_is_a_refusal_with_the_file_and_the_line(
    render: Callable[[str], str], text: str, why: str
) -> None:
    with pytest.raises(RowError) as caught:
        render(text)
    assert why in caught.value.why


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}",
        "{{ 'a'|nofilter }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "".join(f"{{% for a{i} in [1] %}}" for i in range(25)) + "{% endfor %}" * 25,
        "\0\0\0\0",
        "{{ " + "1" * 5000 + " }}",
        "x" * 1_000_001,
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_template_is_refused_by_its_name(
    render: Callable[[str], str], text: str
) -> None:
    with pytest.raises(DataError) as caught:
        render(text)
    (problem,) = caught.value.problems
    assert "t.jinja" in problem.what + problem.where


def test_a_byte_order_mark_is_not_a_part_of_a_template(render: Callable[[str], str]) -> None:
    assert render("\ufeffx") == "x"


def template_refused(tokenizer: Any, file: Path) -> Problem:
    with pytest.raises(DataError) as caught:
        choose_template(tokenizer, str(file))
    return caught.value.problems[0]


def test_template_file_of_another_encoding_or_kind_is_named(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}", encoding="utf-16")
    assert "iconv -f UTF-16 -t UTF-8" in template_refused(tokenizer, file).fix
    file.write_bytes(b"one\n\xe9t\xe9 {{ messages }}")
    assert template_refused(tokenizer, file).where == f"{file}:2:1"
    file.unlink()
    os.mkfifo(file)
    assert "named pipe" in template_refused(tokenizer, file).what
    file.unlink()
    file.symlink_to(file)
    assert "is a symbolic link loop" in template_refused(tokenizer, file).what


def test_a_tokenizer_with_templates_but_no_default_one_is_refused_once(tokenizer: Any) -> None:
    tokenizer.chat_template = {"rag": "a", "tool_use": "b"}
    with pytest.raises(DataError, match="no default chat template"):
        choose_template(tokenizer, None)


def test_many_conversations_of_a_batch_share_what_bounds_them(
    tokenizer: Any, tokenizer_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "CPU_S", 1.0)  # of one conversation, not of all: two ticks of the timer
    encoder = Encoder(tokenizer, directory=tokenizer_dir())
    before = os.times()
    found = encoder.encode([Conversation(TALK)] * 45_000)
    assert not any(isinstance(row, RowError) for row in found)
    assert os.times().user - before.user > 1.0


class _Through(ChatTemplate):
    """Renders everything with apply_chat_template."""

    _direct = None


def outcome(rendering: ChatTemplate, messages: Messages, *, prompt: bool) -> Any:
    try:
        return rendering.render(messages, prompt=prompt)
    except RowError as error:
        return error.why, error.fix
    except DataError as error:
        return error.problems


# Parts of templates: what they may read, keep, change, or fail with.
PARTS = st.sampled_from(
    [
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}",
        "{% for m in messages %}{% if not loop.last %}{{ m.content | trim }}{% endif %}{{ loop.length }}\n{% endfor %}",
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ unk_token is none }}",
        "{{ tools }}{{ documents is none }}{{ documents is defined }}{{ nothing is defined }}{{ nothing.more }}",
        "{{ messages | tojson }}{{ messages[0] | items | list }}{{ messages[1:] | map(attribute='role') | join }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ n is defined }}{% set n = 3 %}{{ n }}",
        "{{ range is defined }}{{ dict(a=1) }}{% set range = 1 %}",
        "{% macro say(m) %}{{ caller is defined }}{{ m.role }}{{ varargs }}{% endmacro %}{{ say(messages[-1], 2) }}",
        "{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}",
        "{% block b %}{{ messages | length }}{% endblock %}{{ self.b() }}",
        "\n\n{{ messages.append(messages[0]) }}",
        "\n{{ messages[0].update(role='other') }}",
        "{{ messages.pop() }}",
        "{{ messages[0].__class__ }}{{ messages.__class__.__mro__ }}",
        "\n{% if messages[0].role != 'user' %}{{ raise_exception('no question: ' ~ messages[0].role) }}{% endif %}",
        "{{ messages[2].content }}",
        "{% include 'other' %}",
        "{% for %}",
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"])},
        optional={
            "content": st.one_of(st.none(), st.text(max_size=8)),
            "reasoning_content": st.sampled_from([None, "thought"]),
        },
    ),
    max_size=3,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_template_gives_what_apply_chat_template_gives(tokenizer: Any, data: st.DataObject) -> None:
    """Its texts, and its refusals with their lines, also after the first rendering, which is
    compared.
    """
    text = "".join(data.draw(st.lists(PARTS, min_size=1, max_size=4)))
    direct, through = ChatTemplate(tokenizer, text, "a test"), _Through(tokenizer, text, "a test")
    for prompt in (False, True):
        for messages in (TALK, TALK[:1], data.draw(MESSAGES), TALK):
            assert outcome(direct, messages, prompt=prompt) == outcome(through, messages, prompt=prompt)


def test_plain_messages_skip_apply_chat_template_once_both_agree(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering = choose_template(tokenizer, None)
    assert rendering is not None
    expected = [rendering.render(TALK), rendering.render(TALK[:1], prompt=True)]
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *_, **__: "called")
    assert [rendering.render(TALK), rendering.render(TALK[:1], prompt=True)] == expected
    assert rendering.render([TALK[0] | {"name": "x"}]) == rendering.render(TALK, []) == "called"


def test_text_that_differs_from_apply_chat_template_is_never_used(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template._DirectRendering, "render", lambda *_, **__: "different")
    rendering = choose_template(tokenizer, None)
    assert rendering is not None
    assert "different" not in {rendering.render(TALK, prompt=prompt) for prompt in (False, True, False, True)}


def test_a_tokenizer_that_renders_in_its_own_way_is_left_to_it(tokenizer: Any) -> None:
    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, *_: object, **__: object) -> str:
            return f"{len(self)} tokens"

    tokenizer.__class__ = Own
    rendering = choose_template(tokenizer, None)
    assert rendering is not None
    assert rendering._direct is None
    assert rendering.render(TALK) == rendering.render(TALK) == f"{len(tokenizer)} tokens"


@pytest.mark.slow
def test_uninterruptible_template_ends_the_process_with_the_same_refusal(tmp_path: Path) -> None:
    file, rows, config = tmp_path / "t.jinja", tmp_path / "rows.jsonl", tmp_path / "c.yaml"
    file.write_text(DOUBLING + "{{ ns.a == ns.b }}", encoding="utf-8")  # C code that looks for no signal
    rows.write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    config.write_text(
        f"model: builtin:tiny\ndata: {{train: {rows}, template: {file}}}\noutput_dir: {tmp_path / 'out'}\n"
    )
    done = front_server.run(
        [sys.executable, "-m", "unisono", "data", "preview", str(config)],
        timeout=300,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert "the chat template does not terminate" in done.stderr
    assert "Traceback" not in done.stderr
    shutil.rmtree(tmp_path / "cache")

"""The chat template of a run: where it comes from, how it renders, what it puts around an answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono.data.rows import Message, RowError
from unisono.errors import DataError
from unisono.files import read_json
from unisono.text import one_line

# Where a tokenizer has no template of its own. END is its end-of-turn token, or else its end-of-sequence token.
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + 'END' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUESTION, _ANSWER = "unisonoquestion", "unisonoanswer"


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, or the one that stands in for it.

    Attributes:
        tokenizer: of transformers.
        text: what is given to apply_chat_template; None for the tokenizer's own.
        origin: where it comes from, for people.
        known_stops: what the tokenizer and generation_config.json name as ends.
    """

    tokenizer: Any
    text: str | None
    origin: str
    known_stops: tuple[str, ...] = ()

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: bool = False
    ) -> str:
        """The text of a conversation, just as `tokenizer.apply_chat_template` gives it.

        Args:
            messages: the conversation.
            tools: schemas of functions.
            prompt: end with what asks for an answer.

        Raises:
            RowError: if the template refuses the conversation.
        """
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            IndexError,
            RecursionError,
        ) as error:
            raise RowError(
                f"the chat template refuses it: {one_line(str(error), limit=200) or type(error).__name__}",
                "mend the row, or set data.template",
            ) from error

    def render_marked(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """As render, with the characters that the template's generation blocks hold.

        Raises:
            RowError: if the template refuses the conversation.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self.render(messages, tools)
        marked, spans = render_jinja_template(
            [list(messages)], tools=tools, chat_template=self.source(tools), return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )  # fmt: skip
        if marked[0] != text:
            raise RowError(
                "the chat template gives another text each time", "take what depends on the clock out of it"
            )
        return text, [(int(first), int(end)) for first, end in spans[0]]

    def source(self, tools: list[Any] | None = None) -> str:
        """The template's own text."""
        return self.text if self.text is not None else self.tokenizer.get_chat_template(tools=tools)

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it says itself what the model writes, in `{% generation %}` blocks."""
        return bool(_MARKERS.search(self.source()))

    @cached_property
    def frame(self) -> "Frame | None":
        """What it puts around an answer; None if that cannot be seen from a plain question and answer."""
        asked = [{"role": "user", "content": _QUESTION}]
        try:
            whole = self.render([*asked, {"role": "assistant", "content": _ANSWER}])
            bare, prompt = self.render(asked), self.render(asked, prompt=True)
        except RowError:
            return None
        if whole.count(_ANSWER) != 1:
            return None
        place = whole.index(_ANSWER)
        shared = common_beginning(whole[:place], prompt)  # the end of what asks for an answer
        before = len(bare) if whole.startswith(bare) and prompt.startswith(bare) else shared
        return Frame(header=whole[before:shared], tail=whole[place + len(_ANSWER) :])

    @cached_property
    def end_of_turn(self) -> str | None:
        """The token that ends an answer: the first known stop token behind it, else the added token right behind it."""
        if self.frame is None:
            return None
        tail = self.frame.tail
        stops = sorted((tail.index(stop), stop) for stop in self.known_stops if stop in tail)
        if stops:
            return stops[0][1]
        added = sorted((str(token) for token in self.tokenizer.get_added_vocab()), key=len, reverse=True)
        return next((token for token in added if tail.lstrip().startswith(token)), None)

    def surplus(self, text: str) -> int:
        """How many characters at the end of a conversation come after the token that ends its last answer."""
        if self.frame is None or self.end_of_turn is None or not text.endswith(self.frame.tail):
            return 0
        return len(self.frame.tail) - self.frame.tail.index(self.end_of_turn) - len(self.end_of_turn)


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around an answer.

    Attributes:
        header: before it, as far as the prompt that asks for an answer agrees.
        tail: after it, to the end of a conversation of one question.
    """

    header: str
    tail: str


def common_beginning(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # halving: comparing slices is much quicker than comparing characters
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def choose_template(tokenizer: Any, file: str | None, *, stops: tuple[str, ...] = ()) -> ChatTemplate | None:
    """The user's file, else the tokenizer's own; None if there is neither.

    Args:
        tokenizer: of transformers.
        file: what the config names.
        stops: known stop tokens.

    Raises:
        DataError: if the file is missing or no template.
    """
    if file is not None:
        return ChatTemplate(tokenizer, _read_template(file), f"the file {file}", stops)
    if tokenizer.chat_template:
        return ChatTemplate(tokenizer, None, "the tokenizer's own", stops)
    return None


def stand_in(tokenizer: Any) -> ChatTemplate:
    """ChatML, for a tokenizer without a template.

    Raises:
        DataError: if the tokenizer has no token that could end an answer.
    """
    end = "<|im_end|>" if "<|im_end|>" in tokenizer.get_added_vocab() else tokenizer.eos_token
    if not end:
        raise DataError.of(
            "the tokenizer has neither a chat template nor an end-of-sequence token", where="model.tokenizer",
            why="an answer could not be ended", fix="set data.template, and the tokenizer's eos_token",
        )  # fmt: skip
    escaped = str(end).replace("\\", "\\\\").replace("'", "\\'")
    return ChatTemplate(
        tokenizer, _CHATML.replace("END", escaped), f"ChatML, answers end with {end}", (str(end),)
    )


def _read_template(file: str) -> str:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError.of(f"there is no file {file}", where="data.template", fix="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError.of(
            f"{file} cannot be read", where="data.template", why=str(error), fix="give a UTF-8 text file"
        ) from error
    bare = re.sub(
        r"\{%-?\s*(end)?generation\s*-?%\}", "", text
    )  # transformers' own tag, unknown to plain Jinja
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(bare)
    except jinja2.TemplateSyntaxError as error:
        raise DataError.of(
            f"{file} is no Jinja template", where=f"{file}:{error.lineno}", why=one_line(str(error.message)), fix="mend the line"
        ) from error  # fmt: skip
    return text


def known_stop_ids(tokenizer: Any, directory: Path) -> set[int]:
    """The tokens that end an answer whatever the template: end of sequence, and those of generation_config.json."""
    found: set[int] = set()
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    settings = directory / "generation_config.json"
    if settings.is_file():
        try:
            value = read_json(settings).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            value = None  # loading the model says what is wrong with it
        found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return found

"""The chat template of a run: where it comes from, how it renders, what it puts around an answer."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono.data.formats import all_text, holds_surrogate
from unisono.data.rows import Conversation, Message, RowError
from unisono.data.template_limits import (
    CHARACTERS,
    CHARACTERS_EACH,
    CPU_S,
    MEMORY_BYTES,
    RenderingTimeout,
    bounded_rendering,
    line_in_template,
)
from unisono.errors import DataError
from unisono.files import read_json
from unisono.inputs import decode_text, expand, fault_of
from unisono.text import one_line

# Where a tokenizer has no template of its own. END is its end-of-turn token, or else its end-of-sequence token.
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + 'END' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LIMIT_BYTES = 1_000_000
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FILE = "the file "
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
            DataError: if the template itself is at fault.
        """
        text: str = self._bounded(
            lambda: self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        )
        self._refuse_enormous(len(text), messages, tools)
        if holds_surrogate(text):
            raise RowError(
                f"the chat template ({self.place()}) writes half of a surrogate pair",
                "write the whole character in it",
            )
        return text

    def _bounded(self, render: Callable[[], Any]) -> Any:
        """What `render` gives, within the limits of a rendering.

        Raises:
            RowError: if the template refuses the conversation.
            DataError: if the template itself is at fault: it is no template, or has no end in time or memory.
        """
        import jinja2

        try:
            with bounded_rendering():
                return render()
        except RenderingTimeout as error:
            why = f"rendering one conversation took more than {CPU_S:g} s of CPU time"
            raise self._unusable("the chat template does not come to an end", error, why=why) from error
        except MemoryError as error:
            why = f"rendering one conversation needed more than {MEMORY_BYTES >> 30} GiB of memory"
            raise self._unusable("the chat template needs too much memory", error, why=why) from error
        except jinja2.TemplateSyntaxError as error:
            why = one_line(str(error.message), limit=200)
            raise self._unusable(
                "the chat template is not valid Jinja", error, why=why, line=error.lineno
            ) from error
        except SyntaxError as error:  # its line is one of the Python code that Jinja makes of a template
            why = one_line(f"Python cannot compile it: {error.msg}", limit=200)
            raise self._unusable("the chat template is not valid Jinja", error, why=why) from error
        except Exception as error:  # a template is somebody else's program, and may raise whatever Python can
            said = one_line(str(error), limit=200) or type(error).__name__
            raise RowError(
                f"the chat template refuses it ({self.place(line_in_template(error))}): {said}",
                "fix the messages, or the template (data.template names another one)",
            ) from error

    def _unusable(self, what: str, error: BaseException, *, why: str, line: int | None = None) -> DataError:
        return DataError.of(
            what,
            where=self.place(line or line_in_template(error)),
            why=why,
            fix="fix the template there, or set data.template to a file with another one",
        )

    def _refuse_enormous(self, length: int, messages: Sequence[Message], tools: list[Any] | None) -> None:
        if length <= CHARACTERS:
            return
        given = len(all_text(Conversation(list(messages), tools)))
        if length > CHARACTERS_EACH * given:
            raise DataError.of(
                f"the chat template makes {length:,} characters of a conversation of {given:,}",
                where=self.place(),
                why=f"more than {CHARACTERS:,} are rendered only where the conversation is as long itself",
                fix="fix the template, or set data.template to a file with another one",
            )

    def place(self, line: int | None = None) -> str:
        """Where the template, or a line of it, stands."""
        if self.origin.startswith(_FILE):
            return self.origin.removeprefix(_FILE) + (f":{line}" if line else "")
        name = "the tokenizer's chat template" if self.text is None else self.origin
        return name + (f", line {line}" if line else "")

    def render_marked(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """As render, with the characters that the template's generation blocks hold.

        Raises:
            RowError, DataError: as `render`.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self.render(messages, tools)
        marked, spans = self._bounded(
            lambda: render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self.source(tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        )
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
        return ChatTemplate(tokenizer, _read_template(file), _FILE + file, stops)
    if tokenizer.chat_template:
        try:
            tokenizer.get_chat_template()
        except ValueError as error:  # several, and none of them is called default
            raise DataError.of(
                "the tokenizer has no default chat template",
                where="tokenizer",
                why=one_line(str(error), limit=200),
                fix="set data.template to a file with the one that is meant",
            ) from error
        return ChatTemplate(tokenizer, None, "the tokenizer's own", stops)
    return None


def fallback_template(tokenizer: Any) -> ChatTemplate:
    """ChatML, for a tokenizer without a template.

    Raises:
        DataError: if the tokenizer has no token that could end an answer.
    """
    end = "<|im_end|>" if "<|im_end|>" in tokenizer.get_added_vocab() else tokenizer.eos_token
    if not end:
        raise DataError.of(
            "the tokenizer has neither a chat template nor an end-of-sequence token",
            where="model.tokenizer",
            why="an answer could not be ended",
            fix="set data.template, and the tokenizer's eos_token",
        )
    escaped = str(end).replace("\\", "\\\\").replace("'", "\\'")
    return ChatTemplate(
        tokenizer, _CHATML.replace("END", escaped), f"ChatML, answers end with {end}", (str(end),)
    )


def _read_template(file: str) -> str:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = _read_text(file)
    bare = re.sub(
        r"\{%-?\s*(end)?generation\s*-?%\}", "", text
    )  # transformers' own tag, unknown to plain Jinja
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(bare)
    except jinja2.TemplateSyntaxError as error:
        raise DataError.of(
            f"{file} is no Jinja template",
            where=f"{file}:{error.lineno}",
            why=one_line(str(error.message)),
            fix="fix the line",
        ) from error
    except RecursionError as error:
        raise DataError.of(
            f"{file} is nested too deep", where=file, fix="write it with fewer brackets"
        ) from error
    return text


def _read_text(file: str) -> str:
    """The text of a template file, whatever is there under its name.

    Raises:
        DataError: if it is no UTF-8 text of a template's size.
    """
    path = expand(file)
    fault = fault_of(path, file)
    if fault is not None:
        raise DataError.of(fault.what, where="data.template", why=fault.why, fix=fault.fix)
    try:
        with path.open("rb") as stream:
            data = stream.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise DataError.of(
            f"{file} cannot be read",
            where="data.template",
            why=error.strerror or str(error),
            fix="check its permissions",
        ) from error
    if len(data) > _LIMIT_BYTES:
        raise DataError.of(
            f"{file} is no chat template: it has more than {_LIMIT_BYTES:,} bytes",
            where="data.template",
            why="the longest in use have some ten thousand",
            fix="name the template's file",
        )
    text = decode_text(data, file)
    if not isinstance(text, str):
        fault, where = text
        raise DataError.of(fault.what, where=where, why=fault.why, fix=fault.fix)
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

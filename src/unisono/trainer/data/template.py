"""The chat template of a run: its origin, its rendering within limits, and the text that it puts
around an answer.

A template is a third-party program that runs at least once for every row. Jinja's sandbox keeps it
from files and from Python's internals, but not from infinite loops or from strings that fill the
memory. So rendering one conversation has a limit of CPU time, of memory and of characters. CPU
time, because a busy or suspended machine is not the template's fault.
"""

import contextlib
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.base.errors import DataError
from unisono.base.files import TEMPLATE_BYTES, expand, read_given, read_object
from unisono.base.text import one_line
from unisono.guard.facts.limits import limit_memory
from unisono.trainer.data import Messages, RowError, ThoughtKey
from unisono.trainer.data.formats import all_strings, holds_surrogate, shown
from unisono.trainer.data.thoughts import key_in

# For tokenizers without a template. END is the end-of-turn token, or else the end-of-sequence
# token.
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + 'END' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Arguments of apply_chat_template, which it would not pass on.
_CONVERSATION = {
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
_FILE = "the file "
_QUESTION, _ANSWER, _THOUGHT = "unisonoquestion", "unisonoanswer", "unisonothought"


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, or its replacement.

    Attributes:
        tokenizer: of transformers.
        text: the argument of apply_chat_template; None for the tokenizer's own template.
        origin: where it comes from, for messages.
        known_stops: the stop tokens of the tokenizer and generation_config.json.
        settings: variables of the template, besides messages and tools.
    """

    tokenizer: Any
    text: str | None
    origin: str
    known_stops: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict, kw_only=True)

    def render(
        self,
        messages: Messages,
        tools: list[Any] | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """The text of a conversation, as `tokenizer.apply_chat_template` gives it.

        Args:
            messages: the conversation.
            tools: function schemas.
            prompt: whether to add the generation prompt.

        Raises:
            RowError: if the template refuses the conversation.
            DataError: if the template itself is invalid.
        """
        text = self._rendered(self.as_read(messages), tools, prompt=prompt)
        self._refuse_enormous(len(text), messages, tools)
        if holds_surrogate(text):
            raise RowError(
                f"the chat template ({self.place()}) writes an unpaired surrogate",
                "write the full character in it",
            )
        return text

    def as_read(self, messages: Messages) -> Messages:
        """The messages as the template reads them: those of text as they are."""
        return messages

    def try_render(self, messages: Messages, tools: list[Any] | None, *, prompt: bool = False) -> str | None:
        """The text like `render`, or None: a template may refuse a part of a conversation although
        it accepts the full one.
        """
        try:
            return self.render(messages, tools, prompt=prompt)
        except RowError:
            return None

    def _rendered(self, messages: Messages, tools: list[Any] | None, *, prompt: bool) -> str:
        direct = self._direct if tools is None and not self.settings and _are_plain(messages) else None
        agrees = direct is not None and direct.agrees.get(prompt)
        if direct is not None and agrees:
            return self._bounded(lambda: direct.render(messages, prompt=prompt))
        text: str = self._bounded(
            lambda: self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.settings,
            )
        )
        if direct is not None and agrees is None:
            direct.agrees[prompt] = False
            with contextlib.suppress(RowError, DataError):  # another release of transformers
                again: str = self._bounded(lambda: direct.render(messages, prompt=prompt))
                direct.agrees[prompt] = again == text
        return text

    @cached_property
    def _direct(self) -> "_DirectRendering | None":
        return _DirectRendering(self.tokenizer, self.text) if _renders_as_usual(self.tokenizer) else None

    def _bounded(self, render: Callable[[], Any]) -> Any:
        """The result of `render`, within the limits of a rendering.

        Raises:
            RowError: if the template refuses the conversation.
            DataError: if the template itself is invalid, or exceeds the limits of time or memory.
        """
        import jinja2

        try:
            with bounded_rendering():
                return render()
        except RenderingTimeout as error:
            why = f"rendering one conversation took more than {CPU_S:g} s of CPU time"
            raise self._unusable("the chat template does not terminate", error, why=why) from error
        except MemoryError as error:
            why = f"rendering one conversation needed more than {MEMORY_BYTES >> 30} GiB of memory"
            raise self._unusable("the chat template needs too much memory", error, why=why) from error
        except jinja2.TemplateSyntaxError as error:
            why = one_line(str(error.message), limit=200)
            raise self._unusable(
                "the chat template is not valid Jinja", error, why=why, line=error.lineno
            ) from error
        except SyntaxError as error:  # its line number is that of the Python code generated by Jinja
            why = one_line(f"Python cannot compile it: {error.msg}", limit=200)
            raise self._unusable("the chat template is not valid Jinja", error, why=why) from error
        except Exception as error:  # a template is a third-party program, and may raise any exception
            message = one_line(str(error), limit=200) or type(error).__name__
            raise RowError(
                f"the chat template refuses it ({self.place(line_in_template(error))}): {message}",
                "fix the messages, or the template (data.template sets a different one)",
            ) from error

    def _unusable(self, what: str, error: BaseException, *, why: str, line: int | None = None) -> DataError:
        return DataError.of(
            what,
            where=self.place(line or line_in_template(error)),
            why=why,
            fix="fix the template there, or set data.template to a file with a different one",
        )

    def _refuse_enormous(self, length: int, messages: Messages, tools: list[Any] | None) -> None:
        if length <= CHARACTERS:
            return
        given = len(all_strings(list(messages), tools))
        if length > CHARACTERS_EACH * given:
            raise DataError.of(
                f"the chat template renders a conversation of {given:,} characters to {length:,}",
                where=self.place(),
                why=f"more than {CHARACTERS:,} are allowed only for conversations of similar length",
                fix="fix the template, or set data.template to a file with a different one",
            )

    def place(self, line: int | None = None) -> str:
        """The location of the template, or of a line of it."""
        if self.origin.startswith(_FILE):
            return self.origin.removeprefix(_FILE) + (f":{line}" if line else "")
        name = "the tokenizer's chat template" if self.text is None else self.origin
        return name + (f", line {line}" if line else "")

    def render_marked(self, messages: Messages, tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """The text like `render`, and the character spans of the template's generation blocks.

        Raises:
            RowError, DataError: like `render`.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self.render(messages, tools)
        marked, spans = self._bounded(
            lambda: render_jinja_template(
                [list(self.as_read(messages))],
                tools=tools,
                chat_template=self.source(tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        )
        if marked[0] != text:
            raise RowError(
                "the chat template gives a different text each time",
                "remove what depends on the clock from it",
            )
        return text, [(int(first), int(end)) for first, end in spans[0]]

    def source(self, tools: list[Any] | None = None) -> str:
        """The template's own text."""
        return self.text if self.text is not None else self.tokenizer.get_chat_template(tools=tools)

    def reads_setting(self, name: str) -> bool:
        """Whether it reads a variable of this name that is not one of the conversation's."""
        return name not in _CONVERSATION and bool(re.search(rf"\b{re.escape(name)}\b", self.source()))

    def with_settings(self, settings: Mapping[str, object]) -> "ChatTemplate":
        """The template with variables of its own.

        Raises:
            RowError: if it does not read one of them.
        """
        for name in settings:
            if not name.isidentifier() or not self.reads_setting(name):
                raise RowError(f"the chat template reads no variable {shown(name)}", "remove it")
        return replace(self, settings={**self.settings, **settings})

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it marks what the model writes with `{% generation %}` blocks."""
        return bool(_MARKERS.search(self.source()))

    @cached_property
    def thought_key(self) -> ThoughtKey | None:
        """The key of a message under which it reads a thought; None if there is none."""
        return key_in(self.source())

    @cached_property
    def keeps_thoughts_in_content(self) -> bool:
        """Whether it knows thoughts in the content of an answer, and keeps them in the last one."""
        answer = {"role": "assistant", "content": "\n".join(("<think>", _THOUGHT, "</think>", "", _ANSWER))}
        text = self.try_render([{"role": "user", "content": _QUESTION}, answer], None)
        return text is not None and _THOUGHT in text and "</think>" in self.source()

    @cached_property
    def frame(self) -> "Frame | None":
        """The text that it puts around an answer; None if a plain question and answer do not show
        it.
        """
        question = [{"role": "user", "content": _QUESTION}]
        try:
            whole = self.render([*question, {"role": "assistant", "content": _ANSWER}])
            bare, prompt = self.render(question), self.render(question, prompt=True)
        except RowError:
            return None
        if whole.count(_ANSWER) != 1:
            return None
        position = whole.index(_ANSWER)
        shared = common_beginning(whole[:position], prompt)  # the end of the generation prompt
        before = len(bare) if whole.startswith(bare) and prompt.startswith(bare) else shared
        return Frame(header=whole[before:shared], tail=whole[position + len(_ANSWER) :])

    @cached_property
    def end_of_turn(self) -> str | None:
        """The token that ends an answer.

        The first known stop token after it, else the added token right after it; if it has one, a
        token that it also writes after an earlier answer: Phi's ends each with `<|end|>`, and only
        the last one with the end of sequence, too.
        """
        if self.frame is None:
            return None
        tail, shared = self.frame.tail, common_beginning(self.frame.tail, self._after_earlier_answer)
        stops = [stop for stop in self.known_stops if stop in tail]
        if not any(stop in tail[:shared] for stop in stops) and (added := self._added_at(tail[:shared])):
            return added
        return min(stops, key=tail.index) if stops else self._added_at(tail)

    @property
    def stop_words(self) -> tuple[str | None, ...]:
        """The texts of the tokens that end an answer."""
        return (self.end_of_turn,)

    def prompt_ids(self, messages: Messages, tools: list[Any] | None = None) -> list[int] | None:
        """The tokens of a prompt, if they are not those of its text; None: encode what `render`
        gives.
        """
        del messages, tools
        return None

    @cached_property
    def stop_of_next_turn(self) -> str | None:
        """The stop token with which the question after an answer begins, if the template ends no
        answer itself, as GLM's; else None.
        """
        if self.frame is None or self.frame.tail.strip():
            return None
        following = self._after_earlier_answer.lstrip()
        return next((stop for stop in self.known_stops if following.startswith(stop)), None)

    @cached_property
    def end_of_earlier_answer(self) -> str | None:
        """The added token that it writes after an earlier answer, if that is not the one which ends
        the last answer; else None.

        Harmony's: `<|end|>` ends any message, and the model ends an answer with `<|return|>`, which
        templates write only at the end.
        """
        following = self._after_earlier_answer
        if self.end_of_turn is None or self.end_of_turn in following:
            return None
        return self._added_at(following)

    @cached_property
    def _after_earlier_answer(self) -> str:
        """The text between an answer and the question after it."""
        question = {"role": "user", "content": _QUESTION}
        text = self.try_render([question, {"role": "assistant", "content": _ANSWER}, question], None)
        return "" if text is None else text.partition(_ANSWER)[2].rpartition(_QUESTION)[0]

    def _added_at(self, text: str) -> str | None:
        """The longest added token with which a text begins."""
        added = sorted((str(token) for token in self.tokenizer.get_added_vocab()), key=len, reverse=True)
        return next((token for token in added if text.lstrip().startswith(token)), None)

    def surplus(self, text: str) -> int:
        """The number of characters after the token that ends the last answer of a conversation."""
        if self.frame is None or self.end_of_turn is None or not text.endswith(self.frame.tail):
            return 0
        return len(self.frame.tail) - self.frame.tail.index(self.end_of_turn) - len(self.end_of_turn)


class _DirectRendering:
    """Renders messages of role and content with what apply_chat_template hands to a compiled
    template, without what it repeats for each call.

    That takes a fifth of its time. A release of transformers may hand over something else, so the
    first texts with and without the generation prompt are compared.

    Attributes:
        agrees: whether the text was the same, with the generation prompt (True) and without; absent
            before the comparison.
    """

    def __init__(self, tokenizer: Any, text: str | None) -> None:
        self.agrees: dict[bool, bool] = {}
        self._tokenizer = tokenizer
        self._text = text

    def render(self, messages: Messages, *, prompt: bool) -> str:
        """The text of a conversation.

        Each rendering has messages of its own, as in apply_chat_template.
        """
        template, special_tokens = self._compiled
        copies = [dict(message) for message in messages]
        return template.render(
            messages=copies, tools=None, documents=None, add_generation_prompt=prompt, **special_tokens
        )

    @cached_property
    def _compiled(self) -> tuple[Any, dict[str, str]]:
        """The template, as transformers has compiled it before, and the special tokens by name.

        Jinja copies a template's globals for each rendering, and copies those of a plain dict in a
        fifth of the time of its own chain of them.
        """
        from transformers.utils import chat_template_utils

        text = self._tokenizer.get_chat_template(self._text)
        compiled = chat_template_utils._compile_jinja_template(text)  # noqa: SLF001 - not public in 5.23
        template = object.__new__(type(compiled))
        vars(template).update(vars(compiled), globals=dict(compiled.globals))
        return template, self._tokenizer.special_tokens_map


def _are_plain(messages: Messages) -> bool:
    """Whether messages have a role and a content, both text, and nothing else, so that transformers
    passes them on as they are.
    """
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return False
        if type(message.get("role")) is not str or type(message.get("content")) is not str:
            return False
    return bool(messages)


def _renders_as_usual(tokenizer: Any) -> bool:
    """Whether a tokenizer has transformers' own methods for chat templates."""
    from transformers import PreTrainedTokenizerBase as Base

    names = ("apply_chat_template", "get_chat_template")
    are_usual = (
        getattr(getattr(tokenizer, name, None), "__func__", None) is getattr(Base, name) for name in names
    )
    return all(are_usual) and type(tokenizer).special_tokens_map is Base.special_tokens_map


@dataclass(frozen=True, slots=True)
class Frame:
    """The text around an answer.

    Attributes:
        header: before it, as far as it agrees with the generation prompt.
        tail: after it, to the end of a conversation with one question.
    """

    header: str
    tail: str


def common_beginning(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # bisection: comparing slices is much faster than comparing characters
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def choose_template(tokenizer: Any, file: str | None, *, stops: tuple[str, ...] = ()) -> ChatTemplate | None:
    """The template of the user's file, else the tokenizer's own; None if there is neither.

    Args:
        tokenizer: of transformers.
        file: `data.template` of the config.
        stops: known stop tokens.

    Raises:
        DataError: if the file is missing or is not a valid template.
    """
    if file is not None:
        return ChatTemplate(tokenizer, _read_template(file), _FILE + file, stops)
    if tokenizer.chat_template:
        try:
            tokenizer.get_chat_template()
        except ValueError as error:  # it has several, and none is called default
            raise DataError.of(
                "the tokenizer has no default chat template",
                where="tokenizer",
                why=one_line(str(error), limit=200),
                fix="set data.template to a file with the one to use",
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
            why="no token could end an answer",
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
    # A tag of transformers, unknown to plain Jinja.
    bare = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(bare)
    except jinja2.TemplateSyntaxError as error:
        raise DataError.of(
            f"{file} is not a valid Jinja template",
            where=f"{file}:{error.lineno}",
            why=one_line(str(error.message)),
            fix="fix the line",
        ) from error
    except (RecursionError, ValueError) as error:  # thousands of brackets, or of digits
        raise DataError.of(
            f"{file} is nested too deeply, or has a number that is too long",
            where=file,
            fix="write it with fewer brackets and digits",
        ) from error
    return text


def _read_text(file: str) -> str:
    """The text of a template file.

    Raises:
        DataError: if it cannot be read, is not UTF-8, or is too large for a template.
    """
    text = read_given(expand(file), file, most_bytes=TEMPLATE_BYTES)
    if not isinstance(text, str):
        fault, where = text
        location = "data.template" if where == file else where
        raise DataError.of(fault.what, where=location, why=fault.why, fix=fault.fix)
    return text


def known_stop_ids(tokenizer: Any, directory: Path) -> set[int]:
    """The tokens that end an answer with any template: end of sequence, and those of
    generation_config.json.
    """
    stop_ids: set[int] = set()
    if isinstance(tokenizer.eos_token_id, int):
        stop_ids.add(tokenizer.eos_token_id)
    # Where it is unreadable, loading the model reports the error.
    value = read_object(directory / "generation_config.json").get("eos_token_id")
    stop_ids.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return stop_ids


CPU_S = 5.0  # conversations of megabytes take tenths of a second
_KILLED_AFTER_S = 6.0  # CPU seconds; some C code (comparing nested lists) never checks for signals
_TICK_S = (
    0.5  # CPU seconds; after the limit every tick raises again, in case a library swallows the exception
)
_MEASURED_EVERY = 32  # renderings; the text of each may stay in memory, in general at most CHARACTERS
MEMORY_BYTES = 1 << 30
CHARACTERS = 1 << 24  # or CHARACTERS_EACH for every character of the conversation, if that is more
CHARACTERS_EACH = 4


class RenderingTimeout(Exception):  # noqa: N818 - named for what happened
    """The template has exceeded its CPU time."""


@dataclass
class _Meter:
    """State of the renderings in this process; only the main thread uses it."""

    is_armed: bool = False
    is_rendering: bool = False
    renderings: int = 0
    ticks: int = 0  # of the timer, since the start of the present rendering


_meter = _Meter()


def timers_armed() -> contextlib.AbstractContextManager[None]:
    """A context with armed timers, in which renderings are bounded; around many renderings it saves
    arming them for each.

    Templates are rendered in the main thread of a task; Python delivers no signals to other
    threads, so nothing is bounded there.
    """
    if _meter.is_armed or threading.current_thread() is not threading.main_thread():
        return _NOTHING
    return _arming()


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _arming() -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, _tick)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    _meter.is_armed, _meter.renderings = True, 0
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _KILLED_AFTER_S)  # sends TEMPLATE_HAS_NO_END
        signal.setitimer(signal.ITIMER_PROF, _TICK_S, _TICK_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.signal(signal.SIGPROF, before)
        _meter.is_armed = False


@contextlib.contextmanager
def bounded_rendering() -> Iterator[None]:
    """A context to render one conversation in at most CPU_S seconds of CPU time and MEMORY_BYTES of
    additional memory.

    Raises:
        TookTooLong: when the time is over; if C code is busy and does not return, the kernel ends
            the process later.
        MemoryError: by whatever asks for more.
    """
    with timers_armed():
        if _meter.is_armed and _meter.renderings % _MEASURED_EVERY == 0:
            limit_memory(MEMORY_BYTES)
        _meter.renderings += 1
        _meter.ticks = 0
        _meter.is_rendering = True
        try:
            yield
        finally:
            _meter.is_rendering = False


def _tick(_number: int, _frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, _KILLED_AFTER_S)  # Python code is running: it can be interrupted
    _meter.ticks += 1
    if _meter.is_rendering and _meter.ticks * _TICK_S >= CPU_S:
        raise RenderingTimeout


def line_in_template(error: BaseException) -> int | None:
    """The line of the template at which an exception was raised, from Jinja's entries in the
    traceback.
    """
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line

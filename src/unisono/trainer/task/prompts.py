"""Turns requests of `unisono serve` into tokens and pictures, in a process of its own, so that none
costs more than itself.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import queue
import resource
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

import torch

from unisono.base import child
from unisono.base.errors import UnisonoError
from unisono.base.events import describe_crash
from unisono.base.text import one_line
from unisono.guard.facts.limits import memory_limited
from unisono.guard.supervise.task_process import how_it_ended
from unisono.trainer.config.sections import PixelsSection
from unisono.trainer.data import PictureSource, RowError
from unisono.trainer.data.formats import messages_of
from unisono.trainer.data.pictures.decoding import MOST_PIXELS, BadPictureError
from unisono.trainer.data.template import ChatTemplate, common_beginning
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.model.token_grammars import GrammarError, LLGrammar, TokenGrammars
from unisono.trainer.plan.talk_messages import (
    THOUGHT_MARKS,
    AnswerForm,
    Ask,
    FailedAsk,
    PromptRequest,
    RefusedAsk,
    TextsRequest,
    Thought,
)
from unisono.trainer.task.answer_grammars import (
    TAGGED,
    CallForm,
    GrammarWriter,
    call_form_of,
    special_marks,
)
from unisono.trainer.task.generation import ids_with_pictures, tokens_of_text
from unisono.trainer.task.inference import InferenceModel, TooManyTokens, encode_prompt
from unisono.trainer.task.prompt_pictures import read_picture, take_sent, with_expansions

if TYPE_CHECKING:
    import numpy as np

_CPU_S = 20.0
"""CPU seconds for one prompt; a prompt of a million tokens takes two or three."""
_WALL_S = 10 * _CPU_S
_OUT_OF_TIME = (-signal.SIGXCPU, -child.TEMPLATE_HAS_NO_END, -child.TOKENIZER_HAS_NO_END)
"""Return codes of a process that the kernel ended for its CPU time."""
_MEMORY_BYTES = 2 << 30
_TOO_MUCH = f"more than {_MEMORY_BYTES >> 30} GiB of memory"
_ROLES = {"developer": "system"}
"""Roles of OpenAI's protocol that no template knows, and what they mean."""
_THOUGHT_TOKENS = 16  # at the end of a prompt, which show whether it opens a thought
_EFFORT_SETTINGS = ("reasoning_effort", "enable_thinking", "thinking")
"""Variables by which chat templates let a model think more or less, or not at all."""
_PROBE = [{"role": "user", "content": "hello"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class RefusedPrompt(Exception):  # noqa: N818 - named for what happened
    """A request that cannot be answered.

    Attributes:
        problem: the parameter of the request, or `length`: its number of tokens.
    """

    def __init__(self, problem: str, text: str, fix: str = "") -> None:
        super().__init__(problem, text, fix)
        self.problem, self.text, self.fix = problem, text, fix


@dataclass(frozen=True)
class PromptInputs:
    """A prompt as the model gets it.

    Attributes:
        ids: its tokens.
        pictures: arguments of the forward for its pictures, by name; empty: it has none.
        thought: whether the answer may begin with a thought.
        grammar: of the answer; empty: any text.
    """

    ids: Sequence[int]
    pictures: Mapping[str, "np.ndarray[Any, Any]"] = field(default_factory=dict)
    thought: Thought = "none"
    grammar: str = ""


@dataclass(frozen=True)
class TextInputs:
    """The texts of a request as the model gets them: the tokens of each."""

    rows: list[list[int]]


ReadPrompt = PromptInputs | TextInputs | RefusedAsk | FailedAsk
"""A prompt, or why there is none."""


@dataclass(frozen=True)
class Prepared:
    """A request whose prompt has been read; `grammar`: of its answer."""

    ask: Ask
    prompt: ReadPrompt
    grammar: LLGrammar | None = None


@dataclass(frozen=True)
class PromptReader:
    """Turns requests into tokens.

    Attributes:
        opened: the model.
        template: for chats; None if there is none.
        grammars: of answers that must have a form.
    """

    opened: InferenceModel
    template: ChatTemplate | None
    grammars: TokenGrammars

    def read(self, question: PromptRequest) -> PromptInputs:
        """What the model continues: fewer tokens than its context has, and pictures.

        Raises:
            RefusedPrompt: if there are none, or too many.
        """
        context = self.opened.context
        images: list[Any] = []
        try:
            if question.messages is not None:
                ids = self._ids_of_chat(question, question.messages, images)
            else:
                ids = self._ids_of_text(question.prompt)
        except TooManyTokens as error:
            what = f"the prompt has more than {error.least} tokens, and the model reads {context}"
            raise RefusedPrompt("length", what, "shorten it") from None
        if len(ids) >= context + (question.max_tokens == 0):
            what = f"the prompt has {len(ids)} tokens, and the model reads {context}"
            raise RefusedPrompt("length", what, "shorten it")
        self._refuse_biases(question)
        thought = self._thought(ids) if question.messages is not None else "none"
        grammar = self._grammar(question.form, thought) if question.form is not None else ""
        return PromptInputs(ids, self._inputs_of(images), thought, grammar)

    def _refuse_biases(self, question: PromptRequest) -> None:
        odd = next((i for i, _ in question.sampling.logit_bias if not 0 <= i < self._vocabulary), None)
        if odd is not None:
            last = self._vocabulary - 1
            raise RefusedPrompt("logit_bias", f"the model has no token {odd}", f"its tokens are 0 to {last}")

    def _thought(self, ids: Sequence[int]) -> Thought:
        """Whether the answer to a chat with these tokens may begin with a thought."""
        opening, closing = THOUGHT_MARKS
        if self.template is None or closing not in self.template.source():
            return "none"
        end = self.opened.tokenizer.decode(ids[-_THOUGHT_TOKENS:], skip_special_tokens=False).rstrip()
        if end.endswith(opening):
            return "open"
        return "none" if end.endswith(closing) else "possible"

    def _grammar(self, form: AnswerForm, thought: Thought) -> str:
        """The grammar of an answer.

        Raises:
            RefusedPrompt: if it cannot be used, with the parameter at fault.
        """
        writer = GrammarWriter(special_marks(self.opened.tokenizer), self._call_form)
        parts = [AnswerForm(schema=form.schema)] if form.schema is not None else []
        parts += [AnswerForm(tools=(tool,), must_call=True) for tool in form.tools]
        for part in (*parts, form):
            try:
                whole = writer.write(part, thought)
                self.grammars.check(whole)
            except GrammarError as error:
                name = f"the function {part.tools[0]['function']['name']}" if part.tools else "the schema"
                problem = "tools" if part.tools else "response_format"
                what = f"answers cannot be constrained to {name}: {one_line(str(error), limit=300)}"
                raise RefusedPrompt(problem, what) from error
        return writer.write(form, thought)

    @cached_property
    def _call_form(self) -> CallForm:
        """The form in which the chat template writes calls; found by trying."""
        call = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "find", "arguments": {"of": "it"}},
        }
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            assert self.template is not None
            before = self.template.render(_PROBE, [_PROBE_TOOL], prompt=True)
            written = self.template.render([*_PROBE, answer], [_PROBE_TOOL])
        except (RowError, UnisonoError):
            return TAGGED
        return call_form_of(written[common_beginning(before, written) :])

    def _ids_of_text(self, prompt: str | list[int]) -> Sequence[int]:
        if isinstance(prompt, str):
            try:
                ids = tokens_of_text(self.opened, prompt, most=self.opened.context)
            except UnisonoError as error:
                raise RefusedPrompt("prompt", error.problems[0].what, error.problems[0].fix) from error
        else:
            ids = prompt
        odd = next((i for i in ids if not 0 <= i < self._vocabulary), None)
        if odd is not None:
            last = self._vocabulary - 1
            raise RefusedPrompt("prompt", f"the model has no token {odd}", f"its tokens are 0 to {last}")
        if not ids:
            raise RefusedPrompt("prompt", "the prompt is empty", "write one")
        of_pictures = set(self.opened.processor.image_ids) if self.opened.processor is not None else set()
        odd = next((i for i in ids if i in of_pictures), None)
        if odd is not None:
            what = f"the token {odd} stands for a part of a picture"
            raise RefusedPrompt("prompt", what, "send pictures in messages, to /v1/chat/completions")
        return ids

    def _ids_of_chat(self, question: PromptRequest, messages: list[Any], images: list[Any]) -> Sequence[int]:
        """The tokens of a chat; its pictures are added to `images`."""
        tools = question.tools
        if self.template is None:
            raise RefusedPrompt(
                "messages",
                "the model has no chat template, and no token that could end an answer",
                "use /v1/completions",
            )
        if tools and not self._writes_tools:
            raise RefusedPrompt("tools", "the model's chat template does not write tools", "omit them")
        try:
            sources: list[PictureSource] = []
            if self.opened.processor is not None:
                messages, sources = take_sent(messages, self.opened.processor)
            turns = [
                turn | {"role": _ROLES.get(turn["role"], turn["role"])}
                for turn in messages_of(messages, "messages")
            ]
            images += self._images(sources)
            template = self._template_for(question, self.template)
            if question.continues:
                return self._continued(template, turns, tools, images)
            return ids_with_pictures(
                self.opened,
                template,
                turns,
                self._expansions(images),
                tools,
                most=self.opened.context,
            )
        except RowError as error:
            raise RefusedPrompt("messages", error.why, error.fix) from error
        except UnisonoError as error:
            raise RefusedPrompt("messages", error.problems[0].what, error.problems[0].fix) from error

    @staticmethod
    def _template_for(question: PromptRequest, template: ChatTemplate) -> ChatTemplate:
        """The template with the variables that a request sets.

        Raises:
            RefusedPrompt: if it does not read them.
        """
        settings = dict(question.template_settings)
        if question.effort is not None:
            name = next((one for one in _EFFORT_SETTINGS if template.reads_setting(one)), None)
            if name is None:
                what = "the model's chat template has no setting for reasoning"
                raise RefusedPrompt("reasoning_effort", what, "omit it")
            settings[name] = question.effort if name == "reasoning_effort" else question.effort != "none"
        try:
            return template.with_settings(settings) if settings else template
        except RowError as error:
            raise RefusedPrompt("chat_template_kwargs", error.why, error.fix) from error

    def _continued(
        self, template: ChatTemplate, turns: list[Any], tools: list[Any] | None, images: list[Any]
    ) -> Sequence[int]:
        """The tokens of a chat up to the end of its last message, which is not ended."""
        written = template.prompt_ids(turns, tools) is not None
        content = turns[-1]["content"].rstrip()
        text = template.render(turns, tools)
        end = text.rfind(content)
        if written or not content or end < 0:
            what = "the model's chat template does not write the last message as it is"
            raise RefusedPrompt("continue_final_message", what, "end the conversation with a question")
        text = text[: end + len(content)]
        if self.opened.processor is not None:
            text = with_expansions(text, self._expansions(images), self.opened.processor)
        return encode_prompt(self.opened.tokenizer, text, special=False, most=self.opened.context)

    def _images(self, sources: Sequence[PictureSource]) -> list[Any]:
        """The pictures of Pillow.

        Raises:
            RefusedPrompt: if one cannot be used, or they are too large together.
        """
        images: list[Any] = []
        pixels = 0
        for source in sources:
            images.append(_decoded(source, self.opened.pixels))
            pixels += images[-1].width * images[-1].height
            if pixels > MOST_PIXELS:
                what = f"the pictures have more than {MOST_PIXELS:,} pixels together"
                raise RefusedPrompt("messages", what, "send smaller ones, or fewer")
        return images

    def _expansions(self, images: Sequence[Any]) -> list[str]:
        processor = self.opened.processor
        several = len(images) > 1
        return [] if processor is None else [processor.expansion(i.size, several=several) for i in images]

    def _inputs_of(self, images: Sequence[Any]) -> Mapping[str, "np.ndarray[Any, Any]"]:
        processor = self.opened.processor
        if processor is None or not images:
            return {}
        try:
            with memory_limited(_MEMORY_BYTES):
                parts = [processor.inputs(image, several=len(images) > 1) for image in images]
        except MemoryError:
            raise RefusedPrompt("messages", f"the pictures need {_TOO_MUCH}", "send smaller ones") from None
        except RowError as error:
            raise RefusedPrompt("messages", error.why, "send a different picture") from error
        seen = PictureInputs.of(parts, processor.image_ids, torch.device("cpu"))
        assert seen is not None
        return {name: tensor.numpy() for name, tensor in seen.tensors.items()}

    @cached_property
    def _vocabulary(self) -> int:
        return int(self.opened.forward.loaded.base.get_input_embeddings().weight.shape[0])

    @cached_property
    def _writes_tools(self) -> bool:
        """Whether the chat template writes the schemas of functions; found by trying."""
        assert self.template is not None
        try:
            text = self.template.render(_PROBE, [_PROBE_TOOL], prompt=True)
            return text != self.template.render(_PROBE, prompt=True)
        except (RowError, UnisonoError):
            return False


class QuestionReader(Protocol):
    """Turns requests of one kind into tokens."""

    def read(self, question: Any) -> PromptInputs | TextInputs:
        """The tokens of a request.

        Raises:
            RefusedPrompt: if it cannot be answered.
        """


@dataclass(frozen=True)
class PromptReaders:
    """The readers of prompts of a model and of its adapters, by name."""

    by_adapter: Mapping[str, QuestionReader]

    def of(self, question: PromptRequest | TextsRequest) -> QuestionReader:
        """The one for a request."""
        return self.by_adapter[question.adapter]


def _decoded(source: PictureSource, pixels: PixelsSection) -> Any:
    """The picture of Pillow.

    Raises:
        RefusedPrompt: if it cannot be decoded.
    """
    try:
        with memory_limited(_MEMORY_BYTES):
            return read_picture(source, pixels)
    except (BadPictureError, MemoryError) as error:
        is_large = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        why = f"decoding it needs {_TOO_MUCH}" if is_large else str(error)
        what = f"{source.name} cannot be used: {why}"
        raise RefusedPrompt("messages", what, "send a different one") from error


class PromptProcess:
    """A forked process that reads prompts, one at a time, with this process's tokenizer and
    template.
    """

    def __init__(self, readers: PromptReaders, prepared: "queue.SimpleQueue[Any]") -> None:
        """Forks the process: before other threads compute, and before the first request.

        Args:
            readers: what it does.
            prepared: gets each request with its tokens.
        """
        self._readers = readers
        self._prepared = prepared
        self._asks: queue.SimpleQueue[Ask | PromptReaders] = queue.SimpleQueue()
        self._start()
        threading.Thread(target=self._run, name="prompts", daemon=True).start()

    def submit(self, ask: Ask) -> None:
        """Queues a request."""
        self._asks.put(ask)

    def renew(self, readers: PromptReaders) -> None:
        """Queues different readers for the requests after this: those of a new process."""
        self._asks.put(readers)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()

    def _start(self) -> None:
        forks = multiprocessing.get_context("fork")
        self._connection, theirs = forks.Pipe()
        arguments = (self._readers, theirs, self._connection, os.getpid())
        self._process = forks.Process(target=_read_prompts, args=arguments, name="prompts", daemon=True)
        self._process.start()
        theirs.close()

    def _run(self) -> None:
        while True:
            ask = self._asks.get()
            if isinstance(ask, PromptReaders):
                self._readers = ask
                self._process.kill()
                self._restart()
            else:
                self._prepared.put(self._with_grammar(ask, self._answer(ask)))

    def _with_grammar(self, ask: Ask, prompt: "ReadPrompt") -> Prepared:
        """The request, with the grammar of its answer.

        The grammar is compiled in this process once more, in this thread: it cannot be sent.
        """
        if not isinstance(prompt, PromptInputs) or not prompt.grammar:
            return Prepared(ask, prompt)
        try:
            reader = self._readers.of(ask.question)
            assert isinstance(reader, PromptReader)
            return Prepared(ask, prompt, reader.grammars.compile(prompt.grammar))
        except GrammarError as error:
            return Prepared(ask, describe_failure(ask.id, error))

    def _answer(self, ask: Ask) -> "ReadPrompt":
        """What the process makes of a request.

        If it is killed from outside, a new one gets the request, once.
        """
        returncode = 0
        for _ in range(2):
            is_late = False
            try:
                self._connection.send(ask)
                is_late = not self._connection.poll(_WALL_S)
                if not is_late:
                    answer: ReadPrompt = self._connection.recv()
                    return answer
                self._process.kill()
            except (EOFError, OSError):
                pass
            returncode = self._restart()
            if is_late or returncode in _OUT_OF_TIME:
                what = f"to read it took more than {_CPU_S:g} s of CPU time"
                return RefusedAsk(ask.id, ask.question.part, what, "shorten it")
        return FailedAsk(ask.id, f"the process that reads prompts ended: {how_it_ended(returncode)}", "")

    def _restart(self) -> int:
        """Starts a new process after the end of the last, whose exit code it gives."""
        self._process.join()
        returncode = self._process.exitcode or 0
        self._connection.close()
        self._start()
        return returncode


def _read_prompts(readers: PromptReaders, connection: Connection, parents: Connection, parent: int) -> None:
    """The body of the process. An exception is the answer to its request."""
    child.forked_by = parent
    child.end_with_front(parent)
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a process that exceeds its limits
    torch.set_num_threads(1)  # the threads of the parent are not in this process
    gc.freeze()  # the model's objects are shared with the parent as long as nothing looks at them
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(_bounded_answer(readers, connection.recv()))


def _bounded_answer(readers: PromptReaders, ask: Ask) -> ReadPrompt:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + _CPU_S)
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_limit))  # then SIGXCPU
    try:
        return readers.of(ask.question).read(ask.question)
    except RefusedPrompt as refused:
        return RefusedAsk(ask.id, refused.problem, refused.text, refused.fix)
    except Exception as error:  # noqa: BLE001 - the edge of a request: it fails alone
        return describe_failure(ask.id, error)


def describe_failure(number: int, error: Exception) -> FailedAsk:
    """An unexpected exception of a request, and where it was raised, which is for the operator
    alone.
    """
    crash = describe_crash(error)
    return FailedAsk(number, crash["error"], crash["where"])

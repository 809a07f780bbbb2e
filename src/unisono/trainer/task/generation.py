"""The tasks `generate` (answers to one prompt or a file of them) and `chat` (a conversation over
stdin and the report pipe).
"""

import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.base.errors import DataError, Problem, UnisonoError, UsageError
from unisono.base.events import Reporter
from unisono.guard.supervise.codec import decode_message
from unisono.trainer.data import PICTURE, Message, RowError
from unisono.trainer.data.template import ChatTemplate
from unisono.trainer.model.engine import answer_prompts
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.model.generate import generate
from unisono.trainer.plan.talk_messages import (
    Attach,
    Attached,
    ChatInput,
    Clear,
    Ready,
    RefusedTurn,
    Say,
    TurnAnswer,
    encode_news,
)
from unisono.trainer.plan.task_requests import (
    ConversationRequest,
    Generated,
    GeneratedText,
    GenerateRequest,
)
from unisono.trainer.task.inference import (
    InferenceModel,
    StopStrings,
    TextStream,
    cut_at_stop,
    decode,
    encode_prompt,
    open_requested,
    prompt_ids,
)
from unisono.trainer.task.prompt_files import SHOWN, Prompt, read_prompts
from unisono.trainer.task.prompt_pictures import (
    SeenPicture,
    expansions_of,
    inputs_of,
    marked,
    see_file,
    sources_of,
    with_expansions,
)

_ATTACH = "/image"


def encode_prompts(
    opened: InferenceModel,
    prompts: Sequence[Prompt],
    *,
    raw: bool,
    system: str | None,
    max_new_tokens: int,
    expansions: Sequence[Sequence[str]] = (),
) -> tuple[list[list[int]], ChatTemplate | None]:
    """The tokens of each prompt, and the template that rendered them; None if they are continued
    without a template.

    Args:
        opened: the model, with template and tokenizer.
        prompts: the prompts.
        raw: whether to continue texts without a chat template.
        system: a system message before each prompt.
        max_new_tokens: tokens that must be left for the answer.
        expansions: of the pictures of each prompt; empty: none has any.

    Raises:
        DataError: with every prompt that cannot be rendered or is too long.
    """
    talks = any(not isinstance(prompt.content, str) for prompt in prompts) or system is not None
    if raw and talks:
        raise UsageError.of(
            "messages cannot be continued without a chat template",
            where="--raw",
            fix="omit --raw, or use plain text",
        )
    template = None if raw or (opened.is_of_texts and not talks) else opened.template
    if template is None and talks:
        template = opened.chat_template()[0]
    ids: list[list[int]] = []
    problems: list[Problem] = []
    for number, prompt in enumerate(prompts):
        try:
            ids.append(_ids_of(opened, prompt, template, system, expansions[number] if expansions else ()))
        except RowError as error:
            ids.append([])
            problems.append(Problem(f"a prompt cannot be rendered: {error.why}", prompt.where, "", error.fix))
    if not problems:
        problems = [
            p
            for p in map(
                lambda prompt, row: _length_problem(opened, prompt, row, max_new_tokens), prompts, ids
            )
            if p
        ]
    if problems:
        raise DataError(*problems[:SHOWN])
    return ids, template


def _ids_of(
    opened: InferenceModel,
    prompt: Prompt,
    template: ChatTemplate | None,
    system: str | None,
    expansions: Sequence[str],
) -> list[int]:
    """The tokens that the model continues.

    Raises:
        RowError: if the template refuses the messages.
    """
    if template is None:
        assert isinstance(prompt.content, str)
        return tokens_of_text(opened, prompt.content)
    turns: list[Message] = (
        [{"role": "user", "content": prompt.content}] if isinstance(prompt.content, str) else prompt.content
    )
    before: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    return ids_with_pictures(opened, template, [*before, *turns], expansions)


def ids_with_pictures(
    opened: InferenceModel,
    template: ChatTemplate,
    messages: Sequence[Message],
    expansions: Sequence[str],
    tools: list[Any] | None = None,
    *,
    most: int | None = None,
) -> list[int]:
    """The tokens of a conversation with the generation prompt, and with those of its pictures.

    Raises:
        RowError: if the template refuses the messages, or pictures and their places do not match.
        TooManyTokens: as `encode_prompt`.
    """
    if opened.processor is None:
        return prompt_ids(opened.tokenizer, template, messages, tools, most=most)
    text = with_expansions(template.render(messages, tools, prompt=True), expansions, opened.processor)
    return encode_prompt(opened.tokenizer, text, special=False, most=most)


def tokens_of_text(opened: InferenceModel, text: str, *, most: int | None = None) -> list[int]:
    """The tokens of a complete text: with the tokenizer's special tokens, but no end of sequence.

    Raises:
        TooManyTokens: as `encode_prompt`.
    """
    ids = encode_prompt(opened.tokenizer, text, special=True, most=most)
    end = opened.tokenizer.eos_token_id
    while len(ids) > 1 and ids[-1] == end:
        ids.pop()
    return ids


def _length_problem(
    opened: InferenceModel, prompt: Prompt, ids: list[int], max_new_tokens: int
) -> Problem | None:
    if not ids:
        return Problem("a prompt has no tokens", prompt.where, "", "write a prompt")
    if len(ids) + max_new_tokens <= opened.context:
        return None
    if len(ids) >= opened.context:
        return Problem(
            f"a prompt of {len(ids)} tokens is too long",
            prompt.where,
            f"the model reads {opened.context} tokens",
            "shorten it",
        )
    return Problem(
        f"a prompt of {len(ids)} tokens leaves no room for an answer of {max_new_tokens}",
        prompt.where,
        f"the model reads {opened.context} tokens",
        f"set --max-tokens to at most {opened.context - len(ids)}, or shorten the prompt",
    )


_USUAL_TOKENS = 256


class PromptPictures(Sequence[PictureInputs | None]):
    """The pictures of prompts as a model gets them, made when they are needed."""

    def __init__(self, opened: InferenceModel, prompts: Sequence[Prompt]) -> None:
        self._opened = opened
        self._prompts = prompts

    def expansions(self) -> list[list[str]]:
        """The text that takes the place of each picture of each prompt.

        Raises:
            UsageError: if a picture cannot be used.
        """
        return [expansions_of(self._see(prompt)) for prompt in self._prompts]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, number: Any, /) -> Any:
        """The pictures of one prompt."""
        return _inputs(self._opened, self._see(self._prompts[number]))

    def _see(self, prompt: Prompt) -> list[SeenPicture]:
        where, processor = prompt.where or "--image", self._opened.processor
        if processor is None:
            return []
        return [see_file(one, processor, self._opened.pixels, where=where) for one in prompt.pictures]


def run_generate(request: GenerateRequest, report: Reporter) -> Generated:
    """Answers one prompt, or a file of them.

    Messages: `token` with `text`, for a single prompt, as it is generated.
    """
    prompts = _prompts(request)
    sees = any(prompt.pictures for prompt in prompts)
    if sees and request.raw:
        raise UsageError.of("--raw has no messages for pictures", where="--raw", fix="omit --raw")
    opened = open_requested(request.model, report, sees=sees)
    pictures = PromptPictures(opened, prompts)
    ids, template = encode_prompts(
        opened,
        prompts,
        raw=request.raw,
        system=request.system,
        max_new_tokens=request.max_tokens or 1,
        expansions=pictures.expansions(),
    )
    limit = request.max_tokens or min(_USUAL_TOKENS, opened.context - max(map(len, ids)))
    if template is None and not (request.raw or opened.is_of_texts):
        report.warning("no_template", "there is no chat template: prompts are continued without one")
    report.phase("generate", "answering", done=0, total=len(prompts))
    stops = request.stop
    stream = TextStream(opened.tokenizer, stops) if len(prompts) == 1 else None
    stop_ids, is_done = (
        opened.stops(template),
        StopStrings(opened.tokenizer, stops) if stops else None,
    )
    with opened.ready() as model:
        if stream is not None or sees:
            answers = generate(
                model,
                ids,
                max_new_tokens=limit,
                stop_ids=stop_ids,
                pad_id=opened.pad_id,
                sampling=request.sampling,
                on_token=None if stream is None else _sender(stream, report),
                is_done=is_done,
                pictures=pictures if sees else (),
            )
        else:
            answers = answer_prompts(
                model,
                ids,
                limits=[limit] * len(ids),
                stop_ids=stop_ids,
                pad_id=opened.pad_id,
                sampling=request.sampling,
                is_done=is_done,
                together=not opened.forward.rows_apart,
                on_answers=lambda done: report.phase("generate", "answering", done=done, total=len(prompts)),
            )
    if stream is not None:
        report.send({"kind": "token", "text": stream.close()})
    return {
        "description": opened.target.description,
        "answers": [_answer(opened, p, a, limit, stops) for p, a in zip(prompts, answers, strict=True)],
    }


def _inputs(opened: InferenceModel, pictures: Sequence[SeenPicture]) -> PictureInputs | None:
    return inputs_of(pictures, opened.processor, opened.device) if opened.processor is not None else None


def _prompts(request: GenerateRequest) -> list[Prompt]:
    if request.file is not None:
        return read_prompts(request.file)
    if request.prompt is None or not request.prompt.strip():
        raise UsageError.of(
            "the prompt is empty",
            where="PROMPT",
            fix="pass it on the command line, pipe it in, or use --file",
        )
    pictures = sources_of(request.images, where="--image")
    if not pictures:
        return [Prompt("", request.prompt)]
    content = marked(request.prompt, len(pictures))
    return [Prompt("", [{"role": "user", "content": content}], pictures)]


def _sender(stream: TextStream, report: Reporter) -> Callable[[int], None]:
    def send(token: int) -> None:
        piece = stream.push(token)
        if piece:
            report.send({"kind": "token", "text": piece})

    return send


def _answer(
    opened: InferenceModel, prompt: Prompt, ids: Sequence[int], limit: int, stops: Sequence[str]
) -> GeneratedText:
    text = decode(opened.tokenizer, ids)
    cut = cut_at_stop(text, stops)
    ended = "length" if len(ids) == limit and cut == text else "stop"
    return {
        "where": prompt.where,
        "prompt": _shown(prompt),
        "answer": cut,
        "tokens": len(ids),
        "ended": ended,
    }


def _shown(prompt: Prompt) -> "str | list[Message]":
    """The prompt with the names of its pictures in their places."""
    if not prompt.pictures or isinstance(prompt.content, str):
        return prompt.content
    names = iter(prompt.pictures)
    return [
        message
        | {"content": re.sub(PICTURE, lambda _mark: f"<image: {next(names).name}>", message["content"])}
        for message in prompt.content
    ]


def run_chat(request: ConversationRequest, report: Reporter) -> Mapping[str, object]:
    """Chats until stdin ends.

    It reads JSON lines from stdin, ChatInput; the end of stdin ends the chat, SIGINT ends the
    present answer. It sends `Ready`, then for each `Attach`: `Attached` or `RefusedTurn`; for each
    `Say`: `TokenText` as they are generated and `TurnAnswer`, or `RefusedTurn`. Result: turns.
    """
    opened = open_requested(request.model, report, sees=None)
    template, note = opened.chat_template()
    interrupt = _Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    conversation = ModelChat(opened, template, request, report, interrupt)
    report.send(encode_news(Ready(opened.target.description, note, blind=opened.blind)))
    for line in sys.stdin:
        message: ChatInput | None = decode_message(json.loads(line), ChatInput)
        match message:
            case Clear():
                conversation.clear()
            case Attach(file):
                conversation.attach(file)
            case Say(text):
                conversation.answer(text)
            case None:
                pass
    return {"turns": conversation.turns}


class _Interrupt:
    """Whether Ctrl-C was pressed since the start of the turn."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, *_: object) -> None:
        self.pressed = True


class ModelChat:
    """The messages of a chat, and the model that answers.

    Attributes:
        turns: number of answers so far.
    """

    def __init__(
        self,
        opened: InferenceModel,
        template: ChatTemplate,
        request: ConversationRequest,
        report: Reporter,
        interrupt: _Interrupt,
    ) -> None:
        self._opened = opened
        self._template = template
        self._request = request
        self._report = report
        self._interrupt = interrupt
        self.turns = 0
        self.clear()

    def clear(self) -> None:
        """Removes all messages but the system message."""
        system = self._request.system
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._pictures: list[SeenPicture] = []
        self._attached: list[SeenPicture] = []

    def attach(self, file: str) -> None:
        """Attaches a picture to the next message."""
        processor = self._opened.processor
        if processor is None:
            self._report.send(encode_news(RefusedTurn(self._opened.blind, "ask without pictures")))
            return
        try:
            (source,) = sources_of([file], where=_ATTACH)
            seen = see_file(source, processor, self._opened.pixels, where=_ATTACH)
        except UnisonoError as error:
            problem = error.problems[0]
            why = f"{problem.what}: {problem.why}" if problem.why else problem.what
            self._report.send(encode_news(RefusedTurn(why, problem.fix)))
            return
        self._attached.append(seen)
        text = expansions_of([*self._pictures, *self._attached])[-1]
        tokens = len(encode_prompt(self._opened.tokenizer, text, special=False))
        width, height = seen.image.size
        self._report.send(encode_news(Attached(width, height, tokens)))

    def answer(self, text: str) -> None:
        """Answers a message, with the pictures that are attached; if it cannot be answered, it is
        removed, and they stay.
        """
        self._messages.append({"role": "user", "content": marked(text, len(self._attached))})
        pictures = [*self._pictures, *self._attached]
        self._interrupt.pressed = False
        try:
            ids = ids_with_pictures(self._opened, self._template, self._messages, expansions_of(pictures))
        except RowError as error:
            self._refuse(error.why, error.fix)
            return
        room = self._opened.context - len(ids)
        if room < 1:
            self._refuse(
                f"the conversation is longer than the {self._opened.context} tokens that the model reads",
                "/clear starts a new conversation",
            )
            return
        self._pictures, self._attached = pictures, []
        answer, shown = self._answer(ids, limit=min(room, self._request.max_tokens))
        self._messages.append({"role": "assistant", "content": shown})
        self.turns += 1
        ended = (
            "interrupted"
            if self._interrupt.pressed
            else "length"
            if len(answer) >= min(room, self._request.max_tokens)
            else "stop"
        )
        self._report.send(encode_news(TurnAnswer(shown, len(answer), ended)))

    def _answer(self, ids: Sequence[int], *, limit: int) -> tuple[list[int], str]:
        stream = TextStream(self._opened.tokenizer)

        def send(token: int) -> None:
            piece = stream.push(token)
            if piece:
                self._report.send({"kind": "token", "text": piece})

        with self._opened.ready() as model:
            (answer,) = generate(
                model,
                [ids],
                max_new_tokens=limit,
                stop_ids=self._opened.stops(self._template),
                pad_id=self._opened.pad_id,
                sampling=replace(self._request.sampling, seed=self._request.sampling.seed + self.turns),
                on_token=send,
                is_done=lambda *_: self._interrupt.pressed,
                pictures=[_inputs(self._opened, self._pictures)],
            )
        rest = stream.close()
        if rest:
            self._report.send({"kind": "token", "text": rest})
        return answer, decode(self._opened.tokenizer, answer)

    def _refuse(self, why: str, fix: str) -> None:
        self._messages.pop()
        self._report.send(encode_news(RefusedTurn(why, fix)))

"""From examples to tokens, with the tokens that count in the loss."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from unisono.base.errors import DataError
from unisono.base.text import one_line
from unisono.trainer.config.data_sections import SourceSection
from unisono.trainer.data import (
    Completion,
    Conversation,
    EmptyAnswerError,
    Example,
    Exchange,
    Labelled,
    Message,
    OpenPrompt,
    PictureSource,
    Preference,
    RowError,
    Similar,
    Text,
    grouped,
)
from unisono.trainer.data.answer_spans import Rendered, Span, ends_otherwise, render_answers, with_next_turn
from unisono.trainer.data.control_tokens import (
    ControlTokens,
    ControlTokensMode,
    refuse_control_tokens,
    refuse_slow,
)
from unisono.trainer.data.formats import FormatName, all_text, to_example
from unisono.trainer.data.labelled_rows import read_labelled
from unisono.trainer.data.pictures.picture_template import with_placeholders
from unisono.trainer.data.pictures.store import PictureStore
from unisono.trainer.data.preference_rows import read_preference, with_answer_of
from unisono.trainer.data.prompt_rows import read_open_prompt
from unisono.trainer.data.rendered_parts import RenderedPart, RenderedParts
from unisono.trainer.data.similar_rows import read_similar
from unisono.trainer.data.template import (
    CHARACTERS,
    ChatTemplate,
    choose_template,
    fallback_template,
    known_stop_ids,
    timers_armed,
)
from unisono.trainer.data.text_encoder import TextEncoder, Tokens
from unisono.trainer.data.thoughts import has_keys, placed, stripped
from unisono.trainer.data.token_table import Encoded, EncodedUnit, share_of

ENCODER_VERSION = 7
"""Part of the cache's key: incremented whenever the same rows could give different tokens or a
different loss mask.
"""

_BATCH_CHARACTERS = 1 << 22  # characters encoded at once; the tokenizer takes about 180 bytes for each

_SHOWN = 400  # characters of a rendered row in a warning

_SEVERAL_TURNS = [{"role": ("user", "assistant")[number % 2], "content": str(number)} for number in range(3)]

LossOn = Literal["answers", "last-answer", "all"]
Thoughts = Literal["loss", "ignore", "strip"]


@dataclass(frozen=True, slots=True)
class _EncodeJob:
    """A text to encode.

    Attributes:
        text: the text.
        answers: trained characters; None: all of them; empty: it is a prompt.
        whole: whether it is a complete text: the tokenizer adds its special tokens, and end of
            sequence is appended.
        not_rendered: parts of the row that are not in the text, in words.
        escaped: characters of control tokens that are text.
        has_control_tokens: whether control tokens of the row's own text are read as such.
        is_closed: whether end of sequence is appended to a complete text.
        weights: of each answer in the loss, above 0 and up to 1; empty: all 1.
        pictures: the numbers of its pictures, in order.
        prompt: if the one answer begins with the first token that differs from those of the prompt
            alone: that prompt.
    """

    text: str
    answers: list[Span] | None
    whole: bool
    not_rendered: tuple[str, ...] = ()
    escaped: tuple[Span, ...] = ()
    has_control_tokens: bool = False
    is_closed: bool = True
    weights: Sequence[float] = ()
    pictures: tuple[int, ...] = ()
    prompt: str | None = None

    @property
    def is_prompt(self) -> bool:
        """Whether it is a prompt, which the model continues."""
        return self.answers == []


class RowEncoder(Protocol):
    """Encodes rows: an Encoder, or that of a named template."""

    tokenizer: Any
    stop_ids: set[int]
    warnings: list[str]
    has_rendered: bool

    @property
    def pictures(self) -> PictureStore | None:
        """The pictures of rows; None if they have none."""
        ...

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template; None as long as there is none and no row needed one."""
        ...

    @property
    def opening(self) -> tuple[int, ...]:
        """The tokens with which rows begin, whatever is in them."""
        ...

    @property
    def absent_tokens(self) -> list[str]:
        """Tokens that the template writes and the tokenizer does not have; NO_TOKEN is in their
        places.
        """
        ...

    def read_row(self, name: FormatName, row: Mapping[str, object], source: SourceSection) -> Example:
        """The example of a row of a source.

        Raises:
            RowError: if a column is missing or has an invalid value.
        """
        ...

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """The tokens of each example, or its error."""
        ...

    def encode_pairs(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example, a pair, the prompt with the chosen answer, and with the rejected one;
        or its error.
        """
        ...

    def encode_prompts(self, examples: Sequence[OpenPrompt]) -> list[EncodedUnit | RowError]:
        """For each example, a question, what the model continues; or its error."""
        ...

    def encode_ratings(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example, a rated answer, the prompt with it, and with the answer of the example
        before; or its error.

        The first example gets the answer of the last one.
        """
        ...

    def encode_labelled(self, examples: Sequence[Labelled]) -> list[EncodedUnit | RowError]:
        """For each example its text as users of a classifier encode it, with its labels; or its
        error.
        """
        ...

    def encode_similar(self, examples: Sequence[Similar]) -> list[EncodedUnit | RowError]:
        """For each example its texts as users of an embedding model encode them; or the first
        error.
        """
        ...


class Encoder:
    """Encodes rows with one tokenizer, one template and one rule for the loss.

    Attributes:
        tokenizer: of transformers.
        template: the chat template; None as long as there is none and no row needed the fallback.
        stop_ids: the tokens that end an answer.
        warnings: warnings for the user, each once.
        has_rendered: whether a row needed the template.
        pictures: of the rows; None if only text is read.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        directory: Path,
        template_file: str | None = None,
        loss_on: LossOn = "answers",
        check_template: bool = True,
        end_at_stop: bool = True,
        show_first: str | None = None,
        thoughts: Thoughts = "loss",
        control_tokens: ControlTokensMode = "keep",
        pictures: PictureStore | None = None,
        plain_texts: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._plain_texts = plain_texts
        self.has_rendered = False
        self.pictures = pictures
        self._thoughts = thoughts
        self._control = ControlTokens(tokenizer)
        self._control_mode = control_tokens
        if control_tokens == "escape":
            refuse_slow(tokenizer)
        self.stop_ids = known_stop_ids(tokenizer, directory)
        stops = tuple(
            str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(self.stop_ids) if i < len(tokenizer)
        )
        self.template: ChatTemplate | None = None
        self._use(choose_template(tokenizer, template_file, stops=stops))
        self.warnings: list[str] = []
        self._texts = TextEncoder(tokenizer)
        self._loss_on = loss_on
        self._check = check_template
        self._end_at_stop = end_at_stop
        self._probed = False
        self._opening: tuple[int, ...] | None = None
        self._show_first = show_first

    @property
    def opening(self) -> tuple[int, ...]:
        """The special tokens before the first message, e.g. GLM's `[gMASK]<sop>`; without a
        template the beginning of sequence.
        """
        if self._opening is None:
            self._opening = self._find_opening()
        return self._opening

    def _find_opening(self) -> tuple[int, ...]:
        """Leading special tokens that occur once in several turns: one of a turn, as
        `<|im_start|>`, occurs in each.

        One before a text may be the role of a system message that the template adds, and is none
        unless it is the beginning of sequence.
        """
        begin, special = self.tokenizer.bos_token_id, set(self.tokenizer.all_special_ids)
        text = None if self.template is None else self.template.try_render(_SEVERAL_TURNS, None)
        if text is None:
            return () if begin is None else (begin,)
        ids = self._texts.encode([text], special=False)[0].ids
        opening = list(takewhile(lambda token: token in special and ids.count(token) == 1, ids))
        while opening and opening[-1] != begin and ids[len(opening)] not in special:
            opening.pop()
        return tuple(opening)

    @property
    def absent_tokens(self) -> list[str]:
        """None: a chat template is text, which any tokenizer has tokens for."""
        return []

    def read_row(self, name: FormatName, row: Mapping[str, object], source: SourceSection) -> Example:
        """The example of a row of a source.

        Raises:
            RowError: if a column is missing or has an invalid value.
        """
        if name == "preference":
            return read_preference(row, source.columns, source.tags, plain=self._plain_texts)
        if name == "labelled":
            return read_labelled(row, source.columns, source.tags)
        if name == "similar":
            return read_similar(row, source.columns)
        if name == "prompt":
            return read_open_prompt(row, source.columns, source.tags, plain=self._plain_texts)
        return to_example(name, row, source.columns, source.tags, plain=self._plain_texts)

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """The tokens of each example, or its error.

        Raises:
            DataError: if the template leaves the end of an answer untrained, or there is no token
                that ends one.
        """
        return self._encoded(self._jobs(examples))

    def _jobs(self, examples: Sequence[Example]) -> list[_EncodeJob | RowError]:
        if not self._probed and not all(map(self._is_plain, examples)):
            self._probed = True
            self._probe(examples)
        with timers_armed():
            jobs = [_bounded(self._job(example)) for example in examples]
        if self.pictures is not None:
            jobs = self._expanded(jobs, examples, self.pictures)
        self._show([job for job in jobs if isinstance(job, _EncodeJob)])
        return jobs

    def _is_plain(self, example: Example) -> bool:
        """Whether the chat template is not for an example."""
        if isinstance(example, OpenPrompt):
            return self._plain_texts and isinstance(example.prompt, str) and not example.pictures
        return isinstance(example, Text) or (isinstance(example, Completion) and example.plain)

    @staticmethod
    def _expanded(
        jobs: Sequence[_EncodeJob | RowError], examples: Sequence[Example], store: PictureStore
    ) -> list[_EncodeJob | RowError]:
        """The jobs with the tokens of pictures in their places."""
        of_jobs = [one.pictures if isinstance(one, Conversation | OpenPrompt) else () for one in examples]
        store.decode(source for sources in of_jobs for source in sources)
        expanded: list[_EncodeJob | RowError] = []
        for job, sources in zip(jobs, of_jobs, strict=True):
            try:
                expanded.append(job if isinstance(job, RowError) else _with_pictures(job, sources, store))
            except RowError as error:
                expanded.append(error)
        return expanded

    def _encoded(self, jobs: Sequence[_EncodeJob | RowError]) -> list[Encoded | RowError]:
        encoded: dict[int, Encoded | RowError] = {}
        for whole in (False, True):
            chosen = [
                (i, job) for i, job in enumerate(jobs) if isinstance(job, _EncodeJob) and job.whole is whole
            ]
            for group in grouped(((one, len(one[1].text)) for one in chosen), most=_BATCH_CHARACTERS):
                texts = self._texts.encode(
                    [job.text for _, job in group],
                    special=whole,
                    ranges=any(job.answers and job.prompt is None for _, job in group),
                )
                prompts = [job.prompt for _, job in group if job.prompt is not None]
                alone = iter(self._texts.encode(prompts, special=whole, ranges=False))
                for (i, job), tokens in zip(group, texts, strict=True):
                    prompt = None if job.prompt is None else next(alone)
                    if job.prompt is not None and job.escaped:
                        inside = [span for span in job.escaped if span[1] <= len(job.prompt)]
                        prompt = self._texts.with_escaped(job.prompt, inside, special=whole)
                    job_tokens = (
                        self._texts.with_escaped(job.text, job.escaped, special=whole)
                        if job.escaped
                        else tokens
                    )
                    encoded[i] = self._finish(job, job_tokens, prompt)
        return [job if isinstance(job, RowError) else encoded[i] for i, job in enumerate(jobs)]

    def encode_prompts(self, examples: Sequence[OpenPrompt]) -> list[EncodedUnit | RowError]:
        """For each example what the model continues, without loss tokens; or its error."""
        rows = self._encoded(self._jobs(examples))
        return [
            row if isinstance(row, RowError) else EncodedUnit((row,), record=example.record)
            for row, example in zip(rows, examples, strict=True)
        ]

    def encode_pairs(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example, a pair, the prompt with the chosen answer, and with the rejected one;
        or its error.
        """
        return self._units([example.answers for example in _preferences(examples)], ("chosen", "rejected"))

    def encode_ratings(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example, a rated answer, the prompt with it, and with the answer of the example
        before; or its error.

        The first example gets the answer of the last one.
        """
        rated = _preferences(examples)
        answers = [example.answers[0] for example in rated]
        others = [*answers[-1:], *answers[:-1]]
        units = self._units(
            [[answer, with_answer_of(answer, other)] for answer, other in zip(answers, others, strict=True)],
            ("its answer", "with the mismatched answer, from the row before"),
        )
        return [
            unit if isinstance(unit, RowError) else replace(unit, label=example.desirable)
            for unit, example in zip(units, rated, strict=True)
        ]

    def encode_labelled(self, examples: Sequence[Labelled]) -> list[EncodedUnit | RowError]:
        """For each example its text as users of a classifier encode it, without end of sequence if
        the tokenizer adds none, and its labels; or its error. Its last token is that of the loss.
        """
        jobs = self._jobs([example.example for example in examples])
        rows = self._encoded([job if isinstance(job, RowError) else _as_read(job) for job in jobs])
        return [
            row
            if isinstance(row, RowError)
            else EncodedUnit((_at_last(row),), labels=example.labels, is_whole=True)
            for row, example in zip(rows, examples, strict=True)
        ]

    def encode_similar(self, examples: Sequence[Similar]) -> list[EncodedUnit | RowError]:
        """For each example its texts as users of an embedding model encode them, with special
        tokens that the tokenizer adds, and no others; or the first error.
        """
        jobs = self._jobs([Text(text) for example in examples for text in example.texts])
        rows = iter(self._encoded([job if isinstance(job, RowError) else _as_read(job) for job in jobs]))
        units: list[EncodedUnit | RowError] = []
        for example in examples:
            sides = [next(rows) for _ in example.texts]
            error = next((side for side in sides if isinstance(side, RowError)), None)
            whole = tuple(_at_last(side) for side in sides if isinstance(side, Encoded))
            units.append(EncodedUnit(whole, is_whole=True) if error is None else error)
        return units

    def _units(
        self, groups: Sequence[Sequence[Conversation | Completion]], names: tuple[str, str]
    ) -> list[EncodedUnit | RowError]:
        """The units of two answers after the same prompt, or the first error of each; `names` are
        those of the sides.
        """
        jobs = self._jobs([example for group in groups for example in group])
        parts = iter(zip(jobs, self._encoded(jobs), strict=True))
        return [_unit([next(parts) for _ in group], names, end_at_stop=self._end_at_stop) for group in groups]

    def _show(self, jobs: list[_EncodeJob]) -> None:
        """Adds the first rendered row to the warning that asks for it."""
        if self._show_first is not None and jobs:
            self.warnings.append(f"{self._show_first}, e.g. {one_line(jobs[0].text, limit=_SHOWN)}")
            self._show_first = None

    def _use(self, template: ChatTemplate | None) -> None:
        if self.pictures is not None:
            processor = self.pictures.processor
            stops = tuple(str(self.tokenizer.convert_ids_to_tokens(i)) for i in sorted(self.stop_ids))
            template = with_placeholders(template, processor=processor, tokenizer=self.tokenizer, stops=stops)
        self.template = template
        if template is not None:
            self._parts = RenderedParts(template.try_render)
        if template is not None and template.end_of_turn is not None:
            self.stop_ids.add(self.tokenizer.convert_tokens_to_ids(template.end_of_turn))

    def _probe(self, examples: Sequence[Example]) -> None:
        """Sets the fallback template if a conversation needs it, and checks once how the template
        ends an answer.
        """
        if self.template is None:
            if not any(map(_is_conversation, examples)):
                self._probed = False
                return
            substitute = fallback_template(self.tokenizer)
            self._use(substitute)
            self.warnings.append(
                f"the tokenizer has no chat template; rows are rendered as {substitute.origin}"
            )
        template = self.template
        if not self._check or template is None or template.frame is None:
            return
        question = Conversation(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        )
        job = self._job(question)
        if isinstance(job, RowError):
            return  # the first row with this error reports it
        tokens = self._texts.encode([job.text], special=False)[0]
        trained = tokens.ids if job.answers is None else self._trained_ids(job, tokens)
        if not self.stop_ids.intersection(trained):
            raise DataError.of(
                "the chat template leaves the stop token of an answer out of the loss",
                where=f"data.template: {template.origin}",
                why=(
                    f"it trains {one_line(repr(self.tokenizer.decode(trained)), limit=80)}; "
                    f"an answer ends with {self._stop_names()}; the trained model would not stop"
                ),
                fix=(
                    "end each answer with that token (inside the generation block, if it has one), or set"
                    " data.check_template: false"
                ),
            )

    def _trained_ids(self, job: _EncodeJob, tokens: Tokens) -> list[int]:
        ranges = [tokens.range(first, end) for first, end in job.answers or []]
        return [token for span in ranges if span is not None for token in tokens.ids[span[0] : span[1]]]

    def _stop_names(self) -> str:
        names = [str(self.tokenizer.convert_ids_to_tokens(i)) for i in sorted(self.stop_ids)]
        return " or ".join(names) or "a token that the tokenizer does not name (it has no eos_token)"

    def _job(self, example: Example) -> _EncodeJob | RowError:
        try:
            if isinstance(example, Text):
                return self._text_job(example)
            # An exchange is of another encoder; others are encoded part by part.
            assert not isinstance(example, Exchange | Preference | Labelled | Similar)
            if isinstance(example, OpenPrompt):
                return self._prompt_job(example)
            if isinstance(example, Completion):
                if self.template is None or example.plain:
                    return self._completion_job(example)
                turns: list[Message] = [
                    {"role": "user", "content": example.prompt},
                    {"role": "assistant", "content": example.completion},
                ]
                example = Conversation(turns)
            return self._conversation_job(example)
        except RowError as error:
            return error

    def _prompt_job(self, example: OpenPrompt) -> _EncodeJob:
        """A prompt up to where the answer begins."""
        if self.template is None or self._is_plain(example):
            assert isinstance(example.prompt, str)
            return self._plain_job(example.prompt, [], control=self._control_in([example.prompt]))
        self.has_rendered = True
        prompt = example.prompt
        turns: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        conversation = Conversation(turns, example.tools)
        control = self._control_in(_contents_of(conversation))
        escapes = control is not None and self._control_mode == "escape"
        hidden = self._control.hidden(conversation) if escapes else None
        conversation = conversation if hidden is None else hidden.conversation
        if has_keys(conversation):
            key, in_content = self.template.thought_key, self.template.keeps_thoughts_in_content
            conversation = placed(conversation, key=key, in_content=in_content)
        text = self.template.render(conversation.messages, conversation.tools, prompt=True)
        lost = self._parts.lost(conversation, text)
        for part in lost:
            if part.kind != "thought" or part.role != "assistant":
                raise RowError(f"{part} is not rendered by the chat template", _fix_of(part))
        notes = tuple(part.quoted for part in lost)
        if hidden is not None:
            restored = hidden.restored(text, [])
            return _EncodeJob(restored.text, [], False, notes, tuple(restored.escaped))
        return _EncodeJob(text, [], False, notes, has_control_tokens=control is not None)

    def _completion_job(self, example: Completion) -> _EncodeJob:
        """Prompt and completion are concatenated unchanged."""
        if not example.completion.strip():
            raise EmptyAnswerError("the completion is empty", "write an answer, or remove the row")
        if self.tokenizer.eos_token_id is None:
            raise DataError.of(
                "the tokenizer has no end-of-sequence token",
                where="model.tokenizer",
                why="a completion could not be ended",
                fix="set the tokenizer's eos_token",
            )
        text = example.prompt + example.completion
        answers = None if self._loss_on == "all" else [(len(example.prompt), len(text))]
        job = self._plain_job(text, answers, control=self._control_in([example.prompt, example.completion]))
        return replace(job, prompt=example.prompt if self._plain_texts and answers else None)

    def _text_job(self, example: Text) -> _EncodeJob:
        if not example.text.strip():
            raise RowError("the text is empty", "remove the row")
        kept = self._control_mode == "keep"  # such texts are often rendered already
        return self._plain_job(example.text, None, control=None if kept else self._control_in([example.text]))

    def _plain_job(self, text: str, answers: list[Span] | None, *, control: str | None) -> _EncodeJob:
        escapes = control is not None and self._control_mode == "escape"
        escaped = tuple(self._control.spans_in(text)) if escapes else ()
        return _EncodeJob(
            text, answers, True, escaped=escaped, has_control_tokens=bool(control) and not escapes
        )

    def _control_in(self, texts: Sequence[str]) -> str | None:
        """The first control token in the texts of a row.

        Raises:
            RowError: if there is one, and `data.control_tokens` is "bad".
        """
        token = self._control.first_in(texts)
        if self._control_mode == "bad":
            refuse_control_tokens(token)
        return token

    def _conversation_job(self, example: Conversation) -> _EncodeJob:
        assert self.template is not None
        self.has_rendered = True
        control = self._control_in(_contents_of(example))
        escapes = control is not None and self._control_mode == "escape"
        hidden = self._control.hidden(example) if escapes else None
        example = example if hidden is None else hidden.conversation
        if self._thoughts == "strip":
            example = stripped(example)
        elif has_keys(example):
            key, in_content = self.template.thought_key, self.template.keeps_thoughts_in_content
            example = placed(example, key=key, in_content=in_content)
        rendered = self._rendered(example)
        job = self._without_lost(rendered, self._parts.lost(example, rendered.text))
        if job.answers is not None:
            text, ended = with_next_turn(self.template, job.text, job.answers)
            job = replace(job, text=text, answers=ended)
        if hidden is not None:
            restored = hidden.restored(job.text, job.answers or [])
            answers = None if job.answers is None else restored.spans
            return replace(job, text=restored.text, answers=answers, escaped=tuple(restored.escaped))
        return replace(job, has_control_tokens=control is not None)

    def _rendered(self, example: Conversation) -> Rendered:
        """The text of a conversation with its answers; without them if every token counts."""
        assert self.template is not None
        if self._loss_on == "all":
            return Rendered(self.template.render(example.messages, example.tools), [], [], [])
        return render_answers(self.template, example, last_only=self._loss_on == "last-answer")

    def _without_lost(self, rendered: Rendered, lost: Sequence[RenderedPart]) -> _EncodeJob:
        """The job of a rendering, without answers whose thoughts are lost.

        Raises:
            RowError: if a part is lost that the answers depend on, or no answer is left.
        """
        counts_all = self._loss_on == "all"
        untaught: dict[int, RenderedPart] = {}
        for part in lost:
            is_trained = counts_all or not rendered.messages or part.message in rendered.messages
            if part.kind == "thought" and part.role == "assistant":
                if is_trained and self._thoughts == "loss":
                    untaught[part.message] = part
            elif part.kind != "content" or part.role != "assistant" or is_trained:
                raise RowError(f"{part} is not rendered by the chat template", _fix_of(part))
        notes = [
            (
                f"the answer of message {part.message + 1} does not count, without {part.quoted}"
                if part.message in untaught
                else part.quoted
            )
            for part in lost
        ]
        if counts_all and not untaught:
            return _EncodeJob(rendered.text, None, False, not_rendered=tuple(notes))
        messages = rendered.messages or [-1] * len(rendered.answers)
        kept = [number for number, message in enumerate(messages) if message not in untaught]
        if untaught and (not kept or not rendered.messages):
            part = next(reversed(untaught.values()))
            raise RowError(f"{part} is not rendered by the chat template", _fix_of(part))
        answers, weights = [rendered.answers[i] for i in kept], [rendered.weights[i] for i in kept]
        return _EncodeJob(rendered.text, answers, False, weights=weights, not_rendered=tuple(notes))

    def _finish(self, job: _EncodeJob, tokens: Tokens, prompt: Tokens | None) -> Encoded | RowError:
        """The row of a job; `prompt` are the tokens of its prompt alone, if it names one."""
        ids, array = tokens.ids, tokens.array
        eos = self.tokenizer.eos_token_id if job.whole and job.is_closed else None
        if job.is_prompt:
            end = len(array)
            while end > 1 and array[end - 1] == eos:
                end -= 1
            array = array[:end]
        elif eos is not None and ids[-1:] != [eos]:
            array = np.append(array, np.int32(eos))
        targets = np.zeros(len(array), np.bool_)
        shares = np.zeros(len(array), np.uint8) if any(map(share_of, job.weights)) else None
        if job.answers is None:
            targets[:] = True
        for number, (first, end) in enumerate(job.answers or [], 1):
            span = tokens.range(first, end) if prompt is None else _after(prompt, tokens)
            if span is None:
                return RowError(
                    "the tokenizer does not map the answer's characters to tokens",
                    "use a fast tokenizer (tokenizer.json)",
                )
            begin, stop = span
            has_end = not job.whole and not self._ends_otherwise(job, end)
            last = self._after_stop(ids, begin, stop) if has_end else stop
            if last is None:
                return RowError(
                    f"the stop token of answer {number} is not in the loss: an answer ends with"
                    f" {self._stop_names()}",
                    "end each answer with it in the template, or set data.check_template: false",
                )
            targets[begin:last] = True
            if shares is not None:
                shares[begin:last] = share_of(job.weights[number - 1])
        targets[len(ids) :] = True  # the appended end of sequence
        targets[:1] = False
        row = Encoded(
            array,
            targets,
            shares=shares,
            not_rendered=job.not_rendered,
            has_control_tokens=job.has_control_tokens,
        )
        return self._checked_features(row, job)

    def _checked_features(self, row: Encoded, job: _EncodeJob) -> Encoded | RowError:
        """The row with its pictures, if any are read; or its error."""
        try:
            return row if self.pictures is None else with_features(row, job.pictures, self.pictures)
        except RowError as error:
            return error

    def _ends_otherwise(self, job: _EncodeJob, end: int) -> bool:
        """Whether an answer is one without a stop token; says so once."""
        if self.template is None or not ends_otherwise(self.template, job.text, end):
            return False
        warning = (
            f"the chat template ends an earlier answer with {self.template.end_of_earlier_answer}, and only"
            f" the last one with {self.template.end_of_turn}: earlier answers count without their end"
        )
        if warning not in self.warnings:
            self.warnings.append(warning)
        return True

    def _after_stop(self, ids: list[int], begin: int, end: int) -> int | None:
        """The place after the last stop token of an answer; the model does not write what the
        template puts after it.
        """
        for position in range(end - 1, begin - 1, -1):
            if ids[position] in self.stop_ids:
                return position + 1
        return None if self._check else end


def _with_pictures(job: _EncodeJob, sources: Sequence[PictureSource], store: PictureStore) -> _EncodeJob:
    """The job with the tokens of its pictures instead of their placeholders.

    Raises:
        RowError: if a picture cannot be used, or the template did not write one placeholder for
            each.
    """
    marks = [store.processor.placeholder_of(one) for one in sources]
    known = "|".join(map(re.escape, {store.processor.placeholder, *marks}))
    places = [
        match
        for match in re.finditer(known, job.text)
        if not any(first <= match.start() < end for first, end in job.escaped)
    ]
    if [match[0] for match in places] != marks:
        mark = places[0][0] if places else marks[0]
        if not sources:
            raise RowError(
                f"its text has {mark}, which stands for a picture, and the row has no picture",
                "add the picture to the column images, or set data.control_tokens: escape",
            )
        raise RowError(
            f"the chat template writes {len(places)} × {mark} for {len(sources)} pictures",
            "set data.template to one that writes one for each picture",
        )
    if not sources:
        return job
    numbers = store.numbers(sources)
    pieces: list[str] = []
    moved, first = [(0, 0)], 0  # from a place on, so many characters more
    for match, number in zip(places, numbers, strict=True):
        text = store.expansion(number)
        pieces += (job.text[first : match.start()], text)
        first = match.end()
        moved.append((first, moved[-1][1] + len(text) - len(match[0])))
    pieces.append(job.text[first:])

    def span(one: Span) -> Span:
        begin, end = (at + max(move for move in moved if move[0] <= at)[1] for at in one)
        return begin, end

    answers = None if job.answers is None else [span(one) for one in job.answers]
    escaped = tuple(span(one) for one in job.escaped)
    return replace(job, text="".join(pieces), answers=answers, escaped=escaped, pictures=numbers)


def with_features(row: Encoded, numbers: Sequence[int], store: PictureStore) -> Encoded:
    """The row with its pictures; a token of one is never predicted.

    Args:
        row: with the tokens of pictures.
        numbers: of its pictures, in order.
        store: that has them.

    Raises:
        RowError: if it has not one token for each feature of them.
    """
    is_feature = np.isin(row.ids, store.processor.image_ids)
    features = sum(store.pictures[number].features for number in numbers)
    if np.count_nonzero(is_feature) != features:
        raise RowError(
            f"it has {np.count_nonzero(is_feature)} tokens for pictures, and the processor gives {features} features",
            f"write {store.processor.placeholder} only where a picture is",
        )
    row.targets[is_feature] = False
    end = int(np.flatnonzero(is_feature)[-1]) + 1 if features else 0
    return replace(row, pictures=tuple(numbers), pictures_end=end)


def _as_read(job: _EncodeJob) -> _EncodeJob:
    """The job of a text that is read as a whole, and not continued."""
    return replace(job, answers=None, weights=(), is_closed=False)


def _at_last(row: Encoded) -> Encoded:
    """The row with its last token, whose state is that of the row, as the one that counts."""
    targets = np.zeros(len(row.ids), np.bool_)
    targets[-1:] = True
    return replace(row, targets=targets)


def _is_conversation(example: Example) -> bool:
    return isinstance(example, Conversation) or (
        isinstance(example, OpenPrompt) and (bool(example.pictures) or not isinstance(example.prompt, str))
    )


def _bounded(job: _EncodeJob | RowError) -> _EncodeJob | RowError:
    if isinstance(job, RowError) or len(job.text) <= CHARACTERS:
        return job
    return RowError(
        f"it has {len(job.text):,} characters; the maximum is {CHARACTERS:,}", "split it into several rows"
    )


def _preferences(examples: Sequence[Example]) -> list[Preference]:
    assert all(isinstance(example, Preference) for example in examples)
    return list(examples)  # type: ignore[arg-type]  # asserted


def _unit(
    parts: list[tuple[_EncodeJob | RowError, Encoded | RowError]],
    names: tuple[str, str],
    *,
    end_at_stop: bool,
) -> EncodedUnit | RowError:
    """The unit of encoded answers with the same prompt, in the same tokens.

    A tokenizer may join the end of a prompt and the beginning of an answer in one token. Such
    tokens are part of the answers: the prompt ends where the tokens of the sides begin to differ.

    What a template writes after the stop token (Qwen's: a newline) is not part of an answer: the
    model never writes it, and its probability would count in that of the answer. Only a reward
    model, whose users score whole rendered rows, sees it.
    """
    jobs, sides = [job for job, _ in parts], [side for _, side in parts]
    errors = [(name, side) for name, side in zip(names, sides, strict=True) if isinstance(side, RowError)]
    if errors:
        name, error = errors[0]
        return error if len(errors) > 1 else RowError(f"{name}: {error.why}", error.fix)
    if len({job.text[: (job.answers or [(0, 0)])[-1][0]] for job in jobs if isinstance(job, _EncodeJob)}) > 1:
        return RowError(
            "the chat template renders the prompt differently before each answer",
            "make the beginning of both answers alike (e.g. reasoning in both), or set data.template to a"
            " different one",
        )
    rows = [side for side in sides if isinstance(side, Encoded)]
    ends = [int(np.argmax(row.targets)) for row in rows]
    begin = _shared(*(row.ids[: min(ends)] for row in rows))
    for row, end in zip(rows, ends, strict=True):
        row.targets[max(begin, 1) : end] = True
    if end_at_stop:
        rows = [_through_answer(row) for row in rows]
    return EncodedUnit(tuple(rows))


def _through_answer(row: Encoded) -> Encoded:
    """The row up to its last token in the loss."""
    trained = np.flatnonzero(row.targets)
    return row.part(slice(int(trained[-1]) + 1)) if len(trained) else row


def _shared(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """The length of the common beginning of two rows of the same length."""
    different = np.flatnonzero(one != other)
    return int(different[0]) if len(different) else len(one)


def _after(prompt: Tokens, tokens: Tokens) -> tuple[int, int]:
    """Begin and end of the tokens of a text behind those that its prompt has alone, too.

    At its end a prompt may have other tokens alone: "a" and "bc" may be "ab" and "c" together.
    """
    n = min(len(prompt.ids), len(tokens.ids))
    return _shared(prompt.array[:n], tokens.array[:n]), len(tokens.ids)


def _contents_of(example: Conversation) -> list[str]:
    """The texts of the messages."""
    if all(len(message) == 2 for message in example.messages):
        return [message["content"] for message in example.messages]
    return [all_text(Conversation(example.messages))]


def _fix_of(part: RenderedPart) -> str:
    """What to do about a part that is lost."""
    if part.kind == "thought":
        return (
            "set data.template to one that keeps it, or data.thoughts: ignore (the answer counts without it)"
            " or strip (no row has thoughts)"
        )
    if part.kind == "content" and part.role not in ("user", "assistant", "system", "tool"):
        return "write a role that the template knows, or set data.template to one that knows this one"
    return "set data.template to one that renders it, or remove it from the row"

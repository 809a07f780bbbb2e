"""From rows to tokens as LLaMA-Factory encodes them, with its loss mask and its cut; and its
template as a chat template.

Only targets of pairs (see `pieces`) count in the loss. `data.too_long: balanced` cuts pairs, not
the row's end.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from unisono.base.errors import DataError
from unisono.trainer.config.data_sections import SourceSection
from unisono.trainer.config.named_templates import NamedTemplate, local_day
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import LF_PREFIX, Thinking
from unisono.trainer.data import (
    MEDIA_MARK,
    Example,
    Exchange,
    Messages,
    RowError,
    Turn,
)
from unisono.trainer.data.control_tokens import (
    ControlTokens,
    ControlTokensMode,
    refuse_control_tokens,
    refuse_slow,
)
from unisono.trainer.data.encode import LossOn, with_features
from unisono.trainer.data.formats import FormatName, all_text, refuse_surrogates
from unisono.trainer.data.ingest import balance
from unisono.trainer.data.pictures.picture_template import MediumMark, media_marks
from unisono.trainer.data.pictures.store import PictureStore
from unisono.trainer.data.preference_rows import JOINT, read_exchange
from unisono.trainer.data.template import CHARACTERS, ChatTemplate
from unisono.trainer.data.token_table import Encoded, EncodedUnit, share_of
from unisono.trainer.readers.llamafactory.pieces import (
    DEFAULT_TOOLS,
    LLAMA3_TOOLS,
    QWEN_TOOLS,
    Ids,
    Pieces,
    PieceTokens,
    QuestionAnswer,
    Writer,
)
from unisono.trainer.readers.llamafactory.template import (
    CONTENT,
    LfTemplate,
    Slot,
    Slots,
    TokenSlot,
    adapt_tokenizer,
    end_of_text,
    find_lf_template,
    stop_ids,
)

_KL_GROUP = 1000  # rows among which the answers are exchanged for KTO
_CLOSES = 2  # where the end of sequence is predicted instead of the token

Finished = TypeVar("Finished")


VERSION = 3
"""Part of the cache's key: incremented whenever the same rows could give different tokens or a
different loss mask.
"""


@dataclass(frozen=True)
class LfNamedTemplate(NamedTemplate):
    """A template of LLaMA-Factory, for the rooms that encode rows and prompts."""

    template: LfTemplate

    def adapt(self, tokenizer: Any) -> list[str]:
        """Changes a tokenizer of transformers as the template needs it; gives warnings."""
        return adapt_tokenizer(tokenizer, self.template)

    def stop_ids(self, tokenizer: Any) -> set[int]:
        """The tokens that end an answer, of an adapted tokenizer."""
        return stop_ids(tokenizer, self.template)

    def end_of_text(self, tokenizer: Any) -> str:
        """What ends a text in pretraining."""
        return end_of_text(tokenizer, self.template)

    def encoder(
        self, config: RunConfig, tokenizer: Any, *, pictures: PictureStore | None = None
    ) -> "LfEncoder":
        """The encoder of a config's rows; it adapts the tokenizer."""
        data, pretrain = config.data, config.objective == "pretrain"
        return LfEncoder(
            tokenizer,
            self.template,
            loss_on="all" if pretrain else data.loss_on,
            thinking=data.thinking,
            cut_at=data.max_length if data.too_long == "balanced" else None,
            pretrain=pretrain,
            control_tokens=data.control_tokens,
            today=None if data.date is None else date.fromisoformat(data.date),
            pictures=pictures,
        )

    def chat_template(self, tokenizer: Any, *, thinking: Thinking) -> "LfChatTemplate":
        """A chat template that renders the encoder's prompts; it adapts the tokenizer."""
        self.adapt(tokenizer)
        return lf_chat_template(tokenizer, self.template, thinking=thinking)


def lf_named_template(name: str, system: str | None) -> LfNamedTemplate | None:
    """The template of a name; None if there is none whose name is similar.

    Args:
        name: behind `lf:`.
        system: data.system, in place of the template's own default.

    Raises:
        DataError: if the name is nearly that of a template.
    """
    template = find_lf_template(name)
    if template is None:
        return None
    return LfNamedTemplate(template if system is None else replace(template, default_system=system))


class LfEncoder:
    """Encodes rows with a template of LLaMA-Factory; a data.encode.RowEncoder.

    Attributes:
        tokenizer: of transformers, adapted to the template.
        template: the same prompts as a chat template; None for pretraining.
        stop_ids: the tokens that end an answer.
        warnings: warnings for the user, each once.
        has_rendered: always, as a template of LLaMA-Factory is for texts, too.
        pictures: of the rows; None if only text is read.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: LfTemplate,
        *,
        loss_on: LossOn = "answers",
        thinking: Thinking = True,
        cut_at: int | None = None,
        pretrain: bool = False,
        today: date | None = None,
        control_tokens: ControlTokensMode = "keep",
        pictures: PictureStore | None = None,
    ) -> None:
        """Adapts the tokenizer to the template.

        Args:
            tokenizer: of transformers.
            template: of LLaMA-Factory.
            loss_on: data.loss_on.
            thinking: data.thinking.
            cut_at: data.max_length with `too_long: balanced`; None: rows stay whole.
            pretrain: whether rows are plain text, of which every token is trained.
            today: the date that the tool prompt of Llama 3 states; None: that of this machine.
            control_tokens: data.control_tokens.
            pictures: of the rows; None if only text is read.

        Raises:
            DataError: if the template cannot train on prompts, or the tokenizer cannot escape
                control tokens.
        """
        if loss_on == "all" and template.efficient_eos and not pretrain:
            raise DataError.of(
                f"{LF_PREFIX}{template.name} cannot train on prompts",
                where="data.loss_on",
                why="its answers end with the first token of the next question",
                fix="set data.loss_on: answers",
            )
        self.warnings = adapt_tokenizer(tokenizer, template)
        self.has_rendered = True
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids(tokenizer, template)
        self._writer = Writer(template, thinking, today or local_day())
        if control_tokens == "escape":
            refuse_slow(tokenizer)
        self._control = ControlTokens(tokenizer)
        self._control_mode = control_tokens
        self._pieces = PieceTokens(tokenizer, splits_control_tokens=control_tokens == "escape")
        self.template = None if pretrain else lf_chat_template(tokenizer, template, thinking=thinking)
        self._template = template
        self._loss_on = loss_on
        self._cut_at = cut_at
        self._pretrain = pretrain
        self.pictures = pictures

    @property
    def opening(self) -> tuple[int, ...]:
        """None: these templates cut a row by `balanced`, which keeps its beginning."""
        return ()

    @property
    def absent_tokens(self) -> list[str]:
        """Tokens that the template writes and the tokenizer does not have; NO_TOKEN is in their
        places.
        """
        return self._pieces.absent

    def read_row(self, name: FormatName, row: Mapping[str, object], source: SourceSection) -> Example:
        """The example of a row of a source.

        Raises:
            RowError: if LLaMA-Factory skips such a row, or cannot read it.
        """
        tags = source.tags.model_dump() if source.tags else {}
        thought = self._template.thought if self._template.reasoning and not self._pretrain else None
        exchange = read_exchange(name, row, source.columns, tags, thought=thought)
        refuse_surrogates(exchange)
        text = all_text(exchange)
        if self._control_mode == "bad":
            refuse_control_tokens(self._control.first_in([text]))
        size = len(text)
        if size > CHARACTERS:
            raise RowError(
                f"it has {size:,} characters; the maximum is {CHARACTERS:,}", "split it into several rows"
            )
        return exchange

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """The tokens of each example, or its error."""
        if self._pretrain:
            return self._encode_texts(examples)
        rows = self._each(examples, self._conversation, self._row)
        return [
            row if isinstance(row, RowError) else self._finished(row, example)
            for row, example in zip(rows, examples, strict=True)
        ]

    def _finished(self, row: Encoded, example: Example) -> Encoded | RowError:
        """A row with its pictures, of which none may be cut, and with its notes."""
        assert isinstance(example, Exchange)
        if self.pictures is None:
            return self._noted(row, example)
        numbers = self.pictures.numbers(example.pictures)
        try:
            return self._noted(with_features(row, numbers, self.pictures), example)
        except RowError as error:
            if not row.cut:
                return error
            return RowError(
                f"it has {len(row.ids) + row.cut} tokens, and a picture would be cut",
                "raise data.max_length, or set data.pixels: {max: N} for smaller pictures",
            )

    @cached_property
    def _marks(self) -> Mapping[str, MediumMark]:
        """See `media_marks`."""
        assert self.pictures is not None, "there are pictures"
        return media_marks(self.pictures.processor)

    def _with_expansions(self, example: Exchange) -> Exchange:
        """The exchange with the text that stands for each picture.

        Raises:
            PictureError: if one cannot be used.
        """
        store = self.pictures
        if store is None or not example.pictures:
            return example
        texts = iter(
            self._marks[source.mark].filled(store.expansion(number))
            for source, number in zip(example.pictures, store.numbers(example.pictures), strict=True)
        )

        def expanded(turn: Turn) -> Turn:
            return replace(turn, content=MEDIA_MARK.sub(lambda _: next(texts), turn.content))

        return replace(
            example,
            prompt=[expanded(turn) for turn in example.prompt],
            answers=[expanded(turn) for turn in example.answers],
        )

    def encode_pairs(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example the prompt with the chosen answer, and with the rejected one; or its
        error.

        Both are cut alike, at what the longer answer leaves to the prompt.
        """

        def pieces(_: int, example: Exchange) -> list[QuestionAnswer[Pieces]]:
            if len(example.answers) != 2:
                raise RowError(
                    "the row has no chosen and rejected answer",
                    "set the source's columns: {chosen: NAME, rejected: NAME}",
                )
            expanded = self._with_expansions(example)
            return [self._writer.question(expanded, answer) for answer in example.answers]

        def finish(pairs: list[QuestionAnswer[Ids]]) -> tuple[Encoded, Encoded]:
            chosen, rejected = pairs
            rejected.source = chosen.source
            longest = max(len(self._ended(pair)) for pair in pairs)
            return self._question(chosen, longest), self._question(rejected, longest)

        units = self._each(examples, pieces, finish)
        return [
            unit if isinstance(unit, RowError) else self._finished_unit(unit, example)
            for unit, example in zip(units, examples, strict=True)
        ]

    def encode_ratings(self, examples: Sequence[Example]) -> list[EncodedUnit | RowError]:
        """For each example the prompt with its answer, and with that of the row before it; or its
        error.

        The first of a group of 1000 rows gets the last one's answer. Rows with an error take no
        part.
        """
        rated = [
            (i, e.answers[0]) for i, e in enumerate(examples) if isinstance(e, Exchange) and _is_rated(e)
        ]
        others: dict[int, Turn] = {}
        for first in range(0, len(rated), _KL_GROUP):
            group = rated[first : first + _KL_GROUP]
            for (i, _), (_, before) in zip(group, [group[-1], *group[:-1]], strict=True):
                others[i] = before

        def pieces(i: int, example: Exchange) -> list[QuestionAnswer[Pieces]]:
            if i not in others:
                raise RowError(
                    "the row has no label with its answer", "set the source's columns: {label: NAME}"
                )
            expanded = self._with_expansions(example)
            return [self._writer.question(expanded, answer) for answer in (example.answers[0], others[i])]

        def finish(pairs: list[QuestionAnswer[Ids]]) -> tuple[Encoded, Encoded]:
            matched, other = (self._question(pair, len(self._ended(pair))) for pair in pairs)
            return matched, other

        rows = self._each(examples, pieces, finish)
        return [
            (
                row
                if isinstance(row, RowError)
                else self._finished_unit(row, example, label=_is_desirable(example))
            )
            for row, example in zip(rows, examples, strict=True)
        ]

    def _each(
        self,
        examples: Sequence[Example],
        write: Callable[[int, Exchange], list[QuestionAnswer[Pieces]]],
        finish: Callable[[list[QuestionAnswer[Ids]]], Finished],
    ) -> list[Finished | RowError]:
        """Writes each example as pairs of pieces, tokenizes the pieces of all, and finishes the
        pairs of tokens.
        """
        if self.pictures is not None:
            of_rows = (one.pictures for one in examples if isinstance(one, Exchange))
            self.pictures.decode(chain.from_iterable(of_rows))
        written = [_caught(write, i, example) for i, example in enumerate(examples)]
        flat = [
            side
            for row in written
            if not isinstance(row, RowError)
            for pair in row
            for side in (pair.source, pair.target)
        ]
        tokens = iter(self._pieces.of(flat))
        return [
            (
                row
                if isinstance(row, RowError)
                else finish([QuestionAnswer(next(tokens), next(tokens), pair.weight) for pair in row])
            )
            for row in written
        ]

    def _noted(self, row: Encoded, example: Example) -> Encoded:
        """A row with what its example has that the model does not see, or sees as control
        tokens.
        """
        assert isinstance(example, Exchange)
        keeps = self._control_mode == "keep" and self._control.first_in([all_text(example)]) is not None
        if not keeps and not example.not_rendered:
            return row
        return replace(row, not_rendered=example.not_rendered, has_control_tokens=keeps)

    def _finished_unit(
        self, sides: tuple[Encoded, Encoded], example: Example, *, label: bool | None = None
    ) -> EncodedUnit | RowError:
        """The unit of two sides, each with the pictures; notes are on the first one."""
        finished: list[Encoded] = []
        for side in sides:
            row = self._finished(side, example)
            if isinstance(row, RowError):
                return row
            finished.append(row)
        first, *others = finished
        return EncodedUnit((first, *(replace(row, not_rendered=()) for row in others)), label)

    def _conversation(self, _: int, example: Exchange) -> list[QuestionAnswer[Pieces]]:
        example = self._with_expansions(example)
        if len(example.answers) != 1:
            why = (
                "no answer" if not example.answers else "a pair of answers, which is for preference training"
            )
            raise RowError(f"the row has {why}", "write one answer, or remove the row")
        pairs = self._writer.pairs(example, last_only=self._loss_on == "last-answer")
        counting = pairs[-1:] if self._loss_on == "last-answer" else pairs
        if self._loss_on != "all" and not any(pair.weight for pair in counting):
            raise RowError("all its answers have weight 0", "add an answer, or remove the row")
        if self._template.efficient_eos and any(share_of(pair.weight) for pair in counting):
            raise RowError(
                f"an answer has a weight between 0 and 1, and answers of {LF_PREFIX}{self._template.name} end"
                " in the next question",
                "set its weight to 0 or 1, or data.template to a different one",
            )
        return pairs

    def _row(self, pairs: list[QuestionAnswer[Ids]]) -> Encoded:
        """The row of a conversation.

        With `loss_on: last-answer` pairs are taken from the end, so that the cut spares the last.
        """
        eos: Ids = [self.tokenizer.eos_token_id] if self._template.efficient_eos else []
        last_only = self._loss_on == "last-answer"
        whole = sum(len(pair.source) + len(pair.target) for pair in pairs) + len(eos)
        room = whole if self._cut_at is None else self._cut_at
        room -= len(eos)
        parts: list[tuple[Ids, list[float]]] = []
        for number, pair in enumerate(reversed(pairs) if last_only else pairs):
            if room <= 0:
                break
            source, target = balance(len(pair.source), len(pair.target), room)
            room -= source + target
            weight = 1.0 if self._loss_on == "all" else pair.weight if number == 0 or not last_only else 0.0
            loss = [float(self._loss_on == "all")] * source + [weight] * target
            if source and eos and number and (last_only or pairs[number - 1].weight):
                loss[0] = _CLOSES  # where a question begins, the answer before it ends
            parts.append((pair.source[:source] + pair.target[:target], loss))
        if last_only:
            parts.reverse()
        ids = [i for part, _ in parts for i in part] + eos
        ends = [pairs[-1].weight] * len(eos)
        return _encoded(ids, [one for _, part in parts for one in part] + ends, whole=whole)

    def _ended(self, pair: QuestionAnswer[Ids]) -> Ids:
        return [*pair.target, self.tokenizer.eos_token_id] if self._template.efficient_eos else pair.target

    def _question(self, pair: QuestionAnswer[Ids], longest: int) -> Encoded:
        """A prompt with one answer; `longest` is the length of the answer to leave room for."""
        target = self._ended(pair)
        whole = len(pair.source) + len(target)
        limit = len(pair.source) + longest if self._cut_at is None else self._cut_at
        first, kept = balance(len(pair.source), longest, limit)
        ids = pair.source[:first] + target[:kept]
        return _encoded(ids, [0] * first + [1] * (len(ids) - first), whole=whole)

    def _encode_texts(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """Texts with their end."""
        tokenizer = self.tokenizer
        end = end_of_text(tokenizer, self._template)
        begin = tokenizer.bos_token if getattr(tokenizer, "add_bos_token", False) else ""
        texts: list[Pieces] = [
            [begin + example.prompt[0].content + end] if isinstance(example, Exchange) else []
            for example in examples
        ]
        rows: list[Encoded | RowError] = []
        for ids in self._pieces.of(texts):
            kept = ids if self._cut_at is None else ids[: self._cut_at]
            rows.append(_encoded(kept, [1] * len(kept), whole=len(ids)))
        return rows


def _caught(
    write: Callable[[int, Exchange], list[QuestionAnswer[Pieces]]], i: int, example: Example
) -> list[QuestionAnswer[Pieces]] | RowError:
    assert isinstance(example, Exchange)
    try:
        return write(i, example)
    except RowError as error:
        return error


def _is_rated(example: Exchange) -> bool:
    return example.desirable is not None and len(example.answers) == 1


def _is_desirable(example: Example) -> bool:
    """An empty answer is not desirable, whatever its label."""
    return isinstance(example, Exchange) and bool(example.desirable and example.answers[0].content)


def _encoded(ids: Ids, loss: Sequence[float], *, whole: int) -> Encoded:
    """The row of tokens with a weight in the loss for each, or _CLOSES."""
    weights = np.array(loss, dtype=np.float64)
    weights[:1] = 0
    closings, in_part = weights == _CLOSES, (weights > 0) & (weights < 1)
    shares = np.array([share_of(weight) for weight in loss], dtype=np.uint8) if in_part.any() else None
    return Encoded(
        np.array(ids, dtype=np.int32),
        weights != 0,
        whole - len(ids),
        closings if closings.any() else None,
        shares=shares,
    )


@dataclass(frozen=True)
class LfChatTemplate(ChatTemplate):
    """A template of LLaMA-Factory as a chat template, which gives prompts in exactly the tokens of
    training.

    Attributes:
        writer: of the prompts.
    """

    writer: Writer | None = None

    @property
    def stop_words(self) -> tuple[str | None, ...]:
        """Those of the template, and the end of sequence."""
        return self.known_stops

    def reads_setting(self, name: str) -> bool:
        """Whether it reads a variable: it reads none."""
        del name
        return False

    def prompt_ids(self, messages: Messages, tools: list[Any] | None = None) -> Ids:
        """The tokens of a conversation up to an answer; `tools` are the schemas of functions.

        Raises:
            RowError: if the template has no way to write a message.
        """
        assert self.writer is not None
        turns = [*messages, {"role": "assistant", "content": ""}]
        exchange = read_exchange("messages", {"messages": turns} | ({"tools": tools} if tools else {}), {})
        pair = self.writer.question(exchange, exchange.answers[0])
        return PieceTokens(self.tokenizer).of([pair.source])[0]


def lf_chat_template(tokenizer: Any, template: LfTemplate, *, thinking: Thinking) -> LfChatTemplate:
    """The chat template of an adapted tokenizer."""
    stops = tuple(str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(stop_ids(tokenizer, template)))
    text = jinja_of(template, tokenizer, thinking=thinking)
    writer = Writer(template, thinking, local_day())
    return LfChatTemplate(tokenizer, text, f"LLaMA-Factory's {template.name}", stops, writer)


# ---- as Jinja

_JINJA = """\
{PREFIX}{DEFAULT}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] or system_message %}\
{% else %}{% set loop_messages = messages %}{% endif %}\
{TOOLS}{SYSTEM}{% for message in loop_messages %}{% set content = message['content'] or '' %}\
{FIRST}{% if message['role'] == 'user' %}{USER}{% elif message['role'] == 'tool' %}{OBSERVATION}\
{% elif message['role'] == 'assistant' %}\
{% if message['tool_calls'] %}{CALLS}{% else %}{THOUGHT}{ASSISTANT}{% endif %}\
{% else %}{{ raise_exception('a message has the role ' ~ message['role']) }}{% endif %}{% endfor %}{PROMPT}"""
"""Names in braces are replaced by `jinja_of`. The begin of an answer is a part of the question
before it, as in the slots.
"""


def jinja_of(template: LfTemplate, tokenizer: Any, *, thinking: Thinking) -> str:
    """The text of a chat template that renders questions and answers as the slots do.

    Thoughts of earlier answers are left out, and the prompt has an empty thought if `thinking` is
    not true: this is how a model that was trained with the template is asked. Tools and calls are
    written in three of the tool formats; the others raise an exception where there are some.

    Args:
        template: of LLaMA-Factory.
        tokenizer: adapted to it.
        thinking: data.thinking.
    """

    def written(slots: Slots, value: str) -> str:
        parts = [_expression(slot, tokenizer, value) for slot in slots]
        return "{{ " + " ~ ".join(part for part in parts if part) + " }}" if any(parts) else ""

    whole_system = written(template.system, "(system_message ~ tools_text)")
    first = ""
    if template.system_in_user:
        joined = _expression(template.system[0], tokenizer, "(system_message ~ tools_text)")
        first = (
            "{% if loop.first and (system_message or tools_text) %}{% set content = "
            + joined
            + " ~ content %}{% endif %}"
        )
        whole_system = ""
    elif whole_system:
        whole_system = f"{{% if system_message or tools_text %}}{whole_system}{{% endif %}}"
    thought = ""
    if template.reasoning:
        begin, end = (_quoted(word) for word in template.thought)
        thought = (
            f"{{% if {begin} in content and {end} in content %}}{{% set content = content.split({end})[-1]"
            " %}{% endif %}"
        )
        thought += "{% set content = content.lstrip('\\n') %}"
        if thinking == "preserve":
            thought = ""
        elif thinking is not False:
            thought = "{% if not loop.last %}" + thought + "{% endif %}"
    asks = template.reasoning and not thinking
    prompt = "{% if add_generation_prompt %}{{ " + _quoted(template.empty_thought) + " }}{% endif %}"
    parts = {
        "{PREFIX}": written(template.prefix, "''"),
        "{DEFAULT}": f"{{% set system_message = {_quoted(template.default_system)} %}}",
        "{SYSTEM}": whole_system,
        "{FIRST}": first,
        "{USER}": written(template.user, "content"),
        "{OBSERVATION}": _observation(template, tokenizer),
        "{TOOLS}": _tools(template.tool_format),
        "{CALLS}": (
            _calls(template.tool_format).replace("{FUNCTION}", written(template.function, "calls_text"))
        ),
        "{THOUGHT}": thought,
        "{ASSISTANT}": written(template.assistant, "content"),
        "{PROMPT}": prompt if asks else "",
    }
    return re.sub(r"\{[A-Z]+\}", lambda match: parts[match[0]], _JINJA)


_EACH = "{% for item in tools %}{% set tool = item['function'] if item['type'] == 'function' else item %}"
_WHOLE = "(item if item['type'] == 'function' else {'type': 'function', 'function': item})"
_PARAMETER = """\
{{ '  - ' ~ name ~ ' (' ~ (schema['type'] or '') ~ (', required' if name in needed else '') ~ '): ' \
~ (schema['description'] or '') \
~ (', should be one of [' ~ schema['enum'] | join(', ') ~ ']' if schema['enum'] else '') \
~ (', where each item should be ' ~ (schema['items']['type'] or '') if schema['items'] is mapping else '') ~ '\\n' }}"""
_DEFAULT_TOOL = (
    "{{ '> Tool Name: ' ~ tool['name'] ~ '\\nTool Description: ' ~ (tool['description'] or '') ~ '\\nTool"
    " Args:\\n' }}{% set needed = tool['parameters']['required'] or [] %}{% for name in"
    " tool['parameters']['properties'] %}{% set schema = tool['parameters']['properties'][name] %}"
    + _PARAMETER
    + "{% endfor %}{{ '\\n' }}{% endfor %}"
)
_DEFAULT_NAMES = _EACH + "{{ ('' if loop.first else ', ') ~ tool['name'] }}{% endfor %}"


def _tools(tool_format: str) -> str:
    """Sets `tools_text`, which follows the system message."""
    if tool_format == "default":
        before, between, after = DEFAULT_TOOLS.format(tools="\0", names="\0").split("\0")
        text = f"{_said(before)}{_EACH}{_DEFAULT_TOOL}{_said(between)}{_DEFAULT_NAMES}{_said(after)}"
    elif tool_format == "qwen":
        before, after = QWEN_TOOLS.format(tools="\0").split("\0")
        text = f"{_said(before)}{_EACH}{{{{ '\\n' ~ {_WHOLE} | tojson }}}}{{% endfor %}}{_said(after)}"
    elif tool_format == "llama3":
        before, between, _ = LLAMA3_TOOLS.format(date="\0", tools="\0").split("\0")
        each = f"{_EACH}{{{{ {_WHOLE} | tojson(indent=4) ~ '\\n\\n' }}}}{{% endfor %}}"
        text = f"{_said(before)}{{{{ strftime_now('%d %b %Y') }}}}{_said(between)}{each}"
    else:
        text = "{{ raise_exception('this chat template writes no tools') }}"
    return f"{{% set tools_text %}}{{% if tools %}}{text}{{% endif %}}{{% endset %}}"


def _calls(tool_format: str) -> str:
    """Writes a turn that calls functions; {FUNCTION} stands for the slots of such a turn around
    `calls_text`.
    """
    arguments = "(call['arguments'] if call['arguments'] is string else call['arguments'] | tojson)"
    as_json = "{{ '{\"name\": ' ~ call['name'] | tojson ~ ', \"KEY\": ' ~ " + arguments + " ~ '}' }}"
    separator = {"default": "\\n", "qwen": "\\n", "llama3": ", "}.get(tool_format)
    if separator is None:
        return "{{ raise_exception('this chat template writes no tool calls') }}"
    each = {
        "default": "{{ 'Action: ' ~ call['name'] ~ '\\nAction Input: ' ~ " + arguments + " }}",
        "qwen": "{{ '<tool_call>\\n' }}" + as_json.replace("KEY", "arguments") + "{{ '\\n</tool_call>' }}",
        "llama3": as_json.replace("KEY", "parameters"),
    }[tool_format]
    text = (
        "{% for item in message['tool_calls'] %}{% set call = item['function'] or item %}"
        f"{{{{ '' if loop.first else '{separator}' }}}}{each}{{% endfor %}}"
    )
    if tool_format == "llama3":  # several are a list
        some = "{% if message['tool_calls'] | length > 1 %}{{ 'BRACKET' }}{% endif %}"
        text = some.replace("BRACKET", "[") + text + some.replace("BRACKET", "]")
    return "{% set calls_text %}" + text + "{% endset %}{FUNCTION}"


def _observation(template: LfTemplate, tokenizer: Any) -> str:
    """The results of one turn's calls, which share the slots of one turn."""
    index = next(
        i for i, slot in enumerate(template.observation) if isinstance(slot, str) and CONTENT in slot
    )
    head, _, tail = str(template.observation[index]).partition(CONTENT)
    before = [_expression(slot, tokenizer, "") for slot in (*template.observation[:index], head)]
    after = [_expression(slot, tokenizer, "") for slot in (tail, *template.observation[index + 1 :])]

    def said(parts: list[str]) -> str:
        return "{{ " + " ~ ".join(part for part in parts if part) + " }}" if any(parts) else ""

    return (
        "{% if loop.first or loop.previtem['role'] != 'tool' %}"
        f"{said(before)}{{% else %}}{_said(JOINT)}{{% endif %}}{{{{ content }}}}"
        f"{{% if loop.last or loop.nextitem['role'] != 'tool' %}}{said(after)}{{% endif %}}"
    )


def _said(text: str) -> str:
    return "{{ " + _quoted(text) + " }}" if text else ""


def _expression(slot: Slot, tokenizer: Any, value: str) -> str:
    """A slot as a Jinja expression; "" for a special token that the tokenizer does not have."""
    if isinstance(slot, TokenSlot):
        text = (
            (tokenizer.bos_token if slot.name == "bos" else tokenizer.eos_token)
            if slot.special
            else slot.name
        )
        return _quoted(text) if text else ""
    before, separator, after = slot.partition(CONTENT)
    parts = [_quoted(before) if before else "", value if separator else "", _quoted(after) if after else ""]
    return " ~ ".join(part for part in parts if part)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"

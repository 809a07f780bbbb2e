"""From turns to pieces, as the slots of LLaMA-Factory's templates write them, and from pieces to tokens.

A row is a list of pairs (source, target): a question with all that stands before it, and its answer. Both are lists of pieces, and
each piece is tokenized for itself.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Generic, TypeVar

from unisono.config.lf_template import CONTENT, LfTemplate, Slots, Token
from unisono.data.encode import encode_texts
from unisono.data.lf_tools import Call, write_calls, write_tools
from unisono.data.rows import Exchange, RowError, Turn

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_BATCH_CHARACTERS = 1 << 22  # characters encoded at once
NO_TOKEN = -1
"""In place of a template's token that the tokenizer does not have."""

Piece = str | Token
Pieces = list[Piece]
Ids = list[int]


Part = TypeVar("Part", Pieces, Ids)


@dataclass
class Pair(Generic[Part]):
    """A question with all that stands before it, and its answer: as pieces, or as tokens."""

    source: Part
    target: Part


# ---- from turns to pieces


@dataclass(frozen=True)
class Writer:
    """Writes turns as pieces.

    Attributes:
        template: of LLaMA-Factory.
        thinking: data.thinking: whether an answer without a thought gets an empty one that is trained (true), or one that belongs to
            the question (false, null); false also removes thoughts.
        today: the date that some tool prompts state.
    """

    template: LfTemplate
    thinking: bool | None
    today: date

    def pairs(self, exchange: Exchange, *, last_only: bool) -> list[Pair[Pieces]]:
        """All questions and answers of a conversation.

        Args:
            exchange: with one answer.
            last_only: whether only the last answer is trained; then the others have no thoughts.

        Raises:
            RowError: if the template has no way to write a turn.
        """
        turns = [*exchange.prompt, exchange.answers[0]]
        places = range(1, len(turns), 2)
        if self.template.reasoning:
            bare = places if self.thinking is False else places[:-1] if last_only else []
            turns = self._without_thoughts(turns, bare)
        written = self._written(turns, exchange)
        pairs = [Pair(written[i - 1], written[i]) for i in places]
        for pair, i in list(zip(pairs, places, strict=True))[-1 if last_only else 0 :]:
            self._add_thought(pair, turns[i])
        return pairs

    def question(self, exchange: Exchange, answer: Turn) -> Pair[Pieces]:
        """The whole prompt and one answer; earlier answers have no thoughts.

        Raises:
            RowError: if the template has no way to write a turn.
        """
        turns = [*exchange.prompt, answer]
        if self.template.reasoning:
            places = range(1, len(turns), 2)
            turns = self._without_thoughts(turns, places if self.thinking is False else places[:-1])
        *before, last = self._written(turns, exchange)
        pair = Pair([piece for pieces in before for piece in pieces], last)
        self._add_thought(pair, turns[-1])
        return pair

    def _without_thoughts(self, turns: list[Turn], places: Iterable[int]) -> list[Turn]:
        changed = list(turns)
        for i in places:
            changed[i] = replace(turns[i], content=self.template.without_thought(turns[i].content))
        return changed

    def _add_thought(self, pair: Pair[Pieces], answer: Turn) -> None:
        if not self.template.reasoning or self.template.has_thought(answer.content):
            return
        if self.thinking:
            pair.target = [self.template.empty_thought, *pair.target]
        else:
            pair.source = [*pair.source, self.template.empty_thought]

    def _written(self, turns: list[Turn], exchange: Exchange) -> list[Pieces]:
        """The pieces of each turn; those of the first begin with prefix, system message and tools."""
        template = self.template
        system = exchange.system or template.default_system
        before: Pieces = list(template.prefix)
        in_user = ""
        if system or exchange.tools:
            tools = ""
            if exchange.tools:
                tools = write_tools(template.tool_format, exchange.tools, today=self.today)
            pieces = _filled(template.system, system + tools)
            if template.system_in_user:
                in_user = str(pieces[0])
            else:
                before += pieces
        written = [self._turn(turn, i, in_user if i == 0 else "") for i, turn in enumerate(turns)]
        return [before + written[0], *written[1:]]

    def _turn(self, turn: Turn, i: int, in_user: str) -> Pieces:
        template = self.template
        if turn.role == "user":
            pieces = _filled(template.user, in_user + turn.content)
            if template.system_in_user:
                return pieces
            # LLaMA-Factory numbers questions: its slots may have {{idx}}, and so may a text
            return [
                piece.replace("{{idx}}", str(i // 2), 1) if isinstance(piece, str) else piece
                for piece in pieces
            ]
        if turn.role == "assistant":
            return _filled(template.assistant, turn.content)
        if turn.role == "observation":
            return _filled(template.observation, turn.content)
        return _filled(template.function, self._calls(turn.content))

    def _calls(self, content: str) -> str:
        """The text of a function turn, with the thought or text around its JSON."""
        template = self.template
        around, body = "", content
        if not template.system_in_user:
            marked, thought = _TOOL_CALL.search(content), template.thought_pattern.search(content)
            if marked:
                around, body = content.replace(marked[0], ""), marked[1]
            elif thought:
                around, body = thought[0], content.replace(thought[0], "")
        return around + write_calls(template.tool_format, _parsed_calls(body))


def _filled(slots: Slots, content: str) -> Pieces:
    return [slot.replace(CONTENT, content, 1) if isinstance(slot, str) else slot for slot in slots]


def _parsed_calls(text: str) -> list[Call]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RowError("a function call is not valid JSON", 'write {"name": …, "arguments": {…}}') from None
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        raise RowError("a function call has no name or no arguments", 'write {"name": …, "arguments": {…}}')
    return [Call(call["name"], call["arguments"]) for call in calls]


# ---- from pieces to tokens


class PieceTokens:
    """Tokenizes pieces, many at once, equal ones once.

    Attributes:
        absent: names of tokens that the template writes and the tokenizer does not have.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.absent: list[str] = []
        self._tokens: dict[Token, Ids] = {}

    def of(self, rows: Iterable[Pieces]) -> list[Ids]:
        """The tokens of each list of pieces."""
        rows = list(rows)
        texts = list(
            dict.fromkeys(piece for row in rows for piece in row if isinstance(piece, str) and piece)
        )
        known: dict[Piece, Ids] = {"": []}
        for group in _groups(texts):
            known.update(zip(group, self._encoded(group), strict=True))
        for row in rows:
            for piece in row:
                if isinstance(piece, Token) and piece not in known:
                    known[piece] = self._single(piece)
        return [[i for piece in row for i in known[piece]] for row in rows]

    def _encoded(self, texts: list[str]) -> list[Ids]:
        if not self._tokenizer.is_fast:
            return [tokens.ids for tokens in encode_texts(self._tokenizer, texts, special=False)]
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _single(self, token: Token) -> Ids:
        if token not in self._tokens:
            self._tokens[token] = self._looked_up(token)
        return self._tokens[token]

    def _looked_up(self, token: Token) -> Ids:
        tokenizer = self._tokenizer
        if token.special:
            special = tokenizer.bos_token_id if token.name == "bos" else tokenizer.eos_token_id
            return [] if special is None else [special]
        found = tokenizer.convert_tokens_to_ids(token.name)
        if found is None:
            self.absent.append(token.name)
        return [NO_TOKEN if found is None else found]


def _groups(texts: list[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _BATCH_CHARACTERS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group

"""The tokens between two turns of an answer, as the chat template writes them.

What the model has sampled stays as it is: no token of it is made again from its text. Only what
follows it, the results of tools and the beginning of the next turn, is taken from a rendering of
the conversation, whose beginning must be that of the rendering before.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from unisono.base.errors import ConfigError
from unisono.base.text import one_line
from unisono.trainer.data import OpenPrompt, RowError
from unisono.trainer.data.encode import RowEncoder
from unisono.trainer.objectives.environments.episode_calls import RequestedCall
from unisono.trainer.plan.tool_calls import ToolCallReader

Message = dict[str, Any]
_THOUGHT = "</think>"
_KEY = "rollout.environment.use"


@dataclass(frozen=True)
class Rendering:
    """A conversation up to where the next turn of the model begins.

    Attributes:
        messages: whose answers are only their calls of tools: their texts are in no new token.
        tokens: of the template's own rendering of them.
    """

    messages: list[Message]
    tokens: list[int]


@dataclass(frozen=True)
class TurnWriter:
    """Writes conversations with tools.

    Attributes:
        encoder: of the run's prompts.
        tokenizer: of transformers.
        tools: schemas.
        stop_ids: tokens that end a turn.
    """

    encoder: RowEncoder
    tokenizer: Any
    tools: Sequence[Mapping[str, Any]]
    stop_ids: Set[int]
    names: Set[str] = field(init=False)

    def __post_init__(self) -> None:
        """Takes the names from the schemas."""
        object.__setattr__(self, "names", {str(tool["function"]["name"]) for tool in self.tools})

    def begin(self, messages: Sequence[Message]) -> Rendering:
        """The prompt.

        Raises:
            RowError: if the template does not render it.
        """
        return Rendering(list(messages), self._tokens(messages))

    def calls_in(self, tokens: Sequence[int]) -> tuple[str, list[RequestedCall]]:
        """The text of a turn of the model without its calls of tools, and these calls.

        Args:
            tokens: without a stop token.
        """
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        thought, mark, spoken = text.rpartition(_THOUGHT)
        reader = ToolCallReader(self.names)
        pieces = [*reader.push(spoken), *reader.close()]
        said = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [
            # Templates of Mistral take ids of nine letters or digits only.
            RequestedCall(
                f"{number:09d}", piece["function"]["name"], _arguments(piece["function"]["arguments"])
            )
            for number, piece in enumerate(piece for piece in pieces if not isinstance(piece, str))
        ]
        return thought + mark + said, calls

    def text_of(self, tokens: Sequence[int]) -> str:
        """An answer as people read it."""
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def follow(
        self, before: Rendering, calls: Sequence[RequestedCall], results: Sequence[str]
    ) -> tuple[Rendering, list[int]]:
        """The conversation with a turn of the model and the results of its calls, and the tokens
        that follow the turn's stop token.

        Raises:
            RowError: if the template refuses it, or writes what was before in another way.
        """
        answer: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [one.to_message() for one in calls],
        }
        given = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        messages = [*before.messages, answer, *given]
        tokens = self._tokens(messages)
        size = len(before.tokens)
        if tokens[:size] != before.tokens:
            raise RowError(self._difference(before.tokens, tokens), "use a chat template that only appends")
        stop = next((at for at in range(size, len(tokens)) if tokens[at] in self.stop_ids), None)
        if stop is None:
            raise RowError(
                "the chat template writes no stop token between a turn of the model and the result of a tool",
                "end each message of the assistant with the token that ends an answer",
            )
        return Rendering(messages, tokens), tokens[stop + 1 :]

    def check(self, messages: Sequence[Message], *, environment: str) -> None:
        """Refuses a template that does not write the tools, or a conversation with one of them.

        Args:
            messages: a prompt.
            environment: its label, for people.

        Raises:
            ConfigError: then.
        """
        function: Any = self.tools[0]["function"]
        arguments = dict.fromkeys(function["parameters"].get("properties", {}), "value")
        try:
            before = self.begin(messages)
            self.follow(before, [RequestedCall("000000000", function["name"], arguments)], ["result"])
        except RowError as error:
            raise ConfigError.of(
                f"the chat template does not write conversations with the tools of {environment}",
                where=_KEY,
                why=one_line(error.why, limit=300),
                fix="set data.template to a file with a chat template for tools, or train a model that has one",
            ) from None

    def _tokens(self, messages: Sequence[Message]) -> list[int]:
        prompt = OpenPrompt([dict(one) for one in messages], "{}", [dict(tool) for tool in self.tools])  # type: ignore[misc]
        (unit,) = self.encoder.encode_prompts([prompt])
        if isinstance(unit, RowError):
            raise unit
        return [int(token) for token in unit.sides[0].ids]

    def _difference(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        pairs = zip(before, tokens, strict=False)
        at = next(
            (at for at, (one, other) in enumerate(pairs) if one != other), min(len(before), len(tokens))
        )
        old, new = (
            one_line(repr(self.tokenizer.decode(ids[at : at + 8])), limit=60) for ids in (before, tokens)
        )
        return f"the chat template rewrites what the model has read: {old} at token {at} becomes {new}"


def _arguments(text: str) -> dict[str, object]:
    value: dict[str, object] = json.loads(text)
    return value

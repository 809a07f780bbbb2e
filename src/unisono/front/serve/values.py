"""Requests for values of texts, and their answers: embeddings in OpenAI's form, scores and labels
in vLLM's. Without I/O.
"""

import array
import base64
import secrets
import sys
import time
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from unisono.front.serve.protocol import ApiError, StrictObject
from unisono.trainer.plan.talk_messages import Gives, Ready, TextsRequest, Valued

_MOST_TEXTS = 2_048  # of a request, as in OpenAI's API
_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=_MOST_TEXTS)]
_Tokens = Annotated[list[int], Field(min_length=1)]
_Cut = Annotated[int, Field(ge=-1, le=2**31 - 1)]

PATHS: dict[str, tuple[Gives, ...]] = {
    "/v1/chat/completions": ("answers",),
    "/v1/completions": ("answers",),
    "/v1/responses": ("answers",),
    "/v1/embeddings": ("embeddings",),
    "/v1/score": ("scores", "embeddings"),
    "/score": ("scores", "embeddings"),
    "/classify": ("labels",),
}
"""What a model has to give for a path."""
_WHY: dict[Gives, str] = {
    "answers": "this model writes texts, and gives no embeddings, scores or labels",
    "embeddings": "this is an embedding model: /v1/embeddings and /v1/score are answered",
    "scores": "this is a reward model: /v1/score is answered",
    "labels": "this is a classifier: /classify is answered",
}


def refuse_path(path: str, facts: Ready) -> None:
    """Refuses a path for which the model does not give what is needed.

    Raises:
        ApiError: with what it gives.
    """
    if path in PATHS and facts.gives not in PATHS[path]:
        raise ApiError(404, f"{path}: {_WHY[facts.gives]}", code="not_supported")


class ValueRequest(StrictObject):
    """What requests for values have."""

    prefix: ClassVar = ""
    model: str
    truncate_prompt_tokens: _Cut | None = None
    user: str | None = None

    @abstractmethod
    def question(self, facts: Ready) -> TextsRequest:
        """What the task is asked of a model."""

    @abstractmethod
    def entry(self, number: int, value: str, facts: Ready) -> dict[str, Any]:
        """The object of a text or pair by its value."""

    def answer(self, valued: Valued, facts: Ready) -> dict[str, Any]:
        """The object of all values."""
        data = [self.entry(number, value, facts) for number, value in enumerate(valued.values)]
        return {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            "data": data,
            "usage": {"prompt_tokens": valued.tokens, "completion_tokens": 0, "total_tokens": valued.tokens},
        }


class EmbeddingRequest(ValueRequest):
    """`POST /v1/embeddings`; `input_type` is of those that other servers have beside it."""

    prefix = "embd"
    input: _Text | _Texts | _Tokens | Annotated[list[_Tokens], Field(min_length=1, max_length=_MOST_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    input_type: Literal["query", "document"] | None = None

    def question(self, facts: Ready) -> TextsRequest:
        """What the task is asked.

        Raises:
            ApiError: if embeddings would be shortened.
        """
        if self.dimensions is not None and self.dimensions != facts.width:
            what = f"an embedding has {facts.width} dimensions, and the model was not trained for fewer"
            raise ApiError(400, what, param="dimensions", code="invalid_value")
        whole = self.input if isinstance(self.input, list) else [self.input]
        texts: Any = [whole] if isinstance(whole[0], int) else whole
        return TextsRequest(
            texts=tuple(texts), prefix=self.input_type, most_tokens=self.truncate_prompt_tokens
        )

    def entry(self, number: int, value: str, facts: Ready) -> dict[str, Any]:
        """The object of a text."""
        del facts
        shown = value if self.encoding_format == "base64" else _numbers(value)
        return {"object": "embedding", "index": number, "embedding": shown}


class ScoreRequest(ValueRequest):
    """`POST /v1/score`: one text with one or several, or as many with as many."""

    prefix = "score"
    text_1: _Text | _Texts
    text_2: _Text | _Texts

    def question(self, facts: Ready) -> TextsRequest:
        """What the task is asked.

        Raises:
            ApiError: if the numbers of texts do not match.
        """
        firsts, seconds = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        if len(firsts) not in (1, len(seconds)):
            what = (
                f"text_1 has {len(firsts)} texts, but text_2 has {len(seconds)}; text_1 must have 1, or as"
                " many as text_2"
            )
            raise ApiError(400, what, param="text_1", code="invalid_value")
        if self.truncate_prompt_tokens is not None and facts.gives == "scores":
            what = "an answer that is cut has a different score; shorten it"
            raise ApiError(400, what, param="truncate_prompt_tokens", code="unsupported_parameter")
        if len(firsts) < len(seconds):
            firsts = firsts * len(seconds)
        return TextsRequest(
            texts=tuple(firsts), seconds=tuple(seconds), most_tokens=self.truncate_prompt_tokens
        )

    def entry(self, number: int, value: str, facts: Ready) -> dict[str, Any]:
        """The object of a pair."""
        del facts
        return {"index": number, "object": "score", "score": _numbers(value)[0]}


class ClassifyRequest(ValueRequest):
    """`POST /classify`."""

    prefix = "classify"
    input: _Text | _Texts

    def question(self, facts: Ready) -> TextsRequest:
        """What the task is asked."""
        del facts
        texts = [self.input] if isinstance(self.input, str) else self.input
        return TextsRequest(texts=tuple(texts), most_tokens=self.truncate_prompt_tokens)

    def entry(self, number: int, value: str, facts: Ready) -> dict[str, Any]:
        """The object of a text."""
        probs = _numbers(value)
        label = facts.labels[probs.index(max(probs))]
        return {"index": number, "label": label, "probs": probs, "num_classes": len(probs)}


def _numbers(value: str) -> list[float]:
    numbers = array.array("f", base64.b64decode(value))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()

"""Functions that rate answers: rewards of `objective: grpo`, and metrics of evaluations."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from unisono.base.text import nearest, one_line
from unisono.base.user_code import own_class
from unisono.trainer.config.sections import NamesFile, Pattern, SecondsText, Section, float_of_yaml

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "exact": ("column",),
    "contains": ("column",),
    "regex": ("pattern",),
    "length": ("min", "max"),
    "format": ("tags",),
    "json_valid": (),
    "json_schema": ("schema",),
    "math": ("column",),
    "rouge_l": ("column",),
    "bleu": ("column",),
    "model": ("path", "device"),
}
"""The built-in functions, and the keys that each of them uses beside those of all."""

Number = Annotated[float, BeforeValidator(float_of_yaml)]


class AnswerFunction(Section):
    """A function that gives a number for each answer: of your own, or built in."""

    use: str = Field(
        min_length=1,
        description=(
            "your own FILE.py:FUNCTION, with `--trust-code`; or exact, contains, regex, length, format,"
            " json_valid, json_schema, math, rouge_l, bleu, model (only in `rewards`)"
        ),
    )
    deadline: SecondsText = Field(
        default="60 seconds", description="time limit of one call, which rates the answers to one prompt"
    )
    on_error: Literal["error", "skip"] | Number = Field(
        default="error",
        description=(
            "what happens if it raises, misses the deadline, or returns anything but a number. error:"
            " the run ends with exit code 4 and a checkpoint; skip: the answer leaves its group, or the mean;"
            " a number: the value of that answer"
        ),
    )
    column: str = Field(
        default="answer",
        min_length=1,
        description=(
            "exact, contains, math, rouge_l, bleu: the column of the row to compare with; in `eval.metrics`"
            " `answer` is the reference"
        ),
    )
    pattern: Pattern | None = Field(default=None, description="regex: searched in the answer")
    min: int = Field(default=0, ge=0, description="length: fewest tokens of an answer")
    max: int | None = Field(
        default=None, ge=0, description="length: maximum number of tokens in an answer; null: unlimited"
    )
    tags: list[Annotated[str, Field(min_length=1)]] = Field(
        default=["think", "answer"],
        description="format: the answer consists of these tags, in order, each with a text",
    )
    schema_: Annotated[str | None, NamesFile()] = Field(
        default=None, alias="schema", min_length=1, description="json_schema: the file of the JSON Schema"
    )

    kinds: ClassVar[frozenset[str]] = frozenset(FUNCTIONS)
    """The built-in functions that can be used."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @property
    def is_own(self) -> bool:
        """Whether it is a function in a file of the user's own."""
        return own_class(self.use) is not None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it uses beside those of all functions."""
        return FUNCTIONS.get(self.use, ())

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without the keys of other functions, so that a written config can be read again."""
        unused = _SPECIAL - set(self.keys)
        return {key: value for key, value in dump(self).items() if key.rstrip("_") not in unused}


_SPECIAL = frozenset(name for names in FUNCTIONS.values() for name in names)


class MetricSection(AnswerFunction):
    """A metric of generated answers: a function as in `rewards`, whose mean is reported."""

    kinds: ClassVar[frozenset[str]] = frozenset(FUNCTIONS) - {"model"}


def function_contradictions(function: AnswerFunction, key: str) -> list[str]:
    """The keys of a function that contradict each other, each as `key: problem; remedy`; `key` is
    that of the function.
    """
    known = [name for name in FUNCTIONS if name in function.kinds]
    if not function.is_own and function.use not in known:
        near = nearest(function.use, known)
        hint = f"did you mean `{near}`?" if near else f"write FILE.py:FUNCTION, or one of {', '.join(known)}"
        what = "metric" if isinstance(function, MetricSection) else "reward"
        return [f"{key}.use: there is no {what} {one_line(function.use, limit=60)}; {hint}"]
    given = {name.rstrip("_") for name in function.model_fields_set} & _SPECIAL - set(function.keys)
    problems = [f"{key}.{name}: {function.use} does not use it; remove it" for name in sorted(given)]
    missing = [name for name in ("pattern", "schema", "path") if name in function.keys]
    problems += [
        f"{key}.{name}: {function.use} needs it; set it"
        for name in missing
        if getattr(function, "schema_" if name == "schema" else name) is None
    ]
    return problems


def function_names(functions: Sequence[AnswerFunction]) -> list[str]:
    """A name for each function of a list: its own; where several have the same, with its number."""
    names = [parts[1] if (parts := own_class(one.use)) else one.use for one in functions]
    count = Counter(names)
    return [f"{name}.{index}" if count[name] > 1 else name for index, name in enumerate(names)]

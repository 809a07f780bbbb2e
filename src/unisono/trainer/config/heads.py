"""Models that give values of a row instead of logits of tokens: the head of classifiers, and the
sections `classify` and `embed`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from unisono.trainer.config.sections import Positive, Section
from unisono.trainer.config.yaml_file import Takes

CLASSIFY = "classify"
EMBED = "embed"
REWARD = "reward"
HEADS = (REWARD, CLASSIFY)
"""Objectives that train a head on the last token of a row, in transformers' class
`AutoModelForSequenceClassification`.
"""


@dataclass(frozen=True, slots=True)
class SequenceHead:
    """The head `score` of a row's last token.

    Attributes:
        labels: the names of its outputs; empty for a reward model, whose one value has no name.
        multi_label: whether a row may have any number of labels.
    """

    labels: tuple[str, ...] = ()
    multi_label: bool = False

    @property
    def outputs(self) -> int:
        """The number of its values for a row."""
        return len(self.labels) or 1

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of config.json that describe it."""
        if not self.labels:
            return {"num_labels": 1}
        kind = "multi_label_classification" if self.multi_label else "single_label_classification"
        names = dict(enumerate(self.labels))
        return {
            "num_labels": len(names),
            "id2label": names,
            "label2id": {name: number for number, name in names.items()},
            "problem_type": kind,
        }


def label_text(value: object) -> str | None:
    """The name of a label in a file: a text as it is, a whole number or a boolean as YAML writes
    it; None for any other value.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | str) else None


def _texts(value: Any) -> Any:
    """Numbers and booleans as texts, which YAML makes of plain words like 1 and true."""
    if isinstance(value, list):
        return [item if label_text(item) is None else label_text(item) for item in value]
    if isinstance(value, dict):
        return {key if label_text(key) is None else label_text(key): item for key, item in value.items()}
    return value


def _check_labels(labels: list[str]) -> list[str]:
    twice = next((name for name in labels if labels.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the label {twice!r} is named twice; name it once")
    if not all(name.strip() for name in labels):
        raise ValueError("a label is empty; remove it, or write a name")
    return labels


Labels = Annotated[list[str], BeforeValidator(_texts), Field(min_length=1), AfterValidator(_check_labels)]
Weights = Annotated[dict[str, Positive], BeforeValidator(_texts), Takes("a mapping of labels to numbers")]


class ClassifySection(Section):
    """The labels of `objective: classify`, and how they count."""

    labels: Labels | None = Field(
        default=None,
        description=(
            "the labels, in the order of the model's outputs; null: all labels of the training rows, sorted"
        ),
    )
    multi_label: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "a row has any number of labels, each of which is right or wrong by itself; auto: if the first"
            " row for training has the column `labels`"
        ),
    )
    class_weights: Literal["balanced"] | Weights | None = Field(
        default=None,
        description=(
            "weights of the labels in the loss, e.g. `{spam: 3, other: 1}`; balanced: inverse to the"
            " number of training rows of each label; null: all rows count the same"
        ),
    )


class EmbedSection(Section):
    """The embeddings of `objective: embed`, and the loss that compares them."""

    pooling: Literal["last", "mean"] = Field(
        default="last",
        description=(
            "the embedding of a text: last: the last hidden state of its last token; mean: the mean over all"
            " its tokens"
        ),
    )
    normalize: bool = Field(
        default=True,
        description="embeddings have length 1, so that their product is the cosine; false: dot products",
    )
    temperature: Positive = Field(
        default=0.05,
        description="similarities are divided by it in the loss; 0.05 is the scale 20 of sentence-transformers",
    )
    query_prefix: str = Field(
        default="", description="text before every anchor, e.g. `query: `; exported as the prompt `query`"
    )
    document_prefix: str = Field(
        default="",
        description="text before every positive and negative; exported as the prompt `document`",
    )

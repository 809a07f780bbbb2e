"""Sections of `objective: grpo`: rewards, how answers are sampled, and the loss on them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from unisono.base.text import one_line, parse_seconds
from unisono.base.user_code import own_class
from unisono.trainer.config.answer_functions import AnswerFunction, Number, function_contradictions
from unisono.trainer.config.sections import (
    NamesFile,
    NotNegative,
    Positive,
    SecondsText,
    Section,
    float_of_yaml,
)
from unisono.trainer.config.yaml_file import Takes

_MOST_PATIENCE_S = 25 * 60  # ranks that wait for each other give up after 30 minutes


def _check_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not an http or https URL; write http://HOST:PORT")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(
            "it has more than a host and a port; write http://HOST:PORT, and set UNISONO_SAMPLER_KEY"
        )
    _ = parts.port  # raises ValueError if it is none
    return text.rstrip("/")


def _check_patience(text: str) -> str:
    if parse_seconds(text) > _MOST_PATIENCE_S:
        raise ValueError(f"{text!r} is too long; write at most {_MOST_PATIENCE_S // 60} minutes")
    return text


ServerUrl = Annotated[str, AfterValidator(_check_url), Takes("a URL, e.g. `http://127.0.0.1:8000`")]
ShortPatience = Annotated[
    str, AfterValidator(_check_patience), Takes("a time of at most 25 minutes, e.g. `5 minutes`")
]


class RewardSection(AnswerFunction):
    """A reward of answers: your own function, or a built-in one."""

    weight: Number = Field(default=1.0, description="factor of this reward in the sum of rewards")
    path: Annotated[str | None, NamesFile()] = Field(
        default=None,
        min_length=1,
        description="model: the directory of a finished run with `objective: reward`; its value is the reward",
    )
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description=(
            "model: the device of the reward model; cuda: the rank's GPU, which also holds its weights"
        ),
    )


class EnvironmentSection(Section):
    """The environment in which the model acts during an answer: a class whose methods are tools."""

    use: str = Field(min_length=1, description="your own FILE.py:CLASS, with `--trust-code`")
    weight: Number = Field(
        default=1.0, description="factor of the value of its method `reward` in the sum of rewards"
    )
    deadline: SecondsText = Field(default="60 seconds", description="time limit of one call of a method")
    on_error: Literal["error", "skip"] | Number = Field(
        default="error",
        description=(
            "what happens if `reset` or `reward` raises, a call misses the deadline, or a process ends."
            " error:"
            " the run ends with exit code 4 and a checkpoint; skip: the answer leaves its group; a number: the"
            " reward of that answer. An exception of a tool is given to the model as text"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value


class RolloutSection(Section):
    """How answers are sampled."""

    group: int = Field(
        default=8, ge=1, le=4096, description="answers to each prompt; they are compared with each other"
    )
    max_new_tokens: int = Field(
        default=256,
        ge=1,
        description=(
            "maximum number of tokens of an answer, over all its turns and the results of tools; prompts get"
            " the rest of data.max_length"
        ),
    )
    temperature: Positive = Field(
        default=1.0, description="sampling temperature, which also applies to log-probabilities in the loss"
    )
    top_p: Annotated[float, BeforeValidator(float_of_yaml), Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="sample from the most likely tokens with this total probability; 1: from all"
    )
    top_k: int = Field(
        default=0, ge=0, description="sample from this many of the most likely tokens; 0: from all"
    )
    steps: int = Field(
        default=1, ge=1, le=1000, description="optimizer steps for the answers that were sampled together"
    )
    resample: int = Field(
        default=0,
        ge=0,
        le=100,
        description=(
            "draw another prompt, up to this many times, if all answers get the same reward; 0: never"
        ),
    )
    environment: EnvironmentSection | None = Field(
        default=None, description="null: answers have one turn, without tools"
    )
    turns: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="environment: most turns of the model in an answer",
    )
    engine: Literal["own", "vllm"] = Field(
        default="own",
        description=(
            "what samples the answers. own: the model of each rank; vllm: the vLLM server at `url`, which"
            " gets the"
            " adapter before each rollout"
        ),
    )
    url: ServerUrl | None = Field(
        default=None, description="vllm: address of the server; its key is in UNISONO_SAMPLER_KEY"
    )
    patience: ShortPatience = Field(
        default="5 minutes",
        description=(
            "vllm: how long to wait for a server that has stopped answering, and for a single answer; then"
            " the run saves a checkpoint and ends with exit code 4"
        ),
    )

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without the keys of a server or an environment if there is none, so that a written config
        can be read again.
        """
        unused = [] if self.engine == "vllm" else ["url", "patience"]
        unused += [] if self.environment else ["environment", "turns"]
        return {key: value for key, value in dump(self).items() if key not in unused}


class GrpoSection(Section):
    """The loss on sampled answers, by their advantages."""

    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "rloo"] = Field(
        default="dapo",
        description=(
            "dapo (arXiv:2503.14476): mean over all answer tokens of the step; bnpo: the same mean; grpo"
            " (arXiv:2402.03300): mean over answers of their means; dr_grpo (arXiv:2503.20783): divided by"
            " answers × max_new_tokens; gspo (arXiv:2507.18071): ratios of whole answers; cispo"
            " (arXiv:2506.13585): clipped ratios as weights; rloo (arXiv:2402.14740): whole answers, compared"
            " with the mean of the others"
        ),
    )
    clip: Annotated[
        tuple[Annotated[Number, Field(ge=0.0)], Annotated[Number, Field(ge=0.0)]],
        Takes("a list of two numbers, how far a ratio may be below 1 and above 1"),
    ] = Field(
        default=(0.2, 0.28),
        description="how far below 1 and above 1 the ratio of new to old probability counts",
    )
    dual_clip: Annotated[Number, Field(gt=1.0)] | None = Field(
        default=None,
        description="largest ratio that counts for a negative advantage (arXiv:1912.09729); 3 is usual; null: any",
    )
    scale: Literal["auto", "group", "batch", "none"] = Field(
        default="auto",
        description=(
            "what an advantage (the reward less the mean of its group) is divided by: the standard deviation"
            " of the group, or of all answers of the rollout, or nothing; auto: group, and none with rloo"
        ),
    )
    beta: NotNegative = Field(
        default=0.0,
        description=(
            "weight of the divergence (k3, times the ratio) from the model as it starts: the model without its"
            " adapter, or a copy in memory if all weights are trained, or the adapter is not new; 0: none"
        ),
    )
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        default="none",
        description=(
            "weights of tokens, or of whole answers, for a sampler whose probabilities differ from the"
            " training forward's: their ratio, at most `correction_cap` (truncate), or 0 above it (mask)"
        ),
    )
    correction_cap: Positive = Field(default=3.0, description="largest weight of `correction`")
    truncated: Literal["mask", "keep", "penalize"] = Field(
        default="mask",
        description=(
            "answers that reached max_new_tokens. mask: they count in their group, but have no loss; keep:"
            " like others; penalize: their reward is the lowest of the group"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _clip_from_list(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("clip"), list):
            return {**value, "clip": tuple(value["clip"])}
        return value


def grpo_contradictions(
    rewards: Sequence[RewardSection],
    rollout: RolloutSection,
    *,
    answers: int,
    max_length: int,
    section: GrpoSection,
) -> list[str]:
    """The keys of rewards and rollouts that contradict each other, or other sections, each as `key:
    problem; remedy`.

    Args:
        rewards: of the config.
        rollout: of the config.
        answers: of a step.
        max_length: tokens of prompt and answer.
        section: of the loss.
    """
    size, group = answers, rollout.group
    rules = [
        (
            not rewards and rollout.environment is None,
            "rewards: without a reward there is nothing to learn from; name at least one, e.g. exact",
        ),
        (group < 2, "rollout.group: an answer is compared with others of its group; set it to 2 or more"),
        (
            size % group != 0,
            (
                f"batch.global: {size} answers of a step are not whole groups of {group}; set it to a multiple"
                f" of rollout.group, e.g. {-(-size // group) * group}"
            ),
        ),
        (
            rollout.max_new_tokens >= max_length,
            (
                f"rollout.max_new_tokens: {rollout.max_new_tokens} leave no room for a prompt; raise"
                " `data.max_length`, which limits prompt and answer together"
            ),
        ),
    ]
    rules += [
        (
            section.correction != "none" and rollout.steps > 1,
            (
                "grpo.correction: with several steps for the same answers, ratios already compare with the"
                " sampler; set `correction: none`, or `rollout.steps: 1`"
            ),
        ),
        (
            section.loss == "cispo" and section.dual_clip is not None,
            "grpo.dual_clip: cispo limits ratios by `clip` alone; remove it",
        ),
    ]
    problems = [text for is_wrong, text in rules if is_wrong] + _environment_contradictions(rollout)
    for number, reward in enumerate(rewards):
        problems += function_contradictions(reward, f"rewards.{number}")
    return problems


def _environment_contradictions(rollout: RolloutSection) -> list[str]:
    environment = rollout.environment
    if environment is None:
        is_unused = "turns" in rollout.model_fields_set
        return [
            "rollout.turns: only an environment has turns; set `rollout.environment`, or remove it"
        ] * is_unused
    if own_class(environment.use) is None:
        use = one_line(environment.use, limit=60)
        return [f"rollout.environment.use: {use} is not a class in a file; write FILE.py:CLASS"]
    return []


def server_contradictions(
    rollout: RolloutSection, *, adapter_kind: str | None, has_whole_modules: bool
) -> list[str]:
    """The keys that contradict the engine of a rollout, each as `key: problem; remedy`.

    Args:
        rollout: of the config.
        adapter_kind: of `adapter`; None without one.
        has_whole_modules: whether the adapter has modules that are trained as a whole.
    """
    if rollout.engine == "own":
        given = [key for key in ("url", "patience") if key in rollout.model_fields_set]
        return [
            f"rollout.{key}: engine own does not use it; remove it, or set `rollout.engine: vllm`"
            for key in given
            if getattr(rollout, key) is not None
        ]
    rules = [
        (
            rollout.url is None,
            "rollout.url: engine vllm needs its address; set it, e.g. http://127.0.0.1:8000",
        ),
        (
            adapter_kind is None,
            (
                "rollout.engine: vllm gets the weights as a LoRA adapter, and there is none; set `adapter: {kind:"
                " lora}`, or `rollout.engine: own`"
            ),
        ),
        (
            adapter_kind not in (None, "lora", "rslora"),
            f"rollout.engine: vllm does not load adapters of kind {adapter_kind}; set `adapter.kind` to lora or rslora",
        ),
        (
            has_whole_modules,
            "rollout.engine: vllm does not load whole modules of an adapter; remove `adapter.modules_to_save`",
        ),
        (
            rollout.temperature != 1 and (rollout.top_p < 1 or rollout.top_k > 0),
            (
                "rollout.temperature: vllm gives log-probabilities before the temperature, or after top_p and"
                " top_k; set temperature to 1, or top_p to 1 and top_k to 0"
            ),
        ),
    ]
    return [text for is_wrong, text in rules if is_wrong]

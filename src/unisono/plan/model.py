"""The plan and its parts: plain values, written to plan.json and read by the worker."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from unisono.config.schema import RunConfig


class Part(BaseModel):
    """A frozen value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelFacts(Part):
    """What a model's files say, read without torch."""

    directory: str
    """Where the files are on this machine."""
    model_type: str
    parameters: int
    """All of them; tied weights count once."""
    hidden_size: int
    layers: int
    intermediate_size: int
    vocab_size: int
    linear_parameters: int
    """Those in the matrices of the layers, which `all-linear` adapts."""
    linear_in_out: int
    """Sum over these matrices of in_features + out_features; times rank it is the size of an adapter."""
    weight_bytes: int
    digest: str
    """Of config.json and of the weights' names, shapes, sizes and contents."""


class SplitSummary(Part):
    """The rows of training or of evaluation as the model will see them. Counts are of one epoch."""

    rows: int
    sequences: int
    tokens: int
    loss_tokens: int
    longest_sequence: int
    """Tokens."""
    longest_row: int
    """Tokens."""


class DataSummary(Part):
    """What preparing the data gave; the rows themselves are in the cache."""

    cache_dir: str
    """The directory of the token table; `data.table.TokenTable.open` reads it."""
    cache_hit: bool
    cache_reason: str
    train: SplitSummary
    eval: SplitSummary | None
    ledger: dict[str, int]
    """The totals of data.json: rows, used, cut, split, dropped, bad, eval, tokens, tokens_cut, loss_tokens."""
    formats: list[str]
    """One line a source: which format was taken, and why."""
    template: str
    """Where the chat template comes from."""
    total_steps: int
    """Optimizer steps of the whole duration."""
    digest: str
    """Of the rows as the model sees them, their order, and the tokenizer."""
    warnings: list[str] = []


class DeviceChoice(Part):
    """The device of one rank."""

    kind: Literal["cpu", "cuda"]
    index: int | None = None
    uuid: str | None = None
    name: str
    memory_bytes: int
    """Free when the plan was made."""
    bfloat16: bool


class MemoryEstimate(Part):
    """Bytes that one rank will need, part by part."""

    weights: int
    trainable: int
    """Trained weights in float32, gradients and optimizer state."""
    activations: int
    loss_head: int
    total: int


class ResumePoint(Part):
    """The checkpoint that the run goes on from."""

    step: int
    path: str


class RunPlan(Part):
    """All that was decided. The worker does what stands here and decides nothing again."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    run_id: str
    """The same over all starts of a run."""
    config: RunConfig
    config_digest: str
    output_dir: str
    world_size: int
    device: DeviceChoice
    host: str
    threads: int
    dtype: Literal["float32", "bfloat16", "float16"]
    """Of frozen weights and of the computation. What is trained is kept in float32."""
    model: ModelFacts
    data: DataSummary
    global_batch: int
    micro_batch: int
    gradient_checkpointing: bool
    total_steps: int
    total_sequences: int
    """Sequences of the whole run; the last step may be short."""
    steps_per_epoch: float
    warmup_steps: int
    eval_every: int | None
    """Steps."""
    checkpoint_every: int
    """Steps."""
    memory: MemoryEstimate
    resume: ResumePoint | None
    resume_reason: str
    """One line for the first screen: fresh, resumed from where and why, extended."""
    ignored_variables: list[str] = []
    origins: dict[str, str] = {}
    """Where each value that was not simply written in the config came from."""
    warnings: list[str] = []
    faults: dict[str, Any] = {}
    """Written by drills and tests only."""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of plan.json."""
        return self.model_dump(mode="json", by_alias=True)

"""The plan and its parts: plain values, written to plan.json and read by the worker; which
sequences make which step of it, and the estimate of a rank's memory.
"""

import hashlib
import heapq
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from unisono.base.user_code import MODEL_CODE
from unisono.guard.places.ranks import DeviceChoice, NodePlace, PlanPart, RankPlace
from unisono.trainer.config.heads import SequenceHead
from unisono.trainer.config.optimizers import optimizer_named
from unisono.trainer.config.own_code import own_code_of
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.plan.mesh import Mesh, Strategy


class VisionFacts(PlanPart):
    """The vision part of a model whose rows have pictures, with its projector."""

    layers: int
    hidden_size: int
    intermediate_size: int
    patch_values: int
    """Values of the pixels of a patch."""
    parameters: int
    """Without the projector."""
    in_out: int
    """Sum of in_features + out_features over its linear layers, which an adapter adapts."""
    projector_parameters: int


class ModelFacts(PlanPart):
    """Facts from a model's files, read without torch."""

    directory: str
    """The directory of the files on this machine."""
    model_type: str
    parameters: int
    """Total number; tied weights count once."""
    other_parameters: int = 0
    """Parameters of the vision and audio parts of a multimodal checkpoint, which are not in memory:
    they are frozen, and results have them as they are.
    """
    hidden_size: int
    layers: int
    intermediate_size: int
    vocab_size: int
    linear_parameters: int
    """Parameters in the matrices of the layers, which `all-linear` adapts."""
    linear_in_out: int
    """Sum over these matrices of in_features + out_features; times rank it is the size of an
    adapter.
    """
    weight_bytes: int
    digest: str
    """Digest of config.json and of the weights' names, shapes, sizes and contents."""
    quantized: str = ""
    """The data type of the linear layers in memory (nf4, fp4, int8), or the method of quantized
    files (gptq, awq); empty: not quantized.
    """
    quantized_double: bool = False
    """Whether the scales of blocks are quantized, too."""
    quantized_bits: float = 0
    """Bits of a weight in files of GPTQ or AWQ; 0 for other kinds."""
    quantized_bytes: float = 0
    """Bytes of such a weight with its share of scales and zero points."""
    quantized_embeddings: bool = False
    """Whether embedding and head are in int8, too."""
    positions: int = 0
    """Tokens of a row that the model was trained on, by its config.json; 0 if it has no such
    number.
    """
    has_plain_mlps: bool = False
    """Whether the MLP of every layer is SwiGLU without bias."""
    norms_heads: bool = False
    """Whether the heads of queries and keys have norms."""
    ties_head: bool = False
    """Whether embedding and head share one matrix."""
    parts: dict[str, int] = {}
    """Parameters of each part: attention, mlp, experts, router, embeddings, head, other; empty: not
    known.
    """
    adapted_in_out: dict[str, int] = {}
    """Sum of in_features + out_features over the matrices that the adapter changes, by part."""
    summed_parameters: int = 0
    """Parameters that peft adds the adapter to before their product, e.g. of experts; the sums are
    kept for the backward pass.
    """
    experts_of_layer: int = 0
    """Parameters of the experts of a layer, if they are tensors of many matrices: quantized ones
    are dequantized together.
    """
    omitted: dict[str, str] = {}
    """Names of layers that words of `adapter.targets` omit, with the reason of peft."""
    reads_pictures: bool = False
    """Whether the rows have pictures, which its vision part reads."""
    vision: VisionFacts | None = None
    """None if the rows are text."""


class SplitSummary(PlanPart):
    """The training or evaluation rows as the model sees them. Counts are for one epoch."""

    rows: int
    sequences: int
    tokens: int
    loss_tokens: int
    longest_sequence: int
    """Tokens."""
    longest_row: int
    """Tokens."""


class PictureSummary(PlanPart):
    """The pictures of rows, each counted once."""

    number: int
    median_tokens: int
    """Tokens of pictures in a row that has some."""
    p99_tokens: int
    most_tokens: int
    largest_values: int = 0
    """Values of the pixels of the largest picture, as the model gets them."""
    most_values: int = 0
    """Those of all pictures of the training sequence that has most."""


class LabelSummary(PlanPart):
    """The labels of rows to classify."""

    names: list[str]
    """In the order of the model's outputs."""
    multi_label: bool
    """Whether a row has any number of them."""
    rows: list[int]
    """For each label the rows of an epoch that have it."""
    train_rows: int
    """All rows of an epoch."""


class DataSummary(PlanPart):
    """The result of preparing the data; the rows themselves are in the cache."""

    cache_dir: str
    """The directory of the token table; `data.token_table.TokenTable.open` reads it."""
    cache_hit: bool
    cache_reason: str
    train: SplitSummary
    eval: SplitSummary | None
    ledger: dict[str, int]
    """The totals of data.json: rows, used, cut, split, not_rendered, dropped, bad, eval, tokens,
    tokens_cut, loss_tokens.
    """
    pictures: PictureSummary | None = None
    """None if rows are text."""
    labels: LabelSummary | None = None
    """None unless rows are classified."""
    sides: int = 1
    """Rows of tokens of a unit: 2 for a pair, 3 for a triplet."""
    formats: list[str]
    """One line per source: the format, and why it was chosen."""
    template: str
    """The origin of the chat template."""
    total_steps: int
    """Optimizer steps of the whole duration; before the plan, with `batch.per_rank`, its sequences,
    unless it is given in steps.
    """
    digest: str
    """Digest of the rows as the model sees them, their order, and the tokenizer."""
    rows_digest: str = ""
    """Digest of the rows as the model sees them and their order only."""
    files_digest: str = ""
    """Digest of the contents of the data files and the template, regardless of their names."""
    tokenizer_digest: str = ""
    """Digest of the tokenizer's files."""
    tokenizer_traits: str = ""
    """Digest of what decides the ids of a text in the tokenizer as transformers loads it, which
    depends on the model's type, too.
    """
    warnings: list[str] = []


class MemoryEstimate(PlanPart):
    """Estimated memory of one rank in bytes, by part."""

    weights: int
    trainable: int
    """Trained weights in float32, gradients and optimizer state."""
    activations: int
    loss_head: int
    dequantized: int = 0
    """The largest matrix of a quantized model, which is dequantized for its product."""
    other_models: int = 0
    """Models beside the trained one: reward models on the same kind of device, and a copy of the
    starting weights.
    """
    total: int


class EnvironmentSetting(PlanPart):
    """An environment variable of the head, or a line of its nccl.conf, that affects how ranks
    compute or communicate.
    """

    name: str
    value: str
    reason: str = ""
    """Why it was set, from `--reason` or `reasons` in the config; empty: unknown."""


class ResumePoint(PlanPart):
    """The checkpoint that the run resumes from."""

    step: int
    path: str
    trust: bool = False
    """Whether it is accepted with `--trust` although this user has not signed it."""


class RunPlan(PlanPart):
    """All decisions of a run. The worker follows it and decides nothing again."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    run_id: str
    """Identifies the run; it stays the same over all its starts."""
    config: RunConfig
    config_digest: str
    output_dir: str
    epoch: int = 0
    """The number of this start of the ranks, from 0; a restart is a new one, and processes of the
    old one may not join it.
    """
    world_size: int
    strategy: Strategy = "single"
    nodes: list[NodePlace] = []
    """By node_rank, the head first. A job that continues with fewer nodes keeps their numbers;
    ranks are renumbered.
    """
    ranks: list[RankPlace] = []
    """All ranks in order, node by node, so that rank 0 is on the head's machine."""
    store_host: str = "127.0.0.1"
    """The address of torch's store on rank 0: the one on which the nodes reached the head."""
    device: DeviceChoice
    """The device of rank 0; `of_rank` gives the plan of a different rank."""
    host: str
    threads: int
    """CPU threads of each rank, the same on all, so that replicas round alike."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """The dtype of frozen weights and of the computation. Trained weights are kept in float32."""
    model: ModelFacts
    data: DataSummary
    global_batch: int
    batch_of_ranks: tuple[int, int] | None = None
    """`batch.per_rank` and `batch.accumulate`, from which the first start of the run has made the
    global batch.
    """
    micro_batch: int
    gradient_checkpointing: bool
    total_steps: int
    total_sequences: int
    """Sequences of the whole run; the last step may have fewer."""
    last_step: int | None = None
    """For a replay that compares losses: nothing is evaluated, saved or written after this step."""
    steps_per_epoch: float
    warmup_steps: int
    eval_every: int | None
    """Steps."""
    checkpoint_every: int
    """Steps."""
    keep_every: int | None = None
    """Steps; checkpoints at its multiples stay forever."""
    kept_every: int | None = None
    """Each n-th step of an adapter is kept in memory, so that a death costs at most n - 1 finished
    steps; None: none is, or nobody knows yet. The ranks measure it before step 1 and in the first
    steps, and the head notes it in plan.json.
    """
    padded: str = ""
    """Which layers compute rows that are padded to the longest of their micro batch, and why; empty
    if none does, or nobody knows yet. The ranks test it, and the head notes it in plan.json.
    """
    padding: float | None = None
    """The share of padding in these rows, over the first steps of rank 0; None: not known."""
    digest_every: int | None = None
    """Steps between comparisons of a digest of the trained weights; None if no two ranks hold the
    same.
    """
    rehearse: bool = False
    """Whether a checkpoint is made after the first step of this start, and read back."""
    memory: MemoryEstimate
    resume: ResumePoint | None
    resume_reason: str
    """One line for the first screen: fresh, resumed from where and why, extended."""
    allowed: list[dict[str, object]] = []
    """Allowed changes of the run's meaning, of all starts, in order: key, before, after,
    from_step.
    """
    settings: list[EnvironmentSetting] = []
    """Variables set by hand on the head, by name; those of other nodes are in agreement.json."""
    ignored_variables: list[str] = []
    origins: dict[str, str] = {}
    """The origin of each value that is not directly from the config."""
    warnings: list[str] = []
    code_digests: dict[str, str] = {}
    """See `config.own_code.own_code_digests`: a rank executes no other content of a file of the
    user's own.
    """
    faults: dict[str, Any] = {}
    """Written by drills and tests only."""

    def of_rank(self, rank: int) -> "RunPlan":
        """A copy of the plan with that rank's device and host."""
        place = self.ranks[rank]
        return self.model_copy(update={"device": place.device, "host": place.host})

    @property
    def mesh(self) -> Mesh:
        """The arrangement of the ranks."""
        return Mesh.of(self.strategy, self.world_size)

    @property
    def own_code(self) -> dict[str, str]:
        """The user's own code that the ranks execute: its name for people, by a part of the paths
        of its files.
        """
        own = {str(one.path): f"the {one.what}" for one in own_code_of(self.config)}
        model = MODEL_CODE if self.config.model.trust_remote_code else {}
        return {**own, **model}

    @property
    def head(self) -> SequenceHead | None:
        """The head that gives values of rows; None for a language model."""
        return head_of(self.config, self.data.labels)

    @property
    def answers(self) -> bool:
        """Whether the ranks can generate answers.

        Sharded ranks generate in lockstep, which requires equal arithmetic on all.
        """
        return not self.mesh.forwards_together or len({place.device.name for place in self.ranks}) == 1

    @property
    def expects_fast_layers(self) -> bool:
        """Whether the memory was estimated for the fast layers of a GPU."""
        devices = [place.device for place in self.ranks]
        return expects_fast_layers(self.config, self.model, dtype=self.dtype, devices=devices)

    @property
    def from_step(self) -> int:
        """The step of the checkpoint that it resumes from; 0 for a new run."""
        return self.resume.step if self.resume else 0

    @property
    def from_checkpoint(self) -> str | None:
        """The path of that checkpoint."""
        return self.resume.path if self.resume else None

    @property
    def stall_after(self) -> str:
        """The config's `watch.stall_after`, e.g. `auto` or `60 seconds`."""
        return self.config.watch.stall_after

    @property
    def grace(self) -> str:
        """The config's `grace`: the time for a graceful stop, e.g. `60 seconds`."""
        return self.config.grace

    @property
    def keeps_steps(self) -> bool:
        """Whether ranks keep their newest steps in memory: the state of an adapter is small
        enough.
        """
        return self.config.adapter is not None

    @property
    def rehearsed_step(self) -> int | None:
        """The step after which a checkpoint is made as a test; None without one."""
        return self.from_step + 1 if self.rehearse else None

    def has_own_output(self, node_rank: int) -> bool:
        """Whether a node's output_dir is not the head's."""
        return any(node.node_rank == node_rank and not node.shares_output for node in self.nodes)

    def node(self, node_rank: int) -> NodePlace:
        """One node by its number.

        A job that continues without some nodes keeps the numbers of the others, so `nodes` may have
        gaps.

        Raises:
            KeyError: if it is not in the plan.
        """
        return {node.node_rank: node for node in self.nodes}[node_rank]

    def on_node(self, node_rank: int) -> list[RankPlace]:
        """The ranks of one node, by local rank."""
        return [place for place in self.ranks if place.node_rank == node_rank]

    def to_json(self) -> dict[str, object]:
        """The JSON object of plan.json."""
        return self.model_dump(mode="json", by_alias=True)


# ---- which sequences make which step, and which rank takes which of them


def permutation(n: int, *, seed: int, epoch: int) -> list[int]:
    """The order of `n` sequences in one epoch.

    Sorted by a key that only `random.Random.random` makes: the one generator whose sequence Python
    promises to keep.
    """
    material = hashlib.sha256(f"unisono order {seed} {epoch}".encode()).digest()
    draw = random.Random(int.from_bytes(material, "big")).random  # noqa: S311 - an order, not a secret
    keys = [draw() for _ in range(n)]
    return sorted(range(n), key=keys.__getitem__)


def order_by_group(order: Sequence[int], groups: Sequence[int], *, batch: int, done: int = 0) -> list[int]:
    """Reorders sequences so that each step is of one group as far as possible, as sd-scripts deals
    pictures by size.

    What is left of each group makes mixed steps, in which each group is contiguous. It is a
    function of its arguments alone, so that all ranks have the same order.

    Args:
        order: of an epoch, a permutation.
        groups: of each sequence by its number.
        batch: sequences of a step.
        done: sequences of the first step that belong to the epoch before.
    """
    members: dict[int, list[int]] = {}
    for sequence in order:
        members.setdefault(groups[sequence], []).append(sequence)
    if len(members) < 2:
        return list(order)
    head = min((batch - done) % batch, len(order))
    steps = (len(order) - head) // batch
    whole = [
        all_[i : i + batch]
        for all_ in members.values()
        for i in range(0, len(all_) - len(all_) % batch, batch)
    ]
    whole, broken = whole[:steps], whole[steps:]
    rest = [sequence for all_ in members.values() for sequence in all_[len(all_) - len(all_) % batch :]]
    rest += [sequence for chunk in broken for sequence in chunk]
    first, rest = rest[:head], rest[head:]
    mixed = (steps - len(whole)) * batch
    whole += [rest[i : i + batch] for i in range(0, mixed, batch)]
    chosen = [number for number in order if number < len(whole)]  # a permutation of the steps
    return first + [sequence for number in chosen for sequence in whole[number]] + rest[mixed:]


@dataclass
class SequenceStream:
    """The endless stream of sequences: epoch after epoch, each with its own permutation.

    Attributes:
        sequences: how many there are in an epoch.
        groups: of each sequence; a step has sequences of one group as far as it goes. Empty: a step
            has any sequences.
        batch: sequences of a step; only groups need it.
    """

    sequences: int
    seed: int
    groups: Sequence[int] = ()
    batch: int = 1
    _epochs: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def at(self, position: int) -> int:
        """The sequence at a position of the stream, counted from 0."""
        epoch, place = divmod(position, self.sequences)
        return self._epoch(epoch)[place]

    def step(self, step: int, *, global_batch: int, total_sequences: int) -> list[int]:
        """The sequences of optimizer step `step` (from 1); the last step of a run may be short."""
        first = (step - 1) * global_batch
        return [self.at(position) for position in range(first, min(first + global_batch, total_sequences))]

    def _epoch(self, epoch: int) -> list[int]:
        if epoch not in self._epochs:
            for old in [e for e in self._epochs if e < epoch - 1]:
                del self._epochs[old]
            order = permutation(self.sequences, seed=self.seed, epoch=epoch)
            if self.groups:
                done = epoch * self.sequences % self.batch
                order = order_by_group(order, self.groups, batch=self.batch, done=done)
            self._epochs[epoch] = order
        return self._epochs[epoch]


def steps_for_tokens(lengths: Sequence[int], *, target: int, global_batch: int, seed: int) -> int:
    """The steps after which a run has seen `target` tokens; it ends with the step that reaches
    them.

    Args:
        lengths: tokens of each sequence.
        target: non-padding input tokens.
    """
    per_epoch = sum(lengths)
    whole_epochs = max(0, target // per_epoch - 1)
    position = whole_epochs * len(lengths)
    seen = whole_epochs * per_epoch
    stream = SequenceStream(len(lengths), seed)
    while seen < target:
        seen += lengths[stream.at(position)]
        position += 1
    return -(-position // global_batch)


def deal(tokens: Sequence[int], *, ranks: int) -> list[list[int]]:
    """The indices of a step's sequences, distributed over the ranks of `dp`: evenly by number, and
    within that evenly by tokens.

    Longest first, each goes to the rank with the fewest tokens so far that may still take one (the
    lower rank on a tie). A rank's indices are ascending, so a single rank has all in order. With
    fewer sequences than ranks, some ranks have none.

    Args:
        tokens: of each sequence of the step, in its order.
        ranks: how many there are.
    """
    share, longer = divmod(len(tokens), ranks)  # `longer` ranks take one more than the share
    hands: list[list[int]] = [[] for _ in range(ranks)]
    everyone = [(0, rank) for rank in range(ranks)]  # tokens so far, rank: a heap
    below, at_share = (everyone, []) if share else ([], everyone)
    for place in sorted(range(len(tokens)), key=lambda place: (-tokens[place], place)):
        heap = at_share if longer and at_share and (not below or at_share[0] < below[0]) else below
        longer -= heap is at_share
        held, rank = heapq.heappop(heap)
        hands[rank].append(place)
        entry = (held + tokens[place], rank)
        if len(hands[rank]) < share:
            heapq.heappush(below, entry)
        elif len(hands[rank]) == share:
            heapq.heappush(at_share, entry)
    return [sorted(hand) for hand in hands]


def head_of(config: RunConfig, labels: LabelSummary | None) -> SequenceHead | None:
    """The head that gives values of rows; None for a language model. The labels of a classifier
    are those of its rows.
    """
    if not config.trains_head:
        return None
    return SequenceHead() if labels is None else SequenceHead(tuple(labels.names), labels.multi_label)


def has_one_backward(config: RunConfig, *, micro: int, global_batch: int, world_size: int) -> bool:
    """Whether a step of full fine-tuning is one backward pass of one rank, so that gradients have
    no sum in float32.
    """
    # Reward models have no fast layers then.
    is_full = config.adapter is None and not config.trains_head
    in_blocks = optimizer_named(config.optim.kind).updates_blocks
    return is_full and in_blocks and world_size == 1 and micro >= global_batch


def expects_fast_layers(
    config: RunConfig, model: ModelFacts, *, dtype: str, devices: Sequence[DeviceChoice]
) -> bool:
    """Whether GPUs will use the fast layers, by what is known before the ranks start; they decide
    by trying (`model.forward`).
    """
    adapter = config.adapter
    if dtype != "bfloat16" or not model.has_plain_mlps or not all(device.compiles for device in devices):
        return False
    if adapter is None:
        return not config.trains_head
    compute = config.model.quantize_compute if model.quantized else "auto"
    targets = [".*"] if isinstance(adapter.targets, str) else adapter.targets
    adapted = {
        any(re.search(target, f"layers.0.mlp.{name}_proj") for target in targets)
        for name in ("gate", "up", "down")
    }
    return adapter.is_plain and compute in ("auto", "bfloat16") and len(adapted) == 1

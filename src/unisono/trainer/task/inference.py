"""Opens a model for inference, with tokenizer, chat template and stop tokens; turns its tokens into
text as they come.

Its weights are those of a model, of a base model with an adapter, or of a checkpoint; adapters are
merged into weights on request.
"""

import contextlib
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.base.errors import ModelError, Problem, UnisonoError, UsageError
from unisono.base.events import Reporter
from unisono.base.text import library_words
from unisono.guard.facts import no_gpus, read_machine
from unisono.trainer.config.heads import SequenceHead
from unisono.trainer.config.named_templates import named_template
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import PixelsSection
from unisono.trainer.data import Messages
from unisono.trainer.data.pictures.picture_template import with_placeholders
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.template import (
    ChatTemplate,
    RenderingTimeout,
    bounded_rendering,
    choose_template,
    fallback_template,
)
from unisono.trainer.data.text_encoder import TextEncoder, probe_tokenizer
from unisono.trainer.data.trained_template import known_stops, stop_ids_of, trained_template
from unisono.trainer.families.vision.sight import probe_of
from unisono.trainer.model.adapter import fit_base_to_adapter
from unisono.trainer.model.directory import SCORE, picture_processor
from unisono.trainer.model.file_settings import ADAPTER_FILE, ADAPTER_SETTINGS
from unisono.trainer.model.files import (
    TensorHeader,
    odd_weights,
    read_contents,
    read_json_object,
    read_safetensors_header,
    weight_files,
)
from unisono.trainer.model.forward import Forward, choose_forward
from unisono.trainer.model.layers import context_of, take_rope
from unisono.trainer.model.load import (
    DTYPES,
    LIBRARY_ERRORS,
    LoadedModel,
    load_base,
    load_for_training,
    load_tokenizer,
    odd_parameters,
    set_pad_token,
)
from unisono.trainer.model.quantization import (
    count_parameters,
    is_quantized,
    make_dense,
    parameters_of_experts,
    quantized_load,
)
from unisono.trainer.plan.families import family_at, need_decoder
from unisono.trainer.plan.task_requests import NamedAdapter, RequestedModel
from unisono.trainer.task.several_adapters import PlacedAdapter, find_adapters
from unisono.trainer.task.target import Target, requested_target, verify_target

_PART_CHARACTERS = 65_536
_CUT_TOKENS = 16  # that the cuts at both ends of a part can add
_TIMES_THE_RANK = 64  # of an adapter's matrices; for a smaller difference peft names both shapes
_DEFAULT_CONTEXT = 4096  # tokens, of a model that does not say its own
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MISSING_KEYS = "Found missing adapter keys"  # peft's warning; the tensors would stay as they were drawn
_SIZE_MISMATCH = re.compile(
    r"size mismatch for (\S+): .*?torch\.Size\(\[([\d, ]*)\]\).*?torch\.Size\(\[([\d, ]*)\]\)"
)


@dataclass(frozen=True)
class InferenceModel:
    """A model ready for inference.

    Attributes:
        target: its source.
        forward: the model, with the implementation of its forward.
        template: the chat template; None if the model has none.
        context: maximum tokens of prompt and answer together.
        dtype: of untrained weights, and of the computation.
        processor: of pictures; None if prompts have none.
        pixels: the bounds of pictures in training.
        blind: why prompts have no pictures.
        adapters: that take turns on the model.
    """

    target: Target
    forward: Forward
    template: ChatTemplate | None
    context: int
    dtype: str
    processor: PictureProcessor | None = None
    pixels: PixelsSection = field(default_factory=PixelsSection)
    blind: str = ""
    adapters: tuple[PlacedAdapter, ...] = ()

    def with_adapter(self, adapter: PlacedAdapter) -> "InferenceModel":
        """The model with the tokenizer and template of one of its adapters."""
        tokenizer = adapter_tokenizer(adapter.target)
        forward = replace(self.forward, loaded=replace(self.forward.loaded, tokenizer=tokenizer))
        template = template_of(adapter.target, tokenizer)
        return replace(self, target=adapter.target, forward=forward, template=template)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, of transformers."""
        return self.forward.loaded.tokenizer

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.forward.loaded.base.device

    @property
    def pad_id(self) -> int:
        """The token that pads batches; it is masked."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if isinstance(token, int):
                return token
        return 0

    @property
    def is_of_texts(self) -> bool:
        """Whether its run read prompts that are texts without the chat template."""
        plan = self.target.plan
        return plan is not None and plan.config.data.plain_texts

    def chat_template(self) -> tuple[ChatTemplate, str]:
        """The template for a conversation, and a note for the user if it is the fallback.

        Raises:
            DataError: if there is none, and no token could end an answer.
        """
        if self.template is not None:
            return self.template, ""
        template = fallback_template(self.tokenizer)
        return (
            template,
            (
                f"the tokenizer has no chat template; the fallback is {template.origin}, which the model may"
                " not know"
            ),
        )

    def stops(self, template: ChatTemplate | None) -> set[int]:
        """The stop tokens, with the end-of-turn token of a template."""
        return stops_of(self.target, self.tokenizer, template)

    @contextlib.contextmanager
    def ready(self) -> Iterator[Any]:
        """A context in which the model can generate."""
        with self.forward.ready_to_generate() as model:
            yield model


def open_for_inference(name: str, *, step: int | None = None, report: Reporter) -> InferenceModel:
    """Finds and loads a run or model, on this machine's accelerator if there is one.

    Raises:
        UsageError: if it does not exist, or has no weights yet.
        ModelError: if files are missing or do not match each other.
        IntegrityError: if a checkpoint is damaged, or a file differs from its list.
    """
    return open_requested(RequestedModel(name, step), report)


def refuse_code(uses: Sequence[str], *, where: str) -> None:
    """Refuses functions and classes of the user's own, without --trust-code.

    Raises:
        UsageError: if there is one.
    """
    problems = [
        Problem(
            f"{use} is code that has not been trusted",
            where,
            "a process of the evaluation would execute the file, with your rights",
            "read it, and pass --trust-code",
        )
        for use in uses
    ]
    if problems:
        raise UsageError(*problems)


def open_requested(
    request: RequestedModel,
    report: Reporter,
    *,
    answers: bool = True,
    sees: bool | None = False,
    adapters: Sequence[NamedAdapter] = (),
    takes_adapters: bool = False,
) -> InferenceModel:
    """Finds and loads what a task's request names.

    Args:
        request: what to load.
        report: to the front.
        answers: whether it has to write answers, which a reward model cannot.
        sees: whether prompts have pictures; None: they may, if the model reads any.
        adapters: that take turns on it; prompts have no pictures then.
        takes_adapters: whether `put_on` may add others.

    Raises:
        UnisonoError: as `open_for_inference`, and `find_adapters`.
    """
    report.phase("locate", f"looking for {request.target}")
    if family_at(Path(request.target).expanduser()).draws:
        raise UsageError.of(
            f"{request.target} draws pictures",
            where="RUN|MODEL",
            why="it is an image model, and answers nothing",
            fix=f'use `unisono generate {request.target} "a prompt" --out pictures`',
        )
    need_decoder(request.target, where="RUN|MODEL")
    target = requested_target(request)
    if answers and target.head is not None:
        raise _no_answers(target, target.head)
    if answers and target.embeds:
        raise UsageError.of(
            f"{target.name} is an embedding model: it writes no answers",
            where=str(target.weights),
            fix=f"load it with sentence_transformers.SentenceTransformer({str(target.weights)!r})",
        )
    verify_target(target, report)
    is_shared = bool(adapters) or takes_adapters
    placed = find_adapters(adapters, target, report) if is_shared else ()
    report.phase("load_model", f"loading {target.description}")
    if is_shared:
        blind = "several adapters share the model, and their prompts have no pictures"
        return replace(_open(target, None, placed, is_shared=True), blind=blind)
    if sees is not None or target.embeds or target.head is not None:
        return _open(target, _processor_of(target) if sees else None)
    processor, blind = _sight_of(target, report)
    if processor is not None:
        try:
            return _open(target, processor)
        except ModelError as error:  # it may be of the pictures alone
            blind = _why_blind(error, report)
    return replace(_open(target, None), blind=blind)


def _no_answers(target: Target, head: SequenceHead) -> UsageError:
    """The refusal to let a reward model or classifier answer."""
    where, named = str(target.weights), shlex.quote(target.name)
    if head.labels:
        return UsageError.of(
            f"{target.name} is a classifier: it labels texts and writes no answers",
            where=where,
            fix=f"label the texts of a file: unisono eval {named} --data FILE --out LABELS",
        )
    return UsageError.of(
        f"{target.name} is a reward model: it rates answers and writes none",
        where=where,
        fix=f"rate the answers of pairs: unisono eval {named} --data FILE",
    )


def _open(
    target: Target,
    processor: PictureProcessor | None,
    adapters: tuple[PlacedAdapter, ...] = (),
    *,
    is_shared: bool = False,
) -> InferenceModel:
    """The model, with its vision part if there is a processor of pictures; one that adapters share
    has the layers of transformers, on which peft puts them.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = dtype_of(target, device)
    loaded = load_target(target, dtype=dtype, device=device, keeps_parts=processor is not None)
    if adapters:
        loaded = _with_adapters(loaded, adapters, device)
    probe_tokenizer(loaded.tokenizer)
    loaded.model.eval()
    template = template_of(target, loaded.tokenizer)
    plan = target.plan
    if processor is not None:
        template = with_placeholders(
            template,
            processor=processor,
            tokenizer=loaded.tokenizer,
            stops=known_stops(loaded.tokenizer, _places(target)),
            uses_own=plan is None or plan.model.reads_pictures,
        )
    forward = choose_forward(
        loaded,
        dtype=dtype,
        gradient_checkpointing=False,
        quick_adapter=target.source != "model" and _is_plain_lora(loaded),
        trains=False,
        fast_layers=not is_shared,
        pictures=None if processor is None else probe_of(processor, device),
    )
    loaded.model.eval()
    pixels = plan.config.data.pixels if plan is not None else PixelsSection()
    return InferenceModel(
        target, forward, template, _context(loaded.base), dtype, processor, pixels, adapters=adapters
    )


def _sight_of(target: Target, report: Reporter) -> tuple[PictureProcessor | None, str]:
    """The processor of the target's model; or None, and why it reads no pictures."""
    try:
        return _processor_of(target), ""
    except UnisonoError as error:
        return None, _why_blind(error, report if picture_processor(target.base) is not None else None)


def _why_blind(error: UnisonoError, report: Reporter | None) -> str:
    """Why prompts cannot have pictures, which is a warning for a model that should read them."""
    problem = error.problems[0]
    if report is not None:
        report.warning("no_pictures", f"{problem.what}: prompts cannot have pictures")
    return f"{problem.what}: {problem.why}" if problem.why else problem.what


def _processor_of(target: Target) -> PictureProcessor:
    """The processor of the target's model.

    Raises:
        UsageError: if it reads no pictures.
    """
    directory = picture_processor(target.base)
    if directory is None:
        raise UsageError.of(
            f"{target.name} reads no pictures",
            where=str(target.base),
            why="its model has no vision part, or no processor beside it",
            fix="omit the pictures, or use a vision-language model",
        )
    return PictureProcessor(directory, trust_remote_code=trusts_code(target))


def template_of(target: Target, tokenizer: Any) -> ChatTemplate | None:
    """The template that was chosen for the target, or that a run was trained with; for a model its
    own.
    """
    plan = target.plan
    named = named_template(target.template, system=target.default_system)
    if named is not None:
        chosen: ChatTemplate = named.chat_template(tokenizer, thinking=target.thinking)
        return chosen
    if plan is not None:
        return trained_template(plan, tokenizer, _places(target))
    return choose_template(tokenizer, None, stops=known_stops(tokenizer, _places(target)))


def prompt_ids(
    tokenizer: Any,
    template: ChatTemplate,
    messages: Messages,
    tools: list[Any] | None = None,
    *,
    most: int | None = None,
) -> list[int]:
    """The tokens of a conversation with the generation prompt: what the model continues.

    Args:
        tokenizer: of transformers.
        template: for a conversation.
        messages: the conversation.
        tools: schemas of functions.
        most: tokens; None: any number.

    Raises:
        RowError: if the template refuses the messages.
        TooManyTokens: as `encode_prompt`; templates of LLaMA-Factory give all their tokens.
    """
    ids = template.prompt_ids(messages, tools)
    if ids is not None:
        return ids
    text = template.render(messages, tools, prompt=True)
    return encode_prompt(tokenizer, text, special=False, most=most)


class TooManyTokens(Exception):  # noqa: N818 - named for what happened
    """A text has more tokens than the model reads.

    Attributes:
        least: number of its tokens up to a place in the text, or a few less.
    """

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


def encode_prompt(tokenizer: Any, text: str, *, special: bool, most: int | None = None) -> list[int]:
    """The tokens of a text.

    A long one is counted in parts first, so that one that is far too long takes no longer than one
    that fits.

    Args:
        tokenizer: of transformers.
        text: any.
        special: whether the tokenizer adds its special tokens.
        most: tokens; None: any number.

    Raises:
        TooManyTokens: for a long text with more; a short one is encoded as a whole.
    """
    encoder = TextEncoder(tokenizer)
    if most is not None and len(text) > _PART_CHARACTERS:
        _refuse_too_long(encoder, text, most)
    return list(encoder.encode([text], special=special, ranges=False)[0].ids)


def _refuse_too_long(encoder: TextEncoder, text: str, most: int) -> None:
    least = 0
    for start in range(0, len(text), _PART_CHARACTERS):
        part = text[start : start + _PART_CHARACTERS]
        least += max(0, len(encoder.encode([part], special=False, ranges=False)[0].ids) - _CUT_TOKENS)
        if least > most:
            raise TooManyTokens(least)


def stops_of(target: Target, tokenizer: Any, template: ChatTemplate | None) -> set[int]:
    """The tokens that end an answer: those of tokenizer and generation_config.json, and the
    template's end-of-turn token.
    """
    return stop_ids_of(target.plan, tokenizer, template, _places(target))


def _places(target: Target) -> tuple[Path, Path]:
    """The directories of its files, those of the base model first."""
    return target.base, target.weights


def dtype_of(target: Target, device: torch.device) -> str:
    """The run's dtype on the same kind of device; else that of the files, or float32 if the device
    does not support it.
    """
    if target.plan is not None and target.plan.device.kind == device.type:
        return target.plan.dtype
    stored = stored_dtype(target.base)
    if device.type == "cuda":
        return "float16" if stored == "bfloat16" and not torch.cuda.is_bf16_supported() else stored
    return stored if stored == "bfloat16" and read_machine(no_gpus).cpu_bfloat16 else "float32"


def _is_plain_lora(loaded: LoadedModel) -> bool:
    heads = (f".{SCORE}.modules_to_save.",) if loaded.has_score else ()
    plain = ("lora_A", "lora_B", *heads)
    return bool(loaded.trainable) and all(any(part in name for part in plain) for name in loaded.trainable)


def _context(base: Any) -> int:
    settings = base.config.get_text_config()
    scaled = context_of(settings)
    if scaled is not None:
        return scaled
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(settings, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return _DEFAULT_CONTEXT


def run_config(opened: InferenceModel) -> RunConfig | None:
    """The config of the run, or None for a model."""
    return opened.target.plan.config if opened.target.plan is not None else None


_BROKEN = "\ufffd"  # decoded from bytes that are not yet a complete character
_WINDOW = 8  # tokens before the newest that can change its text


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, without special ones."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before its first stop string; the full text if there is none."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(places)] if places else text


class StopStrings:
    """Whether an answer has reached a stop string; only its end is searched."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        # A character has at most four tokens, each of one byte.
        self._window = 4 * max(map(len, stops), default=0) + _WINDOW

    def __call__(self, place: int, answer: Sequence[int]) -> bool:
        """Whether the answer must end here."""
        del place
        end = decode(self._tokenizer, answer[-self._window :])
        return any(stop in end for stop in self._stops)


class TextStream:
    """The text of an answer in pieces, complete characters only.

    All pieces together are the text up to its first stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), *, marks: Sequence[str] = ()) -> None:
        """The stream of one answer.

        Args:
            tokenizer: of transformers.
            stops: texts that end it.
            marks: special tokens that are part of the text.
        """
        self._tokenizer = tokenizer
        self._stops = stops
        added = tokenizer.added_tokens_decoder.items() if marks else ()
        special = {i: str(token) for i, token in added if token.special}
        self._hidden = {i for i, text in special.items() if text not in marks}
        self._shows_marks = len(self._hidden) < len(special)
        self._ids: list[int] = []
        self._settled = 0  # tokens whose text has been given
        self._start = 0  # tokens before this one no longer change the text of others
        self._held = ""  # possible beginning of a stop string
        self._ended = False

    def push(self, token: int) -> str:
        """The text that a new token completes."""
        self._ids.append(token)
        known = self._decode(self._ids[self._start : self._settled])
        text = self._decode(self._ids[self._start :])
        if text.endswith(_BROKEN) or len(text) <= len(known):
            return ""  # the character is incomplete
        self._start, self._settled = self._settled, len(self._ids)
        return self._out(text[len(known) :])

    def close(self) -> str:
        """The text that was held back, after the last token."""
        known = self._decode(self._ids[self._start : self._settled])
        rest = self._out(self._decode(self._ids[self._start :])[len(known) :])
        held, self._held = self._held, ""
        return rest if self._ended else rest + held

    def _decode(self, ids: Sequence[int]) -> str:
        if not self._shows_marks:
            return decode(self._tokenizer, ids)
        shown = [i for i in ids if i not in self._hidden]
        text: str = self._tokenizer.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _out(self, piece: str) -> str:
        if self._ended:
            return ""
        text = self._held + piece
        cut = cut_at_stop(text, self._stops)
        if len(cut) < len(text):
            self._ended, self._held = True, ""
            return cut
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def load_target(
    target: Target, *, dtype: str, device: torch.device, keeps_parts: bool = False
) -> LoadedModel:
    """Loads the weights of a target in evaluation mode; adapters are not merged into their base
    model. With `keeps_parts` a multimodal model has its vision part.

    Raises:
        ModelError: if files are missing or do not match each other, or a weight is NaN or infinite.
    """
    plan = target.plan
    has_changed = plan is not None and plan.model.reads_pictures and plan.config.train_parts != ["language"]
    loaded = _load(target, dtype=dtype, device=device, keeps_parts=keeps_parts or has_changed)
    odd = odd_parameters(loaded.model)
    if odd:
        raise _odd_weights(target, odd, dtype)
    return loaded


def _odd_weights(target: Target, odd: list[str], dtype: str) -> ModelError:
    """The error for NaN or infinite parameters: the files have such values, or else the dtype of
    the conversion is too narrow.
    """
    files = weight_files(target.base)
    if target.weights != target.base:
        files += sorted(target.weights.glob("*.safetensors"))
    odd_by_file = {file: contents.odd for file in files if (contents := read_contents(file)).odd}
    if odd_by_file:
        return odd_weights(odd_by_file)
    return ModelError.of(
        f"{odd[0]} has values out of the range of {dtype}",
        where=str(target.weights),
        why=f"they are infinite in {dtype}; {len(odd)} tensors have such values",
        fix="use a device that computes in the dtype of the files",
    )


def _load(target: Target, *, dtype: str, device: torch.device, keeps_parts: bool) -> LoadedModel:
    if target.source == "model":
        tokenizer = load_tokenizer(target.weights, trust_remote_code=trusts_code(target))
        base = load_base(
            target.weights,
            dtype=DTYPES[dtype],
            trust_remote_code=trusts_code(target),
            head=target.head,
            quantized=quantized_load(None, target.weights, dtype=dtype, device=device),
            keeps_parts=keeps_parts,
        ).to(device)
        if target.head is not None:
            set_pad_token(base, tokenizer)
        base.requires_grad_(False)  # the fast layers are for frozen weights
        return _loaded(base, base, tokenizer, {})
    if target.source == "checkpoint":
        return _load_checkpoint(target, dtype=dtype, device=device, keeps_parts=keeps_parts)
    tokenizer = adapter_tokenizer(target)
    with torch.random.fork_rng(devices=[]):  # a new head of a reward model is drawn; the adapter has its own
        base = load_base(
            target.base,
            dtype=DTYPES[dtype],
            trust_remote_code=trusts_code(target),
            adjust=partial(take_rope, directory=target.weights),
            head=target.head,
            quantized=quantized_load(
                target.plan.config if target.plan else None, target.base, dtype=dtype, device=device
            ),
            keeps_parts=keeps_parts,
        ).to(device)
    if target.head is not None:
        set_pad_token(base, tokenizer)
    for adapter in target.merged:
        base = merge_adapter(_with_adapter(base, adapter, target, device), where=str(adapter))
    model = _with_adapter(base, target.weights, target, device)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return _loaded(model, base, tokenizer, trainable)


def _with_adapters(
    loaded: LoadedModel, adapters: Sequence[PlacedAdapter], device: torch.device
) -> LoadedModel:
    """The model with all adapters on it, none of which is trained.

    Raises:
        UsageError: if one resizes the vocabulary, which the others share.
        ModelError: if one does not match the model.
    """
    model: Any = None
    for adapter in adapters:
        model = put_on(loaded.base, model, adapter, device)
    assert model is not None
    return replace(loaded, model=model)


def put_on(base: Any, model: Any, adapter: PlacedAdapter, device: torch.device) -> Any:
    """The peft model of a base model with one more adapter, which is not trained.

    Args:
        base: of transformers; if the adapter is refused, it computes as before.
        model: the peft model with those before; None: there are none.
        adapter: to add.
        device: of the base model.

    Raises:
        UsageError: if the adapter resizes the vocabulary, which the others share.
        ModelError: if it does not match the model.
    """
    rows = base.get_input_embeddings().weight.shape[0]
    file = adapter.target.weights / ADAPTER_FILE
    header = read_safetensors_header(file)
    odd = next((t for t in header if t.name.endswith("embed_tokens.weight") and t.shape[0] != rows), None)
    if odd is not None:
        raise UsageError.of(
            f"{adapter.target.name} has a vocabulary of {odd.shape[0]} tokens, and the model {rows}",
            where=f"--adapter {adapter.name}",
            fix="serve it alone",
        )
    if contents := read_contents(file).odd:
        raise odd_weights({file: contents})
    with contextlib.ExitStack() as on_error:
        on_error.callback(_take_off, base, model, adapter.key)
        made = _with_adapter(
            base, adapter.target.weights, adapter.target, device, key=adapter.key, model=model
        )
        on_error.pop_all()
    made.requires_grad_(False)
    return made.eval()


def _take_off(base: Any, model: Any, key: str) -> None:
    """Removes what peft has put into a model for an adapter that it then refused."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    if model is not None:
        model.peft_config.pop(key, None)
    for module in list(base.modules()):
        if isinstance(module, BaseTunerLayer):
            module.delete_adapter(key)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            module.delete_adapter(key, [])


def _with_adapter(
    base: Any,
    directory: Path,
    target: Target,
    device: torch.device,
    *,
    key: str = "default",
    model: Any = None,
) -> Any:
    """The peft model of a base model and the adapter in a directory, which has the name `key` in
    it; `model`: the peft model with those before.

    Raises:
        ModelError: if they do not match.
    """
    from peft import PeftModel

    header = read_safetensors_header(directory / ADAPTER_FILE)  # refuses a damaged file
    fit_base_to_adapter(base, {tensor.name: tuple(tensor.shape) for tensor in header})
    _refuse_settings(directory / ADAPTER_SETTINGS, header, [name for name, _ in base.named_modules()])
    try:
        with warnings.catch_warnings(), parameters_of_experts(base):
            warnings.filterwarnings("error", message=f".*{_MISSING_KEYS}")
            if model is not None:
                model.load_adapter(str(directory), adapter_name=key, torch_device=str(device))
                return model
            return PeftModel.from_pretrained(
                base, str(directory), adapter_name=key, is_trainable=True, torch_device=str(device)
            )
    except (*LIBRARY_ERRORS, UserWarning) as error:
        raise _adapter_mismatch(directory, target.base, error) from error


def _refuse_settings(file: Path, header: list[TensorHeader], names: list[str]) -> None:
    """Refuses an adapter_config.json on which peft would take far more memory than the adapter has,
    or match names without an end.

    Raises:
        ModelError: with the numbers, or the key.
    """
    settings = read_json_object(file, fix="copy it again")
    own = {
        key: value
        for key in ("rank_pattern", "alpha_pattern")
        if isinstance(value := settings.get(key), dict)
    }
    rows = max((tensor.shape[0] for tensor in header if ".lora_A." in tensor.name), default=0)
    ranks = [
        rank for rank in (settings.get("r"), *own.get("rank_pattern", {}).values()) if isinstance(rank, int)
    ]
    if rows and max(ranks, default=0) > _TIMES_THE_RANK * rows:
        raise ModelError.of(
            f"adapter_config.json has the rank {max(ranks):,}, and {ADAPTER_FILE} matrices of rank {rows}",
            where=str(file),
            fix="copy the whole directory of the adapter again",
        )
    patterns = [
        (key, settings[key])
        for key in ("target_modules", "exclude_modules")
        if isinstance(settings.get(key), str)
    ]
    patterns += [(key, f"(.*\\.)?({pattern})$") for key, value in own.items() for pattern in value]
    key = ""
    try:
        with bounded_rendering():  # within the limits of templates, which are programs of others, too
            for key, pattern in patterns:  # noqa: B007 - named in the refusal
                any(re.fullmatch(pattern, name) for name in names)
    except re.error:  # peft reports it
        return
    except RenderingTimeout:
        raise ModelError.of(
            f"the regular expressions in {key} of adapter_config.json do not terminate",
            where=str(file),
            fix="write the names of the modules instead",
        ) from None


def _adapter_mismatch(adapter: Path, base: Path, error: Exception) -> ModelError:
    """The error for an adapter that peft refused, with the tensors from its long message: the
    missing ones, or the first of a wrong shape.
    """
    weights, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    if isinstance(error, UserWarning):
        names = re.findall(r"'([^']+)'", str(error).partition(_MISSING_KEYS)[2])
        return ModelError.of(
            f"{len(names)} tensors of the adapter are missing from its file:"
            f" {', '.join(names[:3])}{' …' * (len(names) > 3)}",
            where=str(weights),
            why=f"{settings} and the model {base} require them",
            fix="copy the whole directory of the adapter again",
        )
    shapes = _SIZE_MISMATCH.search(str(error))
    if shapes:
        name, actual, wanted = shapes[1], *(f"({shape})" for shape in shapes.groups()[1:])
        return ModelError.of(
            f"{name} has the shape {actual}, but adapter_config.json and the base model require {wanted}",
            where=str(weights),
            why=(
                f"{settings} belongs to a different adapter, or {base} is not the model that it was"
                " trained on"
            ),
            fix=(
                "copy the whole directory again, or set base_model_name_or_path in adapter_config.json to the"
                " model that it was trained on"
            ),
        )
    return ModelError.of(
        "the adapter does not match its base model",
        where=str(adapter),
        why=library_words(error, library="peft"),
        fix=(
            "copy adapter_config.json again, or set its base_model_name_or_path to the model that it was"
            " trained on"
        ),
    )


def _loaded(model: Any, base: Any, tokenizer: Any, trainable: dict[str, torch.nn.Parameter]) -> LoadedModel:
    return LoadedModel(model.eval(), base, tokenizer, trainable, count_parameters(model))


def _load_checkpoint(target: Target, *, dtype: str, device: torch.device, keeps_parts: bool) -> LoadedModel:
    """Loads the model as training does, and then the trained weights of the checkpoint."""
    from unisono.trainer.checkpoint.state import CheckpointReader
    from unisono.trainer.model.directory import locate_tokenizer

    plan = target.plan
    assert plan is not None
    with torch.random.fork_rng(devices=[]):  # an adapter's initial weights are random, and overwritten below
        loaded = load_for_training(
            plan.config,
            directory=target.base,
            tokenizer_directory=locate_tokenizer(plan.config),
            dtype=dtype,
            device=device,
            head=plan.head,
            keeps_parts=keeps_parts,
        )
    reader = CheckpointReader(target.weights)
    saved = {name: outline.shape for name, outline in reader.groups["trainable"].items()}
    if {name: tuple(p.shape) for name, p in loaded.trainable.items()} != saved:
        raise ModelError.of(
            "the checkpoint does not match the run's original model",
            where=str(target.weights),
            why=f"the model is now read from {target.base}",
            fix="restore the original model there",
        )
    with torch.no_grad():
        for name, parameter in loaded.trainable.items():
            parameter.copy_(reader.weight(name))  # one by one, and without the optimizer state
    loaded.model.eval()
    return loaded


def adapter_tokenizer(target: Target) -> Any:
    """The adapter's own tokenizer if it has one (it may have the template of its training), else
    the base model's.
    """
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    own = any((target.weights / name).is_file() for name in names)
    return load_tokenizer(target.weights if own else target.base, trust_remote_code=trusts_code(target))


def trusts_code(target: Target) -> bool:
    """Whether the run's config allows the model's own Python code."""
    return target.plan is not None and target.plan.config.model.trust_remote_code


def stored_dtype(directory: Path) -> str:
    """The dtype of the largest tensor in a model's files; packed bytes of quantized weights do not
    count.
    """
    headers = [header for file in weight_files(directory) for header in read_safetensors_header(file)]
    headers = [header for header in headers if header.dtype not in ("U8", "I8", "I32")]
    largest = max(headers, key=lambda header: torch.Size(header.shape).numel())
    return _DTYPES.get(largest.dtype, "float32")


def merge_adapter(model: Any, *, where: str) -> Any:
    """The transformers model with the adapter merged into its weights.

    Sums are computed in float32 and rounded once.

    Embedding and head that share one matrix share it afterwards, unless the adapter changes them
    differently: then each has its own, and the model's config says so. The dtype is that of the
    base model. Quantized weights become dense.

    Args:
        model: a peft model; it cannot be used afterwards.
        where: for messages.

    Raises:
        ModelError: if the adapter is of a kind that cannot be merged.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    if is_quantized(base):
        make_dense(model, base, dtype=base.dtype)
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not hasattr(layer, "merge"):
            raise ModelError.of(
                f"an adapter of kind {type(layer).__name__} cannot be merged",
                where=where,
                fix="export without --merge",
            )
    _part_adapted_head(base)
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        weight = _adapted_weight(layer)
        dtype = weight.dtype
        weight.data = weight.data.float()
        layer.merge()
        weight.data = weight.data.to(dtype)
    merged = model.unload()
    _note_parted_head(merged)
    return merged


def _adapted_weight(layer: Any) -> torch.nn.Parameter:
    """The weight that a layer of peft changes: of experts, which are one tensor of a module, the
    tensor that it names.
    """
    from peft.tuners.lora.layer import ParamWrapper

    if isinstance(layer, ParamWrapper):
        parameter: torch.nn.Parameter = layer.get_param()
        return parameter
    weight: torch.nn.Parameter = layer.get_base_layer().weight
    return weight


def _part_adapted_head(base: Any) -> None:
    """Gives the head a matrix of its own if it shares that of the embedding, and matrices A and B
    on one of them are merged into it.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    both = (base.get_input_embeddings(), base.get_output_embeddings())
    if not any(isinstance(module, BaseTunerLayer) for module in both):
        return
    embedding, head = (m.get_base_layer() if isinstance(m, BaseTunerLayer) else m for m in both)
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _note_parted_head(base: Any) -> None:
    """Sets the model's config to embedding and head with a matrix each, if they have; peft's
    `merge_and_unload` does the same.
    """
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or embedding.weight is head.weight:
        return
    for config in (base.config, base.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False

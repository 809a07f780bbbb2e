"""Opens a model for inference, with tokenizer, chat template and stop tokens; turns its tokens into text as they come."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.config.lf_template import adapt_tokenizer, lf_name, lf_template_of
from unisono.config.schema import RunConfig
from unisono.data.encode import encode_texts
from unisono.data.lf_encoder import LfChatTemplate, lf_chat_template
from unisono.data.rows import Message
from unisono.data.template import ChatTemplate, choose_template, fallback_template, known_stop_ids
from unisono.errors import UsageError
from unisono.events import Reporter
from unisono.facts import read_machine
from unisono.model.forward import Forward, choose_forward
from unisono.model.layers import context_of
from unisono.model.load import (
    SCORE,
    LoadedModel,
)
from unisono.rundir.records import is_image_model
from unisono.task.loading import load_target, stored_dtype
from unisono.task.target import Target, requested_target, verify_target

_DEFAULT_CONTEXT = 4096  # tokens, of a model that does not say its own


@dataclass(frozen=True)
class InferenceModel:
    """A model ready for inference.

    Attributes:
        target: its source.
        forward: the model, with the implementation of its forward.
        template: the chat template; None if the model has none.
        context: maximum tokens of prompt and answer together.
        dtype: of untrained weights, and of the computation.
    """

    target: Target
    forward: Forward
    template: ChatTemplate | None
    context: int
    dtype: str

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
            f"the tokenizer has no chat template; the fallback is {template.origin}, which the model may not know",
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
    return open_requested({"target": name, "step": step}, report)


def open_requested(request: dict[str, Any], report: Reporter, *, answers: bool = True) -> InferenceModel:
    """Finds and loads what a task's request names: target, and what else `requested_target` takes.

    Args:
        request: of the task.
        report: to the front.
        answers: whether it has to write answers, which a reward model cannot.

    Raises:
        UnisonoError: as `open_for_inference`.
    """
    report.phase("locate", f"looking for {request['target']}")
    if is_image_model(Path(request["target"]).expanduser()):
        raise UsageError.of(
            f"{request['target']} draws pictures",
            where="RUN|MODEL",
            why="it is an image model, and answers nothing",
            fix=f'use `unisono generate {request["target"]} "a prompt" --out pictures`',
        )
    target = requested_target(request)
    if answers and target.is_reward:
        raise UsageError.of(
            f"{target.name} is a reward model: it rates answers and writes none",
            where=str(target.weights),
            fix=f"rate the answers of pairs: unisono eval {shlex.quote(target.name)} --data FILE",
        )
    verify_target(target, report)
    report.phase("load_model", f"loading {target.description}")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = _dtype(target, device)
    loaded = load_target(target, dtype=dtype, device=device)
    loaded.model.eval()
    template = template_of(target, loaded.tokenizer)
    forward = choose_forward(
        loaded,
        dtype=dtype,
        gradient_checkpointing=False,
        quick_adapter=target.source != "model" and _is_plain_lora(loaded),
    )
    loaded.model.eval()
    return InferenceModel(target, forward, template, _context(loaded.base), dtype)


def template_of(target: Target, tokenizer: Any) -> ChatTemplate | None:
    """The template that was chosen for the target, or that a run was trained with; for a model its own."""
    plan = target.plan
    chosen = lf_template_of(target.template, system=target.default_system)
    if chosen is not None:
        adapt_tokenizer(tokenizer, chosen)
        return lf_chat_template(tokenizer, chosen, thinking=target.thinking)
    known = sorted(_known_stops(target, tokenizer))
    names = tuple(str(tokenizer.convert_ids_to_tokens(i)) for i in known if i < len(tokenizer))
    if plan is None or plan.config.objective == "pretrain":
        return choose_template(tokenizer, None, stops=names)
    file = plan.config.data.template
    layout = lf_template_of(file, system=plan.config.data.system)
    if layout is not None:
        adapt_tokenizer(tokenizer, layout)
        return lf_chat_template(tokenizer, layout, thinking=plan.config.data.thinking)
    is_unknown = lf_name(file) is not None  # then rows were rendered with the tokenizer's own
    if file is not None and (is_unknown or (not Path(file).is_file() and tokenizer.chat_template)):
        file = None  # if it was a file, it is gone; the result has its text
    found = choose_template(tokenizer, file, stops=names)
    if found is None and plan.data.template.startswith("ChatML"):
        return fallback_template(tokenizer)
    return found


def prompt_ids(
    tokenizer: Any, template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None = None
) -> list[int]:
    """The tokens of a conversation with the generation prompt: what the model continues.

    Args:
        tokenizer: of transformers.
        template: for a conversation.
        messages: the conversation.
        tools: schemas of functions.

    Raises:
        RowError: if the template refuses the messages.
    """
    if isinstance(template, LfChatTemplate):
        return template.prompt_ids(messages, tools)
    text = template.render(messages, tools, prompt=True)
    return list(encode_texts(tokenizer, [text], special=False)[0].ids)


def stops_of(target: Target, tokenizer: Any, template: ChatTemplate | None) -> set[int]:
    """The tokens that end an answer: those of tokenizer and generation_config.json, and the template's end-of-turn token."""
    found = _known_stops(target, tokenizer)
    if isinstance(template, LfChatTemplate):
        return found | {tokenizer.convert_tokens_to_ids(stop) for stop in template.known_stops}
    if template is not None and template.end_of_turn is not None:
        found.add(tokenizer.convert_tokens_to_ids(template.end_of_turn))
    return found


def _known_stops(target: Target, tokenizer: Any) -> set[int]:
    return known_stop_ids(tokenizer, target.base) | known_stop_ids(tokenizer, target.weights)


def _dtype(target: Target, device: torch.device) -> str:
    """The run's dtype on the same kind of device; else that of the files, or float32 if the device does not support it."""
    if target.plan is not None and target.plan.device.kind == device.type:
        return target.plan.dtype
    stored = stored_dtype(target.base)
    if device.type == "cuda":
        return "float16" if stored == "bfloat16" and not torch.cuda.is_bf16_supported() else stored
    return stored if stored == "bfloat16" and read_machine(lambda: ([], "")).cpu_bfloat16 else "float32"


def _is_plain_lora(loaded: LoadedModel) -> bool:
    heads = (f".{SCORE}.modules_to_save.",) if loaded.is_reward else ()
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
    """The text of an answer in pieces, complete characters only. All pieces together are the text up to its first stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids: list[int] = []
        self._settled = 0  # tokens whose text has been given
        self._start = 0  # tokens before this one no longer change the text of others
        self._held = ""  # possible beginning of a stop string
        self._ended = False

    def push(self, token: int) -> str:
        """The text that a new token completes."""
        self._ids.append(token)
        known = decode(self._tokenizer, self._ids[self._start : self._settled])
        text = decode(self._tokenizer, self._ids[self._start :])
        if text.endswith(_BROKEN) or len(text) <= len(known):
            return ""  # the character is incomplete
        self._start, self._settled = self._settled, len(self._ids)
        return self._out(text[len(known) :])

    def close(self) -> str:
        """The text that was held back, after the last token."""
        known = decode(self._tokenizer, self._ids[self._start : self._settled])
        rest = self._out(decode(self._tokenizer, self._ids[self._start :])[len(known) :])
        held, self._held = self._held, ""
        return rest if self._ended else rest + held

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

"""The task `gguf`: writes a model, or an adapter alone, as GGUF for llama.cpp and Ollama, with a
Modelfile; and reads it back.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from unisono.base.errors import ModelError, UnfitError, UsageError
from unisono.base.events import Reporter
from unisono.base.text import one_line, show_bytes
from unisono.guard.integrations.llama_cpp import is_installed
from unisono.trainer.data import RowError
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.template import ChatTemplate, common_beginning
from unisono.trainer.data.text_encoder import probe_tokenizer
from unisono.trainer.model.directory import read_model_config
from unisono.trainer.model.gguf import (
    DTYPES,
    TEXTS,
    GgufLayout,
    Setting,
    Spaces,
    find_spaces,
    read_back,
    tokenizer_settings,
    write_gguf,
)
from unisono.trainer.model.gguf_vision import ARCHITECTURE, PROJECTORS, VisionLayout
from unisono.trainer.model.result_logits import ResultLogits, fixed_rows
from unisono.trainer.plan.task_requests import ExportRequest, GgufExported, GgufRequest, RequestedModel
from unisono.trainer.task import export
from unisono.trainer.task.export import free_place, has_adapter, whole_directory
from unisono.trainer.task.gguf_converter import (
    ConvertedTensors,
    compare_tensors,
    comparison_texts,
    convert,
)
from unisono.trainer.task.inference import (
    load_target,
    merge_adapter,
    stops_of,
    stored_dtype,
    template_of,
    trusts_code,
)
from unisono.trainer.task.llama_logits import read_in_llama_cpp, tokens_in_llama_cpp
from unisono.trainer.task.read_back import ReadBack
from unisono.trainer.task.target import Target, requested_target, verify_target
from unisono.trainer.training.weights import multimodal_original

_CONVERT = (
    "write a directory with `unisono export --merge`, and convert it with llama.cpp's"
    " convert_hf_to_gguf.py --mmproj"
)

Named = tuple[str, torch.Tensor]


def run(request: GgufRequest, report: Reporter) -> GgufExported:
    """Writes the directory; an adapter alone is not read back in llama.cpp.

    Raises:
        UsageError: if OUT exists and is not empty, or the target does not exist.
        ModelError: if llama.cpp has nothing for this model, tokenizer or adapter.
        IntegrityError: if the target is damaged, or what was read back differs.
        UnfitError: if the storage, or llama-quantize, fails.
    """
    out = free_place(request.out)
    target = requested_target(request.model)
    _refuse_others(target, alone=request.adapter)
    verify_target(target, report)
    if request.converter is not None:
        return _by_converter(request, target, out, request.converter, report)
    report.phase("load_model", f"loading the weights of {target.description}")
    sees = not request.adapter and _writes_vision(target, report)
    loaded = load_target(
        target, dtype=stored_dtype(target.base), device=torch.device("cpu"), keeps_parts=sees
    )
    layout = GgufLayout.of(loaded.base.config)
    template = template_of(target, loaded.tokenizer)
    writes = _ExportedModel(
        target, loaded.tokenizer, template, stops_of(target, loaded.tokenizer, template), layout
    )
    back = None
    with whole_directory(out) as directory:
        directory.mkdir()
        report.phase("export", f"writing {out}")
        if request.adapter:
            file, differs = writes.adapter(loaded.model, directory, request.quantize)
        else:
            base = (
                merge_adapter(loaded.model, where=str(target.weights)) if has_adapter(target) else loaded.base
            )
            differs = 0.0
            file, dtype = writes.model(base, directory, request.quantize, report)
            if sees:
                writes.vision(base, directory, dtype, report)
            back = _read_back(base, directory / file, dtype, report) if request.read_back else None
            if dtype != request.quantize:
                assert request.tool is not None
                quantized = directory / file
                file, differs = writes.quantized(base, quantized, request.quantize, request.tool, report)
        (directory / "Modelfile").write_text(writes.modelfile(file, alone=request.adapter), "utf-8")
    return _exported(request, target, out, file, back, writes, layout.architecture, differs_by=differs)


def _exported(
    request: GgufRequest,
    target: Target,
    out: Path,
    file: str,
    back: ReadBack | None,
    chat: "_OllamaChat",
    architecture: str,
    *,
    differs_by: float = 0.0,
    converted: ConvertedTensors | None = None,
) -> GgufExported:
    files = sorted(each for each in out.rglob("*") if each.is_file())
    return {
        "out": str(out),
        "what": "GGUF adapter" if request.adapter else "GGUF model",
        "description": target.description,
        "base": str(target.base),
        "files": [str(each.relative_to(out)) for each in files],
        "bytes": sum(each.stat().st_size for each in files),
        "file": file,
        "architecture": architecture,
        "dtype": request.quantize,
        "differs_by": differs_by,
        "read_back": back.to_json() if back is not None else None,
        "has_template": chat.go_template() is not None,
        "converted": {"equal": converted.equal, "others": list(converted.others)} if converted else None,
    }


def _by_converter(
    request: GgufRequest, target: Target, out: Path, converter: str, report: Reporter
) -> GgufExported:
    """Merges into a directory of transformers, has llama.cpp's converter write the file, and
    compares that with the model.
    """
    if _writes_vision(target, report):
        raise UsageError.of(
            f"the converter's file of {target.name} would lack the vision part",
            where="--converter",
            fix="omit --converter: both parts of this model are written without it",
        )
    with whole_directory(out) as directory:
        directory.mkdir()
        merged = directory / "merged"
        merges = has_adapter(target) or bool(target.merged)
        export.run(ExportRequest(model=request.model, out=str(merged), merge=merges), report)
        loaded = load_target(
            requested_target(RequestedModel(str(merged))),
            dtype=stored_dtype(merged),
            device=torch.device("cpu"),
        )
        base, tokenizer = loaded.base, loaded.tokenizer
        template = template_of(target, tokenizer)
        chat = _OllamaChat(target, tokenizer, template, stops_of(target, tokenizer, template))
        dtype = request.quantize if request.quantize in DTYPES else _unquantized(base)
        path = directory / f"model-{dtype}.gguf"
        report.phase("export", "llama.cpp's converter is writing the file")
        convert(Path(converter), merged, path, dtype=dtype, name=chat.name)
        report.phase("verify", "reading it back, tensor by tensor")
        tensors = compare_tensors(path, base)
        _warn_of_other_tokens(path, tokenizer, list(comparison_texts(Path(converter))), report)
        back = _read_back(base, path, dtype, report) if request.read_back else None
        if dtype != request.quantize:
            assert request.tool is not None
            report.phase("quantize", f"quantizing to {request.quantize}")
            unquantized, path = path, directory / f"model-{request.quantize}.gguf"
            _quantize(request.tool, unquantized, path, request.quantize)
            unquantized.unlink()
        shutil.rmtree(merged)
        (directory / "Modelfile").write_text(chat.modelfile(path.name, alone=False), "utf-8")
    return _exported(request, target, out, path.name, back, chat, tensors.architecture, converted=tensors)


def _warn_of_other_tokens(path: Path, tokenizer: Any, texts: list[str], report: Reporter) -> None:
    split = tokens_in_llama_cpp(path, texts)
    expected = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    others = [text for text, here, ids in zip(texts, split or expected, expected, strict=True) if here != ids]
    if others:
        report.warning(
            "other_tokens",
            f"llama.cpp splits {len(others)} of {len(texts)} texts into other tokens than the tokenizer, e.g."
            f" {one_line(others[0], limit=60)!r}",
        )


def _writes_vision(target: Target, report: Reporter) -> bool:
    """Whether the vision part is written, too; says so if a multimodal model's is not.

    Raises:
        ModelError: if it was trained, and cannot be written.
    """
    if multimodal_original(target.base) is None:
        return False
    kind = str(read_model_config(target.base).get("model_type"))
    if kind in PROJECTORS:
        return True
    plan = target.plan
    trained = [] if plan is None or plan.model.vision is None else plan.config.train_parts
    others = [part for part in trained if part != "language"]
    if others:
        raise ModelError.of(
            f"the run trained the {others[0]} part, which cannot be written as GGUF for {kind}",
            where="train_parts",
            why=f"GGUF supports the vision parts of {', '.join(PROJECTORS)}",
            fix=_CONVERT,
        )
    report.warning(
        "text_only",
        f"the GGUF file has the language model alone, without vision and audio parts; for those {_CONVERT}",
    )
    return False


def _refuse_others(target: Target, *, alone: bool) -> None:
    if target.head is not None:
        raise UsageError.of(
            f"{target.name} is a {'classifier' if target.head.labels else 'reward model'}, which llama.cpp cannot load",
            where="--format",
            fix="omit --format",
        )
    if target.embeds:
        raise UsageError.of(
            f"{target.name} is an embedding model, which is not written as GGUF",
            where="--format",
            fix="omit --format: sentence-transformers loads the export",
        )
    if alone and (not has_adapter(target) or target.merged):
        raise UsageError.of(
            f"{target.name} has no adapter, or several",
            where="--adapter",
            fix="omit --adapter: the model is written",
        )


@dataclass
class _OllamaChat:
    """How people talk to a target in Ollama."""

    target: Target
    tokenizer: Any
    template: ChatTemplate | None
    stops: set[int]

    @property
    def name(self) -> str:
        """The model's name, as people read it."""
        return one_line(Path(self.target.name).name, limit=100)

    def go_template(self) -> str | None:
        """The chat template in the language of Ollama; None if it is not one of the forms that can
        be.
        """
        return go_template(self.template) if self.template is not None else None

    def modelfile(self, file: str, *, alone: bool) -> str:
        """The Modelfile for `ollama create`."""
        lines = [f"# {one_line(self.target.description)}. Use: ollama create NAME -f Modelfile"]
        if alone:
            lines += [
                (
                    f"# FROM names a GGUF of the base model, e.g. of `unisono export {self.target.base} base"
                    " --format gguf`"
                ),
                "FROM ./base/model-f16.gguf",
                f"ADAPTER ./{file}",
            ]
        else:
            lines.append(f"FROM ./{file}")
        template = self.go_template()
        if template is not None:
            lines.append(f'TEMPLATE """{template}"""')
        elif self.template is not None:
            lines.append(
                "# The chat template has no simple form for TEMPLATE; the file has it as"
                " tokenizer.chat_template."
            )
        for token in sorted(str(self.tokenizer.convert_ids_to_tokens(i)) for i in self.stops):
            lines.append(f'PARAMETER stop "{_quoted(token)}"')
        return "\n".join(lines) + "\n"


@dataclass
class _ExportedModel(_OllamaChat):
    """What is written of a target."""

    layout: GgufLayout

    def model(self, base: Any, directory: Path, dtype: str, report: Reporter) -> tuple[str, str]:
        """Writes the whole model; gives the file's name, and its dtype: of a type that
        llama-quantize writes, what that begins with.
        """
        kept = dtype if dtype in DTYPES else _unquantized(base)
        path = directory / f"model-{kept}.gguf"
        rows = base.get_input_embeddings().weight.shape[0]
        name = self.spaces.named(self.name)
        settings = [*_identity("model", name), ("file_type", "uint32", int(DTYPES[kept][1]))]
        self._write(
            path,
            [*_general(settings), *self.layout.settings(rows), *self._tokenizer(rows, report)],
            lambda: self.layout.tensors(base),
            dtype=kept,
        )
        report.phase("verify", "reading it back, tensor by tensor")
        read_back(path, self.layout.tensors(base), dtype=kept)
        return path.name, kept

    def vision(self, base: Any, directory: Path, dtype: str, report: Reporter) -> None:
        """Writes the vision part beside the model, and reads it back."""
        processor = PictureProcessor(self.target.base, trust_remote_code=trusts_code(self.target))
        layout = VisionLayout.of(base.config, processor.processor.image_processor)
        path = directory / f"mmproj-{dtype}.gguf"
        settings = [*_identity("mmproj", self.name), ("file_type", "uint32", int(DTYPES[dtype][1]))]
        write_gguf(
            path,
            [*_general(settings), *layout.settings()],
            layout.tensors(base),
            ((name, tuple(tensor.shape)) for name, tensor in layout.tensors(base)),
            architecture=ARCHITECTURE,
            dtype=dtype,
        )
        report.phase("verify", "reading the vision part back, tensor by tensor")
        read_back(path, layout.tensors(base), dtype=dtype)

    def quantized(self, base: Any, path: Path, dtype: str, tool: str, report: Reporter) -> tuple[str, float]:
        """Replaces the file by one that llama-quantize makes; gives its name, and by how much a
        tensor differs.
        """
        quantized = path.parent / f"model-{dtype}.gguf"
        report.phase("quantize", f"quantizing to {dtype}")
        _quantize(tool, path, quantized, dtype)
        path.unlink()
        return quantized.name, read_back(quantized, self.layout.tensors(base), dtype=None)

    def adapter(self, model: Any, directory: Path, dtype: str) -> tuple[str, float]:
        """Writes the adapter alone."""
        pairs = lora_tensors(model, self.layout)
        path = directory / f"adapter-{dtype}.gguf"
        settings = [*_general(_identity("adapter", self.name)), ("adapter.type", "string", "lora")]
        settings.append(("adapter.lora.alpha", "float32", pairs.alpha))
        self._write(path, settings, lambda: iter(pairs.tensors), dtype=dtype)
        read_back(path, iter(pairs.tensors), dtype=dtype)
        return path.name, 0.0

    def _write(
        self, path: Path, settings: list[Setting], tensors: Callable[[], Iterator[Named]], *, dtype: str
    ) -> None:
        write_gguf(
            path,
            settings,
            tensors(),
            ((name, tuple(tensor.shape)) for name, tensor in tensors()),
            architecture=self.layout.architecture,
            dtype=dtype,
        )

    @cached_property
    def spaces(self) -> Spaces:
        """What llama.cpp must do with spaces, by conversations, or by texts if there is no
        template.
        """
        probe_tokenizer(self.tokenizer)
        texts = [text.strip() for text in TEXTS]
        if self.template is not None:
            texts = [self.template.render([{"role": "user", "content": text}], prompt=True) for text in texts]
        return find_spaces(self.tokenizer, texts)

    def _tokenizer(self, rows: int, report: Reporter) -> list[Setting]:
        template = self.template
        end = template.end_of_turn if template is not None else None
        return tokenizer_settings(
            self.tokenizer,
            rows=rows,
            template=template.source() if template is not None else None,
            stops=sorted(self.stops),
            end_of_turn=self.tokenizer.convert_tokens_to_ids(end) if end is not None else None,
            spaces=self.spaces,
            report=report,
        )


def _read_back(base: Any, file: Path, dtype: str, report: Reporter) -> ReadBack:
    if is_installed():
        report.phase("verify", "loading it in llama.cpp")
    rows = fixed_rows(base.get_input_embeddings().weight.shape[0])
    wanted = ResultLogits.of(base.eval(), rows, dtype=str(base.dtype).removeprefix("torch."))
    return read_in_llama_cpp(file, wanted, dtype=dtype)


def _identity(kind: str, name: str) -> list[Setting]:
    return [("type", "string", kind), ("name", "string", name)]


def _general(settings: list[Setting]) -> list[Setting]:
    return [(f"general.{key}", kind, value) for key, kind, value in settings]


def _unquantized(base: Any) -> str:
    """What llama-quantize begins with: no value may become infinite."""
    return {torch.bfloat16: "bf16", torch.float16: "f16"}.get(base.dtype, "f32")


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ---- the adapter


@dataclass(frozen=True)
class LoraTensors:
    """The matrices of an adapter as llama.cpp expects them: it multiplies B·A by alpha / rank."""

    alpha: float
    tensors: list[Named]


def lora_tensors(model: Any, layout: GgufLayout) -> LoraTensors:
    """The adapter of a peft model.

    Raises:
        ModelError: if it is more than matrices A and B of linear layers.
    """
    from peft.tuners.lora.layer import Linear

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    alpha: float | None = None
    tensors: list[Named] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear) or "default" not in layer.lora_A:
            continue
        a, b, scaling = (
            layer.lora_A["default"].weight,
            layer.lora_B["default"].weight,
            layer.scaling["default"],
        )
        trained -= {f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight"}
        plain = name.removeprefix("base_model.model.") + ".weight"
        alpha = scaling * a.shape[0] if alpha is None else alpha
        own = scaling * a.shape[0] / alpha  # 1, unless ranks or alphas differ
        up = layout.rows(plain, b.detach().float() * own)
        tensors += [
            (f"{layout.name(plain)}.lora_a", a.detach().float()),
            (f"{layout.name(plain)}.lora_b", up),
        ]
    if trained or alpha is None:
        what = sorted(trained)[0] if trained else "no matrix"
        raise ModelError.of(
            f"the adapter has {what}, which a GGUF adapter cannot hold",
            where="adapter",
            why="llama.cpp reads the matrices A and B of linear layers only",
            fix="omit --adapter: the merged model has everything",
        )
    return LoraTensors(alpha, tensors)


# ---- Ollama


def go_template(template: ChatTemplate) -> str | None:
    """The chat template as a Go template over .Messages, found from what it writes around texts and
    verified; else None.
    """
    try:
        pieces = _pieces(template)
    except (RowError, ValueError, IndexError):
        return None
    if pieces is None or '"""' in "".join(pieces.values()):
        return None
    written = {name: _go_text(text) for name, text in pieces.items()}
    turns = " else ".join(
        f'if eq .Role "{role}" }}}}{written[role + " before"]}{{{{ .Content'
        f" }}}}{written[role + ' after']}{{{{"
        for role in ("system", "user", "assistant")
    )
    return f"{written['begin']}{{{{ range .Messages }}}}{{{{ {turns} end }}}}{{{{ end }}}}{written['prompt']}"


def _go_text(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')


_TEXTS = {
    "system": "unisonosystem",
    "user": "unisonoquestion",
    "assistant": "unisonoanswer",
    "next": "unisononext",
}


def _pieces(template: ChatTemplate) -> dict[str, str] | None:
    """What a template writes before and after the text of each role, at the begin, and as prompt;
    None if that depends on more.
    """
    system, user = _turn("system"), _turn("user")
    answer, following = _turn("assistant"), {"role": "user", "content": _TEXTS["next"]}
    whole = [system, user, answer, following]
    samples = [
        (messages, template.render(messages, prompt=True))
        for messages in ([user], [system, user], [user, answer, following], whole)
    ]
    text = template.render(whole)
    before_system, rest = _split(text, _TEXTS["system"])
    system_to_user, rest = _split(rest, _TEXTS["user"])
    user_to_answer, rest = _split(rest, _TEXTS["assistant"])
    answer_to_user, user_after = _split(rest, _TEXTS["next"])
    before_user, _ = _split(samples[0][1], _TEXTS["user"])
    shared = min(
        common_beginning(before_user[::-1], other[::-1]) for other in (system_to_user, answer_to_user)
    )
    for length in range(shared, -1, -1):  # where the text before a question begins is not marked
        user_before = before_user[len(before_user) - length :]
        begin = before_user.removesuffix(user_before)
        pieces = {
            "begin": begin,
            "system before": before_system.removeprefix(begin),
            "system after": system_to_user.removesuffix(user_before),
            "user before": user_before,
            "user after": user_after,
            "assistant before": user_to_answer.removeprefix(user_after),
            "assistant after": answer_to_user.removesuffix(user_before),
            "prompt": samples[-1][1].removeprefix(text),
        }
        if all(_assembled(pieces, messages) == written for messages, written in samples):
            return pieces
    return None


def _turn(role: str) -> dict[str, str]:
    return {"role": role, "content": _TEXTS[role]}


def _split(text: str, word: str) -> tuple[str, str]:
    """What is before and after a word that is there once."""
    before, after = text.split(word)
    return before, after


def _assembled(pieces: dict[str, str], messages: list[dict[str, str]]) -> str:
    """What the Go template writes."""
    turns = (
        pieces[f"{turn['role']} before"] + turn["content"] + pieces[f"{turn['role']} after"]
        for turn in messages
    )
    return pieces["begin"] + "".join(turns) + pieces["prompt"]


def _quantize(tool: str, source: Path, target: Path, dtype: str) -> None:
    """Runs llama-quantize.

    Raises:
        UnfitError: if it fails.
    """
    program = shutil.which(tool)
    if program is None:
        raise UsageError.of(f"{tool} is gone", where="--quantize", fix="install llama.cpp again")
    done = subprocess.run(
        [program, str(source), str(target), dtype.upper()],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0 or not target.exists():
        free = show_bytes(shutil.disk_usage(target.parent).free)
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise UnfitError.of(
            f"llama-quantize ended with {done.returncode}: {one_line(last[0], limit=200)}",
            where=program,
            why=f"it should have written {dtype.upper()}",
            fix=f"check the type with `llama-quantize --help`; {free} are free in {target.parent}",
        )

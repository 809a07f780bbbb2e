"""`unisono chat`: a conversation with a model, on a terminal or through a pipe."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.front.cli.generate import (
    AnswerWriter,
    Overrides,
    RepetitionPenalty,
    Seed,
    Step,
    System,
    Target,
    Temperature,
    TopK,
    TopP,
)
from unisono.front.cli.output import Output, output

if TYPE_CHECKING:
    from unisono.base.messages import Message
    from unisono.guard.supervise.task_process import TaskProcess
    from unisono.trainer.plan.talk_messages import ChatInput, Ready, TurnAnswer

_HELP = (
    ("/image FILE", "attach a picture to the next message; several may be attached"),
    ("/clear", "forget the conversation"),
    ("/save FILE", "write the conversation to a new file, as a row that training reads"),
    ("/exit", "end; so do /quit, /bye, a line with `exit` or `quit` alone, and Ctrl-D"),
    ("/help", "show this list"),
    ("Ctrl-C", "end the answer"),
)
_ENDS = ("/exit", "/quit", "/bye", "exit", "quit")
"""Lines that end a conversation; those of ollama, llama.cpp and of a Python shell are among
them.
"""


def chat(
    context: typer.Context,
    target: Target,
    overrides: Overrides = None,
    system: System = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    step: Step = None,
) -> None:
    """Chat with a model.

    Commands: /image FILE, /clear, /save FILE, /exit, /help; Ctrl-C ends an answer, Ctrl-D the
    conversation.
    """
    from unisono.front.cli.llamafactory_file import read_inference_request
    from unisono.front.cli.terminal import TaskProgress
    from unisono.guard.supervise.codec import decode_message, encode
    from unisono.guard.supervise.task_process import TaskProcess
    from unisono.trainer.plan.talk_messages import ChatNews, Ready
    from unisono.trainer.plan.task_requests import ConversationRequest, SamplingParams

    sampling = SamplingParams(temperature, top_p, top_k, repetition_penalty, seed=seed)
    model, limit, sampling = read_inference_request(
        context, target, overrides, max_tokens=max_tokens, sampling=sampling
    )
    request = ConversationRequest(
        model=replace(model, step=step), system=system, max_tokens=limit or max_tokens, sampling=sampling
    )
    printer = output()
    with TaskProcess("chat", encode(request), has_input=True) as task:
        messages = task.messages()
        with TaskProgress(printer) as progress:
            for message in messages:
                ready: ChatNews | None = decode_message(message, ChatNews)
                if isinstance(ready, Ready):
                    _show_header(printer, ready)
                    break
                progress.show(message)
        ChatSession(task, messages, printer, system=system).run()


def _show_header(printer: Output, ready: "Ready") -> None:
    if ready.note:
        printer.warn(f"warning: {ready.note}")
    printer.notify(f"talking to {ready.description}; /help lists the commands")


class ChatSession:
    """The front's side of a conversation: reads lines, sends them, and writes the answers."""

    def __init__(
        self, task: "TaskProcess", messages: "Iterator[Message]", printer: Output, *, system: str | None
    ) -> None:
        self._task = task
        self._messages = messages
        self._printer = printer
        self._system = system
        self._saved: set[Path] = set()
        self._answer = AnswerWriter()
        self._forget()

    def run(self) -> None:
        """Runs until /exit, a word like it, or the end of stdin."""
        for line in _lines():
            text = line.strip()
            if not text:
                continue
            if text.lower() in _ENDS:
                return
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            else:
                self._notify(text.removeprefix("/") if text.startswith("//") else line)

    def _forget(self) -> None:
        self._turns = [{"role": "system", "content": self._system}] if self._system is not None else []
        self._images: list[str] = []
        self._attached: list[str] = []

    def _command(self, text: str) -> None:
        from unisono.trainer.plan.talk_messages import Clear

        name, _, argument = text.partition(" ")
        if name == "/image":
            self._attach(argument.strip())
        elif name == "/clear":
            self._forget()
            self._send(Clear())
            self._printer.notify("forgotten")
        elif name == "/save":
            self._save(argument.strip())
        elif name == "/help":
            for command, does in _HELP:
                self._printer.warn(f"{command:<12} {does}")
            self._printer.warn("A line that begins with // is sent with one /.")
        else:
            self._printer.warn(f"there is no command {name}; /help lists them")

    def _save(self, name: str) -> None:
        from unisono.base.errors import storage_reason
        from unisono.base.files import write_text

        if not name:
            self._printer.warn("/save FILE: the name of the file is missing")
            return
        path = Path(name).expanduser().absolute()
        if path.exists() and path not in self._saved:
            self._printer.warn(f"{path} exists and is not overwritten; name a new file")
            return
        try:
            write_text(path, json.dumps(self._row(), ensure_ascii=False) + "\n")
        except OSError as error:
            self._printer.warn(f"nothing can be written to {path}: {storage_reason(error)}")
            return
        self._saved.add(path)
        self._printer.notify(f"saved {len(self._turns)} messages to {path}")

    def _row(self) -> dict[str, object]:
        """The conversation as a row."""
        return {"messages": self._turns, **({"images": self._images} if self._images else {})}

    def _attach(self, name: str) -> None:
        from unisono.base.files import expand
        from unisono.guard.supervise.codec import decode_message
        from unisono.trainer.plan.talk_messages import Attach, Attached, ChatNews, RefusedTurn

        if not name:
            self._printer.warn("/image FILE: the name of the file is missing")
            return
        self._send(Attach(name))
        for message in self._messages:
            news: ChatNews | None = decode_message(message, ChatNews)
            if isinstance(news, RefusedTurn):
                self._printer.warn(f"error: {news.text}; {news.fix}")
                return
            if isinstance(news, Attached):
                self._attached.append(str(expand(name).absolute()))
                size = f"{news.width} × {news.height} pixels, {news.tokens} tokens"
                self._printer.notify(f"attached {name} to the next message: {size}")
                return

    def _send(self, message: "ChatInput") -> None:
        from unisono.guard.supervise.codec import encode_message

        self._task.send(encode_message(message))

    def _notify(self, text: str) -> None:
        from unisono.guard.supervise.codec import decode_message
        from unisono.trainer.plan.talk_messages import (
            ChatNews,
            RefusedTurn,
            Say,
            TokenText,
            TurnAnswer,
            with_places,
        )

        self._send(Say(text))
        with _ctrl_c_ends_the_answer(self._task):
            for message in self._messages:
                news: ChatNews | None = decode_message(message, ChatNews)
                match news:
                    case TokenText(piece):
                        self._show(piece)
                    case RefusedTurn(why, fix):
                        self._printer.warn(f"error: {why}; {fix}")
                        return
                    case TurnAnswer() as answer:
                        said = with_places(text, len(self._attached)) if self._attached else text
                        self._images += self._attached
                        self._attached = []
                        self._turns += [
                            {"role": "user", "content": said},
                            {"role": "assistant", "content": answer.text},
                        ]
                        self._end(answer)
                        return
                    case _:
                        pass

    def _show(self, piece: str) -> None:
        if not self._printer.json:
            self._answer.write(piece)

    def _end(self, answer: "TurnAnswer") -> None:
        if self._printer.json:
            self._printer.emit({"kind": answer.kind, **asdict(answer)})
            return
        self._answer.end()
        if answer.ended == "length":
            self._printer.notify(f"(cut at {answer.tokens} tokens; --max-tokens sets the limit)")
        elif answer.ended == "interrupted":
            self._printer.notify("(ended)")


def _lines() -> Iterator[str]:
    """The lines from the terminal or a pipe."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and editing
    while True:
        try:
            if sys.stdout.isatty():
                yield input("> ")
            else:
                sys.stderr.write("> ")
                sys.stderr.flush()
                line = sys.stdin.readline()
                if not line:
                    return
                yield line.rstrip("\n")
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n(Ctrl-D or /exit ends)\n")


@contextlib.contextmanager
def _ctrl_c_ends_the_answer(task: "TaskProcess") -> Iterator[None]:
    """Forwards the first Ctrl-C to the task; a second one exits if the task does not react."""
    pressed = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        del number, frame
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        task.interrupt()

    before = signal.signal(signal.SIGINT, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""What a terminal shows of a command: a line of progress, redrawn in place; and the first screen,
the plan of a run in at most twelve lines, before it starts.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unisono.base.messages import Message, PhaseMessage
from unisono.base.text import fitting, one_line, plain, show_bytes, show_count, wrapped
from unisono.front.cli.output import Output, output, shown, styled, terminal_width
from unisono.guard.facts import read_environment
from unisono.guard.places.ranks import NodePlace
from unisono.trainer.config import RunConfig
from unisono.trainer.config.sections import GRPO
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.families import family_of

_LONGEST_BAR = 24
_USUAL_WIDTH = 80
_REDRAWN_EVERY_S = 0.1


class LiveLine:
    """One line with a bar at the bottom of the terminal; permanent lines are printed above it.

    It is drawn when there is news, by nobody but the caller: no thread takes time from the rank. A
    terminal that is gone is written to no more.
    """

    def __init__(self) -> None:
        self._console = Console(
            file=styled(sys.stderr), no_color=not read_environment().colour, highlight=False
        )
        self._live: Live | None = None
        self._drawn = 0.0

    def show(self, text: str, *, share: float | None) -> None:
        """Redraws the line, with a bar if the share is known; at a limited rate."""
        now = time.monotonic()
        if share is not None and share < 1 and now - self._drawn < _REDRAWN_EVERY_S:
            return
        self._drawn = now
        self._console.width = terminal_width(sys.stderr) or _USUAL_WIDTH
        row = self._row(shown(plain(text)), share, self._console.width)
        with contextlib.suppress(OSError):
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(row, refresh=True)

    def _row(self, text: str, share: float | None, width: int) -> Table:
        """The bar, a fifth of the line, and as many parts of the text as fit."""
        bar = min(_LONGEST_BAR, width // 5) if share is not None else 0
        row = Table.grid(padding=(0, 1))
        if share is not None:
            row.add_column(width=bar)
        row.add_column(no_wrap=True)
        # Text, not str: foreign text must not be parsed as markup
        line = Text(fitting(text, width - bar - 1 if bar else width), no_wrap=True)
        row.add_row(
            *([ProgressBar(total=1.0, completed=share, width=bar)] if share is not None else []), line
        )
        return row

    def above(self, text: str) -> None:
        """Prints a permanent line, wrapped at words."""
        style = "yellow" if text.startswith("warning:") else ""
        lines = wrapped(shown(plain(text)), terminal_width(sys.stderr))
        with contextlib.suppress(OSError):
            self._console.print(Text(lines, style=style), soft_wrap=True)

    def close(self) -> None:
        """Removes the line and restores the cursor."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None


class TaskProgress:
    """Shows the messages of a task on stderr. A context manager; the line is removed at its end."""

    def __init__(self, printer: Output) -> None:
        self._printer = printer
        self._line: Any = None
        self._said = ""

    def __enter__(self) -> Self:
        if not self._printer.quiet and sys.stderr.isatty():
            self._line = LiveLine()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, message: Message) -> None:
        """Shows a phase or a warning; ignores other messages."""
        if message["kind"] == "phase":
            self._phase(message)
        elif message["kind"] == "warning":
            fix = f"; {fix}" if (fix := message.get("fix")) else ""
            self._above(f"warning: {one_line(message['text'] + fix)}")

    def close(self) -> None:
        """Removes the line; further output follows the permanent lines."""
        if self._line is not None:
            self._line.close()

    def _phase(self, message: PhaseMessage) -> None:
        text, done, total = one_line(message["text"]), message.get("done"), message.get("total")
        counted = f"{shown(text)} {done} of {total}" if total else text
        if self._line is not None:
            self._line.show(counted, share=done / total if total and done is not None else None)
        elif text != self._said:
            self._printer.notify(text)
        self._said = text

    def _above(self, text: str) -> None:
        if self._line is not None:
            self._line.above(text)
        else:
            self._printer.warn(text)


QUIET_S = 2.0
"""Shorter work shows no bar."""
NOTIFY_EVERY_S = 10.0
_REDRAW_S = 0.2


class ReadingLine:
    """The progress of reading, or of a download.

    Args:
        total_bytes: of all logs, as they lie on the disk; 0: unknown, as of stdin.
        verb: what is done.
        clock: seconds that only grow.
    """

    def __init__(
        self, total_bytes: int, *, verb: str = "reading", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total_bytes
        self._verb = verb
        self._clock = clock
        self._live = LiveLine() if sys.stderr.isatty() and not output().quiet else None
        self._began = self._said = clock()

    def show(self, read_bytes: int) -> None:
        """Shows the progress, at a limited rate."""
        now = self._clock()
        every = _REDRAW_S if self._live else NOTIFY_EVERY_S
        if now - self._began < QUIET_S or now - self._said < every:
            return
        self._said = now
        text = self._text(read_bytes, now - self._began)
        if self._live:
            self._live.show(text, share=min(read_bytes / self._total, 1.0) if self._total else None)
        else:
            output().notify(text)

    def close(self) -> None:
        """Removes the bar."""
        if self._live:
            self._live.close()

    def _text(self, read_bytes: int, seconds: float) -> str:
        rate = read_bytes / seconds
        of = f" of {self._total / 1e6:,.0f}" if self._total else ""
        left = f" · {max(self._total - read_bytes, 0) / rate:.0f} s left" if self._total and rate else ""
        return f"{self._verb} {read_bytes / 1e6:,.0f}{of} MB · {rate / 1e6:,.0f} MB/s{left}"


_LABEL = 10


def first_screen(plan: RunPlan, facts: Mapping[str, Any]) -> list[str]:
    """The lines, one topic each.

    Args:
        facts: what only the worker knows (its `ready` message); may be empty, as in a dry run.
    """
    rows = [
        ("device", _device(plan)),
        ("ranks", _ranks(plan)),
        ("model", _model(plan)),
        ("trained", _trained(plan, facts)),
        ("", _parts(plan)),
        ("data", _data(plan)),
        ("", f"template: {plan.data.template} · cache: {plan.data.cache_reason}"),
        ("batch", _batch(plan)),
        ("steps", _steps(plan, facts)),
        ("memory", _memory(plan, facts)),
        ("start", plan.resume_reason),
        ("results", plan.output_dir),
        ("", _without_shared_output(plan)),
        ("", _copies(plan)),
    ]
    if plan.ignored_variables:
        names = ", ".join(plan.ignored_variables)
        why = "one device needs" if plan.world_size == 1 else "these ranks need"
        rows.append(("ignored", f"{names}: {why} no other launcher's variables"))
    return [f"{label:<{_LABEL}}{one_line(text)}" for label, text in rows if text.strip("; ")]


def _without_shared_output(plan: RunPlan) -> str:
    """The nodes that do not share output_dir; empty if all do."""
    names = [f"node {node.node_rank} ({node.host})" for node in plan.nodes if not node.shares_output]
    if not names:
        return ""
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    several = len(names) > 1
    parts = "their parts are" if several else "its part is"
    how = f"; {parts} sent over the control channel" if plan.mesh.shards_weights else ""
    return (
        f"{shown} {'do' if several else 'does'} not see this output_dir: the complete checkpoints are here,"
        f" on {plan.nodes[0].host}{how}"
    )


def _copies(plan: RunPlan) -> str:
    storage = plan.config.checkpoint.storage
    return (
        f"copies of checkpoints: {storage.rstrip('/')}/{Path(plan.output_dir).name}/{plan.run_id}"
        if storage
        else ""
    )


def _device(plan: RunPlan) -> str:
    device, count = plan.device, plan.world_size
    if device.kind == "cpu":
        which = f"1 CPU: {device.name}" if count == 1 else f"CPU: {device.name}"
    elif count == 1:
        which = f"1 GPU: {device.name}, index {device.index} → {device.uuid}"
    else:
        which = f"{count} GPUs: {', '.join(sorted({place.device.name for place in plan.ranks}))}"
    threads = f"{plan.threads} thread{'s' if plan.threads != 1 else ''}{' per rank' if count > 1 else ''}"
    host = f" · host {plan.host}" if len(plan.nodes) <= 1 else ""
    return f"{which} · {threads} · {plan.dtype}{host}"


def _ranks(plan: RunPlan) -> str:
    """The placement of ranks; empty for a single rank."""
    if plan.world_size == 1:
        return ""
    full, sharded = "each has the full model (ddp)", "each has a shard of every tensor (fsdp)"
    places = ", ".join(_of_node(plan, node) for node in plan.nodes[:8])
    more = f" and {len(plan.nodes) - 8} nodes more" if len(plan.nodes) > 8 else ""
    return f"{plan.world_size}: {places}{more} · {sharded if plan.mesh.shards_weights else full}"


def _of_node(plan: RunPlan, node: NodePlace) -> str:
    devices = [place.device.index for place in plan.on_node(node.node_rank)]
    which = "" if None in devices else f" on devices {', '.join(map(str, devices))}"
    return f"{node.nproc} on {node.host}{which} ({node.nproc_origin})"


def _model(plan: RunPlan) -> str:
    model = plan.model
    parts = [plan.config.model.path, model.model_type, f"{show_count(model.parameters)} parameters"]
    if plan.config.model.weights == "random":
        parts.append("from random weights")
    if model.quantized:
        parts.append(_quantized(plan))
    if model.other_parameters:
        others = show_count(model.other_parameters)
        parts.append(
            f"{others} more of vision or audio"
            + ("" if model.reads_pictures else ", frozen, kept in results, in memory only if text needs them")
        )
    return " · ".join(parts)


def _quantized(plan: RunPlan) -> str:
    """E.g. `nf4, scales quantized, embeddings int8, computed in bfloat16`."""
    compute = plan.config.model.quantize_compute
    double = ", scales quantized" if plan.model.quantized_double else ""
    double += ", embeddings int8" if plan.model.quantized_embeddings else ""
    return f"{plan.model.quantized}{double}, computed in {plan.dtype if compute == 'auto' else compute}"


def _trained(plan: RunPlan, facts: Mapping[str, Any]) -> str:
    how = _how(plan.config)
    trainable, parameters = facts.get("trainable"), facts.get("parameters")
    if isinstance(trainable, int) and isinstance(parameters, int) and parameters:
        how += (
            f" · {show_count(trainable)} of {show_count(parameters)} parameters"
            f" ({trainable / parameters:.2%})"
        )
    if plan.model.quantized and "quick" in facts:
        how += " · " + ("weight and adapter in one product" if facts["quick"] else "products of peft, slower")
    if facts.get("kernels") is False:
        how += f" · without compiled functions, slower: {facts.get('no_kernels')}"
    for part, (trains, of_part) in facts.get("parts", {}).items():
        what = f"{show_count(trains)} of {show_count(of_part)}" if trains else f"{show_count(of_part)} frozen"
        how += f" · {part}: {what}"
    return how + _rows(facts) if family_of(plan.model).decodes_tokens else how


def _rows(facts: Mapping[str, Any]) -> str:
    layout, padded, padding = facts.get("layout"), facts.get("padded"), facts.get("padding")
    rows = f" · {layout} rows" if layout else ""
    if not padded:
        return rows
    share = f"{padding:.0%} padding" if isinstance(padding, float) else "padding"
    return f"{rows} · {share} in {padded}"


def _parts(plan: RunPlan) -> str:
    """The adapter's parameters by part of the model, and the parts without adapter; empty if it is
    in all linear layers of a dense model.
    """
    adapter, model = plan.config.adapter, plan.model
    if adapter is None or not model.adapted_in_out:
        return ""
    if adapter.targets == "all-linear" and "experts" not in model.parts and not model.omitted:
        return ""
    adapted = [f"{part} {show_count(adapter.rank * size)}" for part, size in model.adapted_in_out.items()]
    others = [
        f"{part} {show_count(n)}" for part, n in model.parts.items() if part not in model.adapted_in_out
    ]
    return f"adapter: {', '.join(adapted)} · parts without: {', '.join(others) or 'none'}"


_ADAPTERS = {
    "lora": "LoRA", "dora": "DoRA", "rslora": "rsLoRA", "oft": "OFT", "loha": "LoHa", "lokr": "LoKr"
}  # fmt: skip


def _how(config: RunConfig) -> str:
    adapter = config.adapter
    if adapter is None:
        only = config.train_only
        if only is not None:
            which = f"the last {only.layers}" if only.layers > 0 else f"the first {-only.layers}"
            which = f"{only.layers} evenly spread" if only.spread else which
            inside = "" if only.modules == "all" else f" ({', '.join(only.modules)})"
            parts = [f"{which} layers{inside}"] if only.layers else []
            return " and ".join([*parts, *only.extra]) + " only"
        return "all weights" + (f", but {len(config.freeze)} patterns frozen" if config.freeze else "")
    name = _ADAPTERS[adapter.kind]
    targets = adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets)
    start = " · PiSSA" if adapter.init == "pissa" else f" · from {adapter.from_}" if adapter.from_ else ""
    if adapter.merge:
        start += f" · {len(adapter.merge)} merged first"
    return f"{name}, rank {adapter.rank}, alpha {adapter.alpha:g} on {targets}{start}"


_OF_ROWS = {"eval": "for evaluation", "not_rendered": "with parts not rendered"}


def _data(plan: RunPlan) -> str:
    ledger, train, family = plan.data.ledger, plan.data.train, family_of(plan.model)
    rows = [family.used(ledger.get("rows", train.rows), ledger.get("used", train.rows))]
    rows += [
        f"{show_count(ledger[name])} {_OF_ROWS.get(name, name)}"
        for name in ("eval", "cut", "split", "not_rendered", "dropped", "bad")
        if ledger.get(name)
    ]
    lost = f", {show_count(ledger['tokens_cut'])} cut" if ledger.get("tokens_cut") else ""
    return f"{', '.join(rows)} · {family.size(plan.data)}{lost}"


def _batch(plan: RunPlan) -> str:
    longest = plan.data.train.longest_sequence
    family = family_of(plan.model)
    packed, unit = family.sequences, family.positions
    if plan.config.objective == GRPO:
        packed = "answers"
    elif plan.config.data.packing and family.decodes_tokens:
        packed = "packed sequences"
    share, remainder = divmod(plan.global_batch, plan.world_size)
    micro_steps = -(-(share + bool(remainder)) // plan.micro_batch)
    factors = (*(plan.batch_of_ranks or (0, 0)), plan.world_size)
    if plan.global_batch == math.prod(factors):  # not in a run that continues on other ranks
        cut = " × ".join(map(str, factors)) + f" rank{'s' if plan.world_size > 1 else ''}"
    elif plan.world_size == 1:
        cut = f"{micro_steps} × {plan.micro_batch}"
    else:
        each = f"{share} or {share + 1}" if remainder else str(share)
        cut = (
            f"{plan.world_size} ranks × {each}, in {micro_steps} ×"
            f" {min(plan.micro_batch, share + bool(remainder))}"
        )
    return (
        f"{plan.global_batch} {packed} per step = {cut} · "
        f"at most {plan.micro_batch} × {longest:,} {unit} at once"
    )


def _steps(plan: RunPlan, facts: Mapping[str, Any]) -> str:
    total = f"{plan.total_steps:,}"
    if plan.config.duration != f"{plan.total_steps} steps":
        total += f" = {plan.config.duration}"
    parts = [
        f"{total}, {plan.steps_per_epoch:.4g} per epoch",
        f"warmup {plan.warmup_steps}",
        _due("evaluation", plan.eval_every, plan.total_steps),
        _due("checkpoint", plan.checkpoint_every, plan.total_steps),
        _price_of_a_death(plan, facts),
    ]
    return " · ".join(part for part in parts if part)


def _due(what: str, every: int | None, steps: int) -> str:
    if every is None:
        return ""
    return f"{what} every {every}" if every < steps else f"{what} at the end"


def _price_of_a_death(plan: RunPlan, facts: Mapping[str, Any]) -> str:
    """The number of steps lost if a rank dies; empty if not yet known."""
    if "kept_every" not in facts:
        return ""
    every = facts["kept_every"]
    if not isinstance(every, int):
        return f"a rank's death costs at most {plan.checkpoint_every} steps"
    if every == 1:
        return "a rank's death costs no finished step: each step is kept in memory"
    return (
        f"a rank's death costs at most {every - 1} finished step{'s' if every > 2 else ''}: one step in"
        f" {every} is kept in memory"
    )


def _memory(plan: RunPlan, facts: Mapping[str, Any]) -> str:
    text = f"about {show_bytes(plan.memory.total)} of {show_bytes(plan.device.memory_bytes)} free"
    if plan.gradient_checkpointing:
        text += " · gradient checkpointing"
    measured = facts.get("peak_bytes")
    if isinstance(measured, int | float) and measured:
        text += f" · the trial of the longest batch took {show_bytes(measured)}"
    return text

"""The commands `unisono generate` and `unisono eval`: answers of a trained model to prompts, and
its scores on a data file.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from unisono.front.cli.app import refuse_unwritable
from unisono.front.cli.output import output, silence, styled, terminal_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.base.messages import Message
    from unisono.front.cli.terminal import TaskProgress
    from unisono.guard.supervise.task_requests import TaskRequest
    from unisono.trainer.plan.task_requests import (
        DrawRequest,
        Evaluated,
        Generated,
        GeneratedText,
        GenerateRequest,
        LabelFigures,
        PredictRequest,
    )

Result = TypeVar("Result")

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="Directory of a run, a model or an adapter; a hub id; builtin:tiny; or a LLaMA-Factory file.",
        show_default=False,
    ),
]
Step = Annotated[
    int | None,
    typer.Option(min=0, help="Use this checkpoint of a run instead of its result.", show_default=False),
]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=100.0, help="Sampling temperature; 0: always the most likely token.")
]
TopP = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens with this total probability."),
]
TopK = Annotated[
    int, typer.Option(min=0, help="Sample from this many of the most likely tokens; 0: from all.")
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        min=0.01, max=100.0, help="Above 1: tokens of the prompt and the answer become less likely."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides of keys of a LLaMA-Factory file.", show_default=False
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampling: the same seed gives the same answers.")]
System = Annotated[str | None, typer.Option(help="A system message before the prompt.", show_default=False)]


def generate(
    context: typer.Context,
    target: Target,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; without it and --file, it is read from stdin.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help=(
                "Overrides of keys of a LLaMA-Factory file; or model.tokenizer=DIR for an image model in one"
                " file."
            ),
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="One prompt per line (txt), or rows with `prompt` or `messages`.",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help=(
                "A picture for a vision-language model, where the prompt has <image>, else before it; may be"
                " repeated."
            ),
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE|DIR",
            help=(
                "Write the answers to this file, one JSON object per line; or the pictures of an image model"
                " into this directory."
            ),
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of tokens in an answer; default: 256, or what fits into the context.",
            show_default=False,
        ),
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", metavar="TEXT", help="Stop before this text; may be repeated.", show_default=False
        ),
    ] = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt without applying a chat template.")
    ] = False,
    step: Step = None,
    number: Annotated[
        int,
        typer.Option(
            min=1, max=10_000, help="Image model: number of pictures; their seeds count up from --seed."
        ),
    ] = 1,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Image model: denoising steps.")] = 30,
    guidance: Annotated[
        float, typer.Option(min=0.0, help="Image model: scale of the guidance by the prompt.")
    ] = 7.5,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="WIDTHxHEIGHT",
            help="Image model: size in pixels; default: as in training.",
            show_default=False,
        ),
    ] = None,
    negative: Annotated[
        str | None, typer.Option(help="Image model: what pictures should not show.", show_default=False)
    ] = None,
) -> None:
    """Answer one prompt, or each prompt of a file; with an image model, draw pictures.

    Answers go to stdout, everything else to stderr.
    """
    from unisono.base.errors import UsageError
    from unisono.front.cli.llamafactory_file import read_inference_request, split_prompt
    from unisono.trainer.plan.families import family_at
    from unisono.trainer.plan.task_requests import DrawRequest, GenerateRequest, SamplingParams

    if family_at(Path(target).expanduser()).draws:
        width, height = _size(size)
        given = _of_single_file(target, overrides)
        pictures = _require_directory(out)
        drawing = DrawRequest(
            target=target,
            step=step,
            prompt=_prompt(prompt),
            negative=negative,
            out=pictures,
            number=number,
            seed=seed,
            steps=steps,
            guidance=guidance,
            width=width,
            height=height,
            tokenizer=given.get("tokenizer"),
            prediction=given.get("prediction"),
        )
        _draw(drawing)
        return

    prompt, overrides = split_prompt(prompt, overrides)
    if prompt is not None and file is not None:
        raise UsageError.of(
            "a prompt and a file of prompts are given", where="--file", fix="pass only one of them"
        )
    if image and file is not None:
        raise UsageError.of(
            "--image and --file exclude each other", where="--image", fix="omit --file, or --image"
        )
    if stop and not all(stop):
        raise UsageError.of(
            "a stop text is empty", where="--stop", fix="write the text before which an answer ends"
        )
    if out is not None:
        refuse_unwritable(out, "--out")
    sampling = SamplingParams(temperature, top_p, top_k, repetition_penalty, seed=seed)
    model, limit, sampling = read_inference_request(
        context, target, overrides, max_tokens=max_tokens, sampling=sampling
    )
    request = GenerateRequest(
        model=replace(model, step=step),
        prompt=None if file else _prompt(prompt),
        file=file,
        system=system,
        raw=raw,
        max_tokens=limit,
        sampling=sampling,
        stop=tuple(stop or ()),
        images=tuple(image or ()),
    )
    result = _run(request, streams=file is None and out is None and not output().json)
    _hand_over(result["answers"], out=out, single=file is None)


def _of_single_file(target: str, overrides: list[str] | None) -> dict[str, str]:
    """What a whole image model in one file lacks, from `key=value`."""
    from unisono.base.errors import UsageError

    names = {"model.tokenizer": "tokenizer", "diffusion.prediction": "prediction"}
    paths = {}
    for word in overrides or ():
        key, _, value = word.partition("=")
        if key not in names or not value or not target.endswith(".safetensors"):
            raise UsageError.of(
                f"{word!r} is not expected",
                where="command line",
                why=(
                    "an image model takes only model.tokenizer=DIR and"
                    " diffusion.prediction=epsilon|v_prediction, for a whole model in one file"
                ),
                fix="remove it; `--help` lists the options",
            )
        if key == "diffusion.prediction" and value not in ("auto", "epsilon", "v_prediction"):
            fix = "set it to epsilon or v_prediction"
            raise UsageError.of(f"{value!r} is not a prediction", where=key, fix=fix)
        paths[names[key]] = value
    return paths


def _size(size: str | None) -> tuple[int | None, int | None]:
    """Width and height of `512x768`."""
    import re

    from unisono.base.errors import UsageError

    if size is None:
        return None, None
    matched = re.fullmatch(r"([1-9]\d{0,4})[x×]([1-9]\d{0,4})", size)
    if matched is None:
        raise UsageError.of(f"{size!r} is not a size", where="--size", fix="write it as 512x768, in pixels")
    return int(matched[1]), int(matched[2])


def _require_directory(out: Path | None) -> Path:
    """The directory of pictures.

    Raises:
        UsageError: if nothing can be written there.
    """
    from unisono.base.errors import UsageError, require_writable

    if out is None:
        raise UsageError.of(
            "there is no directory for the pictures", where="--out", fix="add e.g. --out pictures"
        )
    if out.exists() and not out.is_dir():
        raise UsageError.of(f"{out} is not a directory", where="--out", fix="pass a directory")
    fix = "pass a directory in which you may create files"
    require_writable(out.absolute(), where="--out", why="the pictures would be in it", fix=fix)
    return out


def _draw(request: "DrawRequest") -> None:
    """Draws pictures of a prompt into a directory."""
    result = _run_task(request)
    printer = output()
    if printer.json:
        printer.emit({"schema": 1, **result})
        return
    for file in result["files"]:
        printer.result(file)


def _prompt(prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        output().notify("the prompt, ended by Ctrl-D:")
    return sys.stdin.read().rstrip("\n")


def _run(request: "GenerateRequest", *, streams: bool) -> "Generated":
    from unisono.front.cli.terminal import TaskProgress
    from unisono.guard.supervise.task_process import run_request

    with TaskProgress(output()) as progress:
        shown = _Tokens(progress) if streams else None

        def show(message: "Message") -> None:
            if message["kind"] == "token" and shown is not None:
                shown.show(message["text"])
            elif shown is None or not shown.started:
                progress.show(message)

        result = run_request(request, on_message=show)
        if shown is not None:
            shown.end()
        return result


class _Tokens:
    """Streams an answer."""

    def __init__(self, progress: "TaskProgress") -> None:
        self._progress = progress
        self._answer = AnswerWriter()
        self.started = False

    def show(self, text: str) -> None:
        if not self.started:
            self._progress.close()
            self.started = True
        self._answer.write(text)

    def end(self) -> None:
        """Ends the answer's line."""
        self._answer.end()


def _hand_over(answers: "list[GeneratedText]", *, out: Path | None, single: bool) -> None:
    import json

    from unisono.base.files import write_text

    printer = output()
    if out is not None:
        write_text(out, "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers))
        printer.notify(f"wrote {len(answers)} answers to {out}")
    if printer.json:
        for answer in answers:
            printer.emit({"schema": 1, **answer})
    elif out is None and not single:  # a single answer was streamed
        for answer in answers:
            printer.answer(f"{answer['where']}\n{answer['answer']}\n")
    if single and answers[0]["ended"] == "length":
        printer.notify(f"(cut at {answers[0]['tokens']} tokens; --max-tokens sets the limit)")


_LABELS = {
    "rows": "rows",
    "pairs": "pairs",
    "loss_tokens": "loss tokens",
    "loss": "loss",
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "f1": "macro F1",
    "reward_accuracy": "reward accuracy",
    "reward_margin": "reward margin",
    "rewards_chosen": "rewards chosen",
    "rewards_rejected": "rewards rejected",
    "logps_chosen": "logps chosen",
    "logps_rejected": "logps rejected",
    "kl": "KL",
    "questions": "answers compared",
    "exact_match": "exact match",
    "rouge_l": "ROUGE-L",
    "bleu": "BLEU",
}


def evaluate(
    context: typer.Context,
    target: Target,
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help=(
                "Rows with answers, in any training format; for a preference run, pairs or rated answers;"
                " for a classifier, texts with labels."
            ),
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first N rows.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help=(
                "Write each answer (for a preference run the rewards, for a classifier the labels of each"
                " row) to this file, one JSON object per line."
            ),
            show_default=False,
        ),
    ] = None,
    step: Step = None,
    rewards: Annotated[
        bool,
        typer.Option(
            "--rewards",
            help="Measure the rewards of sampled answers, and pass@k, with the rewards of the run.",
        ),
    ] = False,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="REWARD",
            help=(
                "Use this reward instead of the run's rewards, as in a config: exact, FILE.py:FUNCTION,"
                " '{use: length, max: 60}'; may be repeated."
            ),
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, max=4096, help="With --rewards: answers to each prompt.")
    ] = 1,
    threshold: Annotated[
        float,
        typer.Option(metavar="NUMBER", help="With --rewards: least reward of an answer that passes."),
    ] = 1.0,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=100.0,
            help="With --rewards: sampling temperature; default: the run's, and 0 for one answer.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --rewards: maximum number of tokens in an answer; default: as in the run, else 256.",
            show_default=False,
        ),
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option("--trust-code", help="Execute your own reward and metric functions, and task files."),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="TASK,…",
            help="Evaluate benchmarks of lm-eval, by their names or task files, instead of --data.",
            show_default=False,
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="With --tasks: examples before each question; default: as each task has it.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="With --tasks: write questions in the chat template.")
    ] = False,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="METRIC",
            help=(
                "Measure this function of answers instead of the eval.metrics of the run, as in a config: exact,"
                " FILE.py:FUNCTION, '{use: length, max: 60}'; may be repeated."
            ),
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure loss and perplexity over the loss tokens, and exact match, ROUGE-L and BLEU of greedy
    answers.

    For a reward model, or a run with another preference objective: the loss, and the rewards of
    chosen and rejected answers. For a classifier: the loss, accuracy, F1, and the counts of each
    label. With --rewards: the mean reward, and pass@k, the probability that
    one of k answers has at least the reward --threshold.

    Each metric of the run's eval.metrics, or of --metric, has its mean over the answers. With
    --tasks: the figures of benchmarks.

    A LLaMA-Factory file with `do_predict` needs no --data: its rows are answered, and the answers
    are written to its output_dir.
    """
    import json

    from unisono.base.files import write_text
    from unisono.front.cli.benchmarks import refuse_options_of_tasks
    from unisono.front.cli.llamafactory_file import read_inference_file
    from unisono.front.cli.reward_evaluation import (
        read_functions,
        refuse_options_of_rewards,
        show_rewards,
    )
    from unisono.guard.facts import read_environment
    from unisono.trainer.config.answer_functions import MetricSection
    from unisono.trainer.config.rollout_sections import RewardSection
    from unisono.trainer.plan.task_requests import EvaluateRequest, EvaluateRewardsRequest, RequestedModel

    if out is not None:
        refuse_unwritable(out, "--out")
    cache_dir = read_environment().cache_dir
    given = read_inference_file(target, overrides or [])
    model = replace(given.model if given else RequestedModel(target), step=step)
    if tasks is not None:
        from unisono.front.cli.benchmarks import refuse_other_options, show_tasks
        from unisono.trainer.plan.task_requests import EvaluateTasksRequest

        refuse_other_options(context)
        request_of_tasks = EvaluateTasksRequest(
            model=model,
            tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
            shots=shots,
            limit=limit,
            chat=chat_template,
            samples=out is not None,
            trust_code=trust_code,
        )
        show_tasks(_run_task(request_of_tasks), out)
        return
    refuse_options_of_tasks(context)
    if metric and (rewards or reward):
        from unisono.base.errors import UsageError

        raise UsageError.of(
            "--metric has no effect with rewards",
            where="--metric",
            fix="pass it as --reward, or omit --rewards",
        )
    if rewards or reward:
        request = EvaluateRewardsRequest(
            model=model,
            data=data,
            cache_dir=cache_dir,
            rewards=read_functions(RewardSection, reward or (), "--reward"),
            samples=samples,
            threshold=threshold,
            temperature=temperature,
            max_tokens=max_tokens,
            limit=limit,
            trust_code=trust_code,
        )
        show_rewards(_run_task(request), out)
        return
    refuse_options_of_rewards(context)
    if given is not None and data is None:
        _predict(given.prediction(cache_dir=cache_dir, step=step, limit=limit, out=out))
        return
    if data is None:
        from unisono.base.errors import UsageError

        raise UsageError.of("there are no rows to evaluate", where="--data", fix="add --data FILE")
    result = _run_task(
        EvaluateRequest(
            model=model,
            data=data,
            cache_dir=cache_dir,
            limit=limit,
            each=out is not None,
            metrics=read_functions(MetricSection, metric or (), "--metric"),
            trust_code=trust_code,
        )
    )
    printer = output()
    if out is not None:
        write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in result["rows"]))
        what = "answers" if "questions" in result["figures"] else "rows"
        printer.notify(f"wrote {len(result['rows'])} {what} to {out}")
    if printer.json:
        others = {name: value for name, value in result.items() if name not in ("figures", "rows")}
        printer.emit({"schema": 1, **result["figures"], **others})
        return
    for text in table(result, data):
        printer.result(text)


def _run_task(request: "TaskRequest[Result]") -> "Result":
    from unisono.front.cli.terminal import TaskProgress
    from unisono.guard.supervise.task_process import run_request

    with TaskProgress(output()) as progress:
        return run_request(request, on_message=progress.show)


def _predict(request: "PredictRequest") -> None:
    """Answers the rows of a LLaMA-Factory file, and shows the scores."""
    from unisono.base.errors import require_writable
    from unisono.base.text import one_line

    why, fix = "the answers would be in it", "name a directory in which you may create files"
    require_writable(Path(request.out).absolute(), where="output_dir", why=why, fix=fix)
    result = _run_task(request)
    printer = output()
    if printer.json:
        printer.emit({"schema": 1, **result})
        return
    ledger = result["ledger"]
    lost = ", ".join(f"{ledger[name]} {name}" for name in ("cut", "dropped", "bad") if ledger.get(name))
    printer.result(
        f"{one_line(result['description'])}: {result['rows']} rows" + (f" ({lost})" if lost else "")
    )
    for name, value in result["figures"].items():
        printer.result(f"  {name.removeprefix('predict_'):<19} {value:.4g}")
    printer.result(f"  in {result['out']}: {', '.join(result['files'])}")
    if result["rouge"] == "ours":
        printer.notify(
            "ROUGE splits words by a rule; `pip install 'unisono[llamafactory]'` installs LLaMA-Factory's"
            " word splitter"
        )


def table(result: "Evaluated", data: str) -> list[str]:
    """The metrics as lines for people."""
    from unisono.base.text import one_line, show_count

    figures, ledger = result["figures"], result["ledger"]
    lost = {name: ledger.get(name, 0) for name in ("cut", "split", "dropped", "bad")}
    note = ", ".join(f"{count} {name}" for name, count in lost.items() if count)
    lines = [f"{one_line(result['description'])}, evaluated on {one_line(data)}"]
    lines += [f"  {text}" for text in result["formats"]]
    labels = _LABELS | {name: _metric_label(name) for name in figures if name.startswith("metric_")}
    for name, label in labels.items():
        if name not in figures:
            continue
        value = figures[name]
        if value is None:
            shown = "-"
        elif name in ("exact_match", "rouge_l", "reward_accuracy", "accuracy"):
            shown = f"{100 * value:.1f} %"
        elif isinstance(value, int):
            shown = show_count(value)
        else:
            shown = f"{value:.4f}" if name == "loss" else f"{value:.4g}"
        lines.append(
            f"  {label:<17} {shown}" + (f"   ({note})" if name in ("rows", "pairs") and note else "")
        )
    return lines + _label_lines(result.get("labels", []))


def _label_lines(labels: "Sequence[LabelFigures]") -> list[str]:
    """The figures of each label of a classifier, one line each."""
    from unisono.base.text import one_line

    names = [one_line(one["label"], limit=40) for one in labels]
    width = max(map(len, names), default=0)
    return [
        f"    {name:<{width}}  {one['rows']} rows, {one['predicted']} predicted, {one['right']} right:"
        f" precision {one['precision']:.3f}, recall {one['recall']:.3f}, F1 {one['f1']:.3f}"
        for name, one in zip(names, labels, strict=True)
    ]


def _metric_label(name: str) -> str:
    from unisono.base.text import one_line

    return one_line(name.removeprefix("metric_"), limit=40)


class AnswerWriter:
    """Writes an answer piece by piece to stdout; a terminal gets whole words, with escapes for
    control characters.
    """

    def __init__(self) -> None:
        self._width, self._is_terminal = terminal_width(sys.stdout), sys.stdout.isatty()
        self._column = 0
        self._gap = self._word = ""

    def write(self, piece: str) -> None:
        """Writes a piece; on a terminal, the last word of it waits for its end."""
        from unisono.base.text import escape_controls

        text = escape_controls(piece) if self._is_terminal else piece
        _write_raw("".join(map(self._next, text)) if self._width else text)

    def end(self) -> None:
        """Ends the line."""
        _write_raw(self._finish_word() + "\n")
        self._column, self._gap = 0, ""

    def _next(self, sign: str) -> str:
        """The text that can be written once `sign` is known."""
        from unisono.base.text import columns

        if sign == "\n":
            ended = self._finish_word() + sign
            self._column, self._gap = 0, ""
            return ended
        if sign.isspace():
            ended = self._finish_word()
            self._gap += sign
            return ended
        if columns(sign) < 2:
            self._word += sign
            return ""
        ended = self._finish_word()  # Chinese and Japanese have no blanks: a line may break before each sign
        self._word = sign
        return ended + self._finish_word()

    def _finish_word(self) -> str:
        from unisono.base.text import columns

        word, gap = self._word, self._gap.expandtabs()
        if not word:
            return ""
        self._word = self._gap = ""
        if self._column and self._column + columns(gap + word) > self._width:
            self._column = columns(word)
            return "\n" + word
        self._column += columns(gap + word)
        return gap + word


def _write_raw(text: str) -> None:
    """Writes what `AnswerWriter` leaves of an answer to stdout. A closed pipe is not an error."""
    encoding, stream = sys.stdout.encoding or "ascii", styled(sys.stdout)
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        silence(sys.stdout)

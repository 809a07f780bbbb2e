"""The task `generate`: answers to one prompt or to a file of them.

Request: target, step (or null), prompt (text) or file, system (or null), raw, max_tokens (or null: 256, or what the model has room
for), temperature, top_p, seed, stop (list).
Messages: `token` with `text`, for a single prompt, as it comes. Result: description, answers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from unisono.errors import UsageError
from unisono.events import Reporter
from unisono.model.generate import generate
from unisono.task.decoding import StopStrings, TextStream, cut_at_stop, decode
from unisono.task.opening import Opened, open_for_inference
from unisono.task.prompts import Prompt, encode_prompts, read_prompts

_USUAL_TOKENS = 256


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Answers; `answers` has, for each prompt, where, prompt, answer, tokens, ended (`stop` or `length`)."""
    prompts = _prompts(request)
    opened = open_for_inference(request["target"], step=request.get("step"), report=report)
    raw = bool(request.get("raw"))
    asked: int | None = request["max_tokens"]
    ids, template = encode_prompts(
        opened, prompts, raw=raw, system=request.get("system"), max_new_tokens=asked or 1
    )
    limit = asked or min(_USUAL_TOKENS, opened.context - max(map(len, ids)))
    if template is None and not raw:
        report.warning("no_template", "there is no chat template: prompts are continued as they are")
    report.phase("generate", "answering", done=0, total=len(prompts))
    stops: list[str] = request.get("stop") or []
    stream = TextStream(opened.tokenizer, stops) if len(prompts) == 1 else None
    with opened.ready() as model:
        answers = generate(
            model, ids, max_new_tokens=limit, stop_ids=opened.stops(template), pad_id=opened.pad_id,
            temperature=request["temperature"], top_p=request["top_p"], seed=request["seed"],
            on_token=_sender(stream, report) if stream else None,
            is_done=StopStrings(opened.tokenizer, stops) if stops else None,
            on_answers=lambda done: report.phase("generate", "answering", done=done, total=len(prompts)),
        )  # fmt: skip
    if stream is not None:
        report.send("token", text=stream.close())
    return {
        "description": opened.target.description,
        "answers": [_answer(opened, p, a, limit, stops) for p, a in zip(prompts, answers, strict=True)],
    }


def _prompts(request: dict[str, Any]) -> list[Prompt]:
    if request.get("file") is not None:
        return read_prompts(request["file"])
    if not str(request.get("prompt") or "").strip():
        raise UsageError.of(
            "the prompt is empty", where="PROMPT", fix="write it on the command line, pipe it in, or name a file with --file"
        )  # fmt: skip
    return [Prompt("", request["prompt"])]


def _sender(stream: TextStream, report: Reporter) -> Callable[[int], None]:
    def send(token: int) -> None:
        piece = stream.push(token)
        if piece:
            report.send("token", text=piece)

    return send


def _answer(
    opened: Opened, prompt: Prompt, ids: Sequence[int], limit: int, stops: list[str]
) -> dict[str, Any]:
    text = decode(opened.tokenizer, ids)
    cut = cut_at_stop(text, stops)
    ended = "length" if len(ids) == limit and cut == text else "stop"
    return {"where": prompt.where, "prompt": prompt.asked, "answer": cut, "tokens": len(ids), "ended": ended}

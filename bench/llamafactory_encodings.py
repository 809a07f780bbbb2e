"""Templates of LLaMA-Factory: equal to its own encoder on drawn rows, and the rate of `unisono data
preview`.

python bench/llamafactory_encodings.py [--llamafactory PYTHON] [--jobs 60] [--seed 1] [--rows 10000]
[--pairs 3]

With --llamafactory, the Python of an environment with LLaMA-Factory 0.9.5, rows of every shape
(several turns, tools, calls, thoughts, odd characters, empty parts, pairs, ratings) are encoded by
both, with random templates, cutoffs and settings. Text rows of vision models are encoded with its
base plugin, so that no image processor is needed. Then both encoders of unisono read the same
10,000 rows, in turns.
"""

import argparse
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

_TOKENIZER = (
    Path(__file__).parent.parent / "tests" / "trainer" / "readers" / "llamafactory" / "golden" / "tokenizer"
)
_WORDS = [
    "the",
    "cat",
    "",
    "sat",
    "on\n\na",
    "mat.",
    "你好，世界！",
    "naïve",
    "café",
    "🙂🙃",
    "<|im_end|>",
    "<|im_start|>",
    "</s>",
    "{{content}}",
    "{{idx}}",
    "\t",
    "tab",
    "<think>",
    "</think>",
    "[INST]",
    "\\n",
    '"q"',
    "'x'",
    "Łódź",
    "12345",
    "3.14",
    "<s>",
    "\n\n\n",
    "",
    "",
    "",
]
_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation",
    "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor"
    " %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Runs in LLaMA-Factory's environment: argv is the file of jobs and the file of results.
_REFERENCE = """
import copy, importlib.util, json, os, sys, types
os.environ["DISABLE_VERSION_CHECK"] = "1"
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in ("torchaudio", "torchvision") else found(name, *more)
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
from transformers import AutoTokenizer
from llamafactory.data import processor, template
from llamafactory.data.converter import DATASET_CONVERTERS
from llamafactory.data.mm_plugin import get_mm_plugin
from llamafactory.data.parser import DatasetAttr
from llamafactory.hparams import DataArguments
kinds = {"sft": processor.SupervisedDatasetProcessor, "rm": processor.PairwiseDatasetProcessor,
         "kto": processor.FeedbackDatasetProcessor, "pt": processor.PretrainDatasetProcessor}
work = json.load(open(sys.argv[1]))
originals, results = copy.deepcopy(template.TEMPLATES), []
for job in work["jobs"]:
    template.TEMPLATES[job["template"]] = copy.deepcopy(originals[job["template"]])
    template.TEMPLATES[job["template"]].mm_plugin = get_mm_plugin(name="base")
    try:
        tokenizer = AutoTokenizer.from_pretrained(work["tokenizer"])
        settings = DataArguments(template=job["template"], **job["options"])
        layout = template.get_template_and_fix_tokenizer(tokenizer, settings)
        attributes = DatasetAttr("file", "rows")
        attributes.join(job["entry"])
        convert = DATASET_CONVERTERS[attributes.formatting](attributes, settings)
        rows = [convert(row) for row in job["rows"]]
        encode = kinds[job["stage"]](template=layout, tokenizer=tokenizer, processor=None, data_args=settings)
        out = encode.preprocess_dataset({name: [row[name] for row in rows] for name in rows[0]})
        results.append({name: out[name] for name in out if name.endswith(("input_ids", "labels", "kto_tags"))})
    except Exception as error:
        results.append({"error": repr(error)})
json.dump(results, open(sys.argv[2], "w"))
"""


def main() -> None:
    """Compares and measures, prints, and keeps the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llamafactory", help="the Python of its environment")
    parser.add_argument("--jobs", type=int, default=60, help="of each template, with three rows each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    path = Path(__file__).parent / "results" / "llamafactory_encodings.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result |= {
        "schema": 1,
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "load": os.getloadavg()[0],
    }
    if args.llamafactory:
        command = (
            f"python bench/llamafactory_encodings.py --llamafactory PYTHON --jobs {args.jobs} --seed"
            f" {args.seed}"
        )
        result["equality"] = {"command": command} | compare(
            args.llamafactory, draw_jobs(args.seed, args.jobs)
        )
    if args.pairs:
        command = f"python bench/llamafactory_encodings.py --rows {args.rows} --pairs {args.pairs}"
        result["speed"] = {"command": command, "rows": args.rows} | measure(args.rows, args.pairs)
    print(json.dumps(result, indent=2))
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


# ---- drawn rows


class Draw:
    """Draws rows of every shape that LLaMA-Factory's formats have."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, share: float) -> bool:
        """True in this share of draws."""
        return self._random.random() < share

    def one(self, *values: Any) -> Any:
        """One of the values."""
        return self._random.choice(values)

    def text(self, words: int | None = None) -> str:
        """Words, special tokens and odd characters; also none."""
        count = self.one(0, 1, 2, 5, 12, 30, 80) if words is None else words
        return " ".join(self.one(*_WORDS) for _ in range(count))

    def answer(self) -> str:
        """A text, perhaps with a thought."""
        thought = f"<think>\n{self.text(4)}\n</think>\n\n"
        other = f"<|channel|>analysis<|message|>{self.text(3)}<|end|><|start|>assistant<|channel|>final<|message|>"
        return self.one(thought, "", "", "", f"<think>{self.text(2)}</think>", "\n\n", other) + self.text()

    def call(self, most: int) -> str:
        """Up to `most` function calls as JSON, perhaps with a thought or marks around it."""
        arguments: tuple[dict[str, Any], ...] = (
            {},
            {"a": 1, "b": "x y", "c": [1, {"z": "é"}]},
            {"n": None, "t": True, "f": 1.5},
            {"city": "北京"},
        )
        calls = [
            {"name": self.one("f", "get_x"), "arguments": self.one(*arguments)}
            for _ in range(self.one(*range(1, most + 1)))
        ]
        body = json.dumps(
            calls if len(calls) > 1 or self.chance(0.3) else calls[0], ensure_ascii=self.chance(0.5)
        )
        marked = f"<tool_call>\n{body}\n</tool_call>"
        return self.one(body, body, f"<think>\nwhy\n</think>\n\n{body}", marked, f"hm {marked}")

    def tools(self) -> str:
        """Function schemas as JSON; also none."""
        schema: dict[str, Any] = {
            "a": {"type": "string", "description": "the a", "enum": ["u", "v"]},
            "b": {"type": "array", "items": {"type": "string"}},
        }
        bare = {
            "name": "get_x",
            "description": "é",
            "parameters": {"type": "object", "properties": schema, "required": ["a"]},
        }
        wrapped = {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
        }
        return self.one("", "[]", json.dumps([bare]), json.dumps([bare, wrapped], ensure_ascii=False))

    def alpaca(self) -> dict[str, Any]:
        """A row of alpaca."""
        history = [[self.text(), self.answer()] for _ in range(self.one(0, 1, 2, 3))]
        return {
            "instruction": self.one(self.text(), "", None), "input": self.one("", self.text(), None), "output": self.answer(),
            "system": self.one("", self.text(), None), "history": self.one(None, history),
        }  # fmt: skip

    def turns(self, *, answered: bool = True, most_calls: int = 0) -> list[dict[str, str]]:
        """The turns of a ShareGPT row."""
        found: list[dict[str, str]] = []
        for last in (*[False] * self.one(0, 0, 1, 2, 3), True):
            after_call = bool(found) and found[-1]["from"] == "function_call"
            found.append({"from": "observation" if after_call else "human", "value": self.text()})
            if last and not answered:
                break
            calls = bool(most_calls) and self.chance(0.4)
            found.append(
                {"from": "function_call", "value": self.call(most_calls)}
                if calls
                else {"from": "gpt", "value": self.answer()}
            )
        return [{"from": "system", "value": self.text()}, *found] if self.chance(0.3) else found


_ALPACA = {"prompt": "instruction", "query": "input", "system": "system", "history": "history"}


def draw_jobs(seed: int, count: int) -> list[dict[str, Any]]:
    """`count` jobs of each template: three rows, settings, and the entry of a dataset_info.json for
    them.
    """
    from unisono.trainer.readers.llamafactory.template import template_names

    draw = Draw(seed)
    return [_draw_job(draw, name) for name in template_names() for _ in range(count)]


def _draw_job(draw: Draw, template: str) -> dict[str, Any]:
    kind = draw.one("alpaca", "talk", "talk", "pair", "alpaca pair", "rated", "alpaca rated", "text")
    options = {
        "cutoff_len": draw.one(8, 16, 24, 33, 64, 100, 200, 512, 2048),
        "enable_thinking": draw.one(True, False, None),
    }
    if kind in ("alpaca", "talk"):
        options |= draw.one({}, {}, {"mask_history": True}, {"train_on_prompt": True})
    if kind == "text":
        options["packing"] = False
    shape = {
        "alpaca": ("sft", draw.alpaca, {"columns": _ALPACA | {"response": "output"}}),
        "talk": (
            "sft",
            lambda: {"conversations": draw.turns(most_calls=1 if template in ("glm4", "chatglm3") else 3), "tools": draw.tools(), "system": draw.text()},
            {"formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools", "system": "system"}},
        ),
        "pair": (
            "rm",
            lambda: {"conversations": draw.turns(answered=False), **{name: {"from": "gpt", "value": draw.answer()} for name in ("chosen", "rejected")}},
            {"formatting": "sharegpt", "ranking": True, "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
        ),
        "alpaca pair": (
            "rm",
            lambda: draw.alpaca() | {"chosen": draw.answer(), "rejected": draw.answer()},
            {"ranking": True, "columns": _ALPACA | {"chosen": "chosen", "rejected": "rejected"}},
        ),
        "rated": (
            "kto",
            lambda: {"conversations": draw.turns(), "label": draw.chance(0.5)},
            {"formatting": "sharegpt", "columns": {"messages": "conversations", "kto_tag": "label"}},
        ),
        "alpaca rated": (
            "kto",
            lambda: draw.alpaca() | {"label": draw.chance(0.5)},
            {"columns": _ALPACA | {"response": "output", "kto_tag": "label"}},
        ),
        "text": ("pt", lambda: {"text": draw.text(20)}, {"columns": {"prompt": "text"}}),
    }  # fmt: skip
    stage, make, entry = shape[kind]
    return {"template": template, "kind": kind, "stage": stage, "options": options, "entry": entry, "rows": [make() for _ in range(3)]}  # fmt: skip


# ---- equality


def compare(python: str, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many jobs have the same tokens and the same loss; those that LLaMA-Factory fails on must
    have a bad row here.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "jobs.json", Path(folder) / "results.json"
        given.write_text(json.dumps({"tokenizer": str(_TOKENIZER), "jobs": jobs}), encoding="utf-8")
        subprocess.run([python, "-c", _REFERENCE, str(given), str(made)], check=True)
        theirs = json.loads(made.read_text(encoding="utf-8"))
    counts: Counter[str] = Counter()
    for job, result in zip(jobs, theirs, strict=True):
        ours, bad = encode(job)
        if "error" in result:
            counts["refused by both" if bad else "refused by LLaMA-Factory only"] += 1
        else:
            counts["equal" if ours == expected(job, result) else "different"] += 1
    return {"jobs": len(jobs), "rows": 3 * len(jobs)} | dict(sorted(counts.items()))


def expected(job: dict[str, Any], result: dict[str, Any]) -> list[Any]:
    """LLaMA-Factory's rows as tokens and loss."""
    if job["stage"] == "rm":
        parts = [
            _marked(result.get(f"{name}_input_ids", []), result.get(f"{name}_labels", []))
            for name in ("chosen", "rejected")
        ]
        return list(zip(*parts, strict=True))
    rows = _marked(result.get("input_ids", []), result.get("labels", result.get("input_ids", [])))
    if job["stage"] != "kto":
        return rows
    others = _marked(result.get("kl_input_ids", []), result.get("kl_labels", []))
    return list(zip(rows, others, result.get("kto_tags", []), strict=True))


def _marked(ids: list[list[int | None]], labels: list[list[int]]) -> list[Any]:
    return [
        (row, [place > 0 and label != -100 for place, label in enumerate(own)])
        for row, own in zip(ids, labels, strict=True)
    ]


def encode(job: dict[str, Any]) -> tuple[list[Any], bool]:
    """Our rows as tokens and loss, and whether a row is bad or the settings are refused."""
    from transformers import AutoTokenizer

    from unisono.base.errors import DataError
    from unisono.trainer.data import RowError
    from unisono.trainer.data.preference_rows import read_exchange
    from unisono.trainer.data.token_table import EncodedUnit
    from unisono.trainer.readers.llamafactory.encoder import LfEncoder
    from unisono.trainer.readers.llamafactory.template import find_lf_template

    options, kind = job["options"], job["kind"]
    loss_on: Any = "all" if options.get("train_on_prompt") else "last-answer" if options.get("mask_history") else "answers"  # fmt: skip
    template = find_lf_template(job["template"])
    assert template is not None
    try:
        encoder = LfEncoder(
            AutoTokenizer.from_pretrained(_TOKENIZER), template, loss_on=loss_on, thinking=options["enable_thinking"],
            cut_at=options["cutoff_len"], pretrain=kind == "text",
        )  # fmt: skip
    except DataError:
        return [], True
    name = {"alpaca": "alpaca", "talk": "sharegpt", "text": "text"}.get(kind, "preference")
    nothing = (
        {}
        if name != "preference"
        else dict.fromkeys(("tools",)) | ({"conversations": None} if "alpaca" in kind else {})
    )
    examples = [
        read_exchange(name, row, nothing, _TAGS if "conversations" in row else {}) for row in job["rows"]
    ]
    calls: dict[str, Any] = {"rm": encoder.encode_pairs, "kto": encoder.encode_ratings}
    found: list[Any] = calls.get(job["stage"], encoder.encode)(examples)
    good = [row for row in found if not isinstance(row, RowError)]

    def shown(row: Any) -> Any:
        if isinstance(row, EncodedUnit):
            label = () if row.label is None else (row.label,)
            return *(shown(side) for side in row.sides), *label
        return [None if token < 0 else token for token in row.ids.tolist()], row.targets.tolist()

    return [shown(row) for row in good], len(good) < len(found)


# ---- speed


def measure(rows: int, pairs: int) -> dict[str, Any]:
    """Seconds of `unisono data preview` with our own encoder and with `lf:`, in pairs of fresh
    caches.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        shutil.copytree(_TOKENIZER, model)
        (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 2000}', encoding="utf-8")
        (model / "chat_template.jinja").write_text(_CHATML, encoding="utf-8")
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}))
        draw = Draw(0)
        with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(rows):
                row = {"instruction": draw.text(30), "output": draw.text(draw.one(30, 60, 120))}
                file.write(json.dumps(row) + "\n")
        found: dict[str, list[tuple[float, float]]] = {"null": [], "lf:qwen3_nothink": []}
        for _ in range(pairs):
            for template, times in found.items():
                times.append(_preview(folder, template))
    own, lf = found.values()
    return {
        "own_wall_s": statistics.median(wall for wall, _ in own), "own_cpu_s": statistics.median(cpu for _, cpu in own),
        "lf_wall_s": statistics.median(wall for wall, _ in lf), "lf_cpu_s": statistics.median(cpu for _, cpu in lf),
        "rate_ratio_wall": statistics.median(a / b for (a, _), (b, _) in zip(own, lf, strict=True)),
        "rate_ratio_cpu": statistics.median(a / b for (_, a), (_, b) in zip(own, lf, strict=True)),
    }  # fmt: skip


def _preview(folder: Path, template: str) -> tuple[float, float]:
    (folder / "config.yaml").write_text(
        f"model: {folder / 'model'}\ndata: {{train: {folder / 'rows.jsonl'}, template: {template},"
        " max_length: 4096}\noutput_dir: out\n",
        encoding="utf-8",
    )
    cache = folder / "cache"
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "unisono", "data", "preview", str(folder / "config.yaml"), "--rows", "1"],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)}, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(cache)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()

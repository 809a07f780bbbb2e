"""Rows and tokens a second of the data path: the first start (tokenizing) and the second (mapping
the cache).

Run: .venv/bin/python bench/data.py [ROWS] Writes bench/results/data.json. One thread; times are CPU
seconds of the process, wall seconds beside them. After the two starts, the tokenizers library alone
encodes the same texts, with offsets, a thousand rows at a time: the most that a first start can
come to.
"""

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "data.json"

CHILD = """
import json, resource, sys, time
from pathlib import Path
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data.prepare import prepare_data
from unisono.base.events import Reporter
config = RunConfig.model_validate(json.loads(sys.argv[1]))
if sys.argv[4] == "first":
    from transformers import AutoTokenizer  # its import is not the data path's
began, cpu = time.perf_counter(), time.process_time()
summary = prepare_data(config, tokenizer=Path(sys.argv[2]), vocab_size=None, cache_dir=Path(sys.argv[3]), report=Reporter(None))
print(json.dumps({
    "wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "hit": summary.cache_hit, "rows": summary.train.rows,
    "tokens": summary.train.tokens, "full": summary.train.tokens / summary.train.sequences / config.data.max_length,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""

LIBRARY = """
import json, sys, time
from pathlib import Path
from tokenizers import Tokenizer
backend = Tokenizer.from_file(str(Path(sys.argv[1]) / "tokenizer.json"))
turns = "<|im_start|>{role}\\n{content}<|im_end|>\\n"
texts = ["".join(turns.format(**turn) for turn in json.loads(line)["messages"]) for line in Path(sys.argv[2]).open(encoding="utf-8")]
began, cpu, tokens = time.perf_counter(), time.process_time(), 0
for first in range(0, len(texts), 1000):
    for encoding in backend.encode_batch(texts[first : first + 1000], add_special_tokens=False):
        tokens += len(encoding.ids)
print(json.dumps({"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "tokens": tokens}))
"""


def make_words(draw: random.Random) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(6000)]


def write_rows(path: Path, rows: int) -> None:
    """Instruction rows of log-normal length, words by Zipf's law."""
    draw = random.Random(0)
    words = make_words(draw)
    weights = [1 / (rank + 1) for rank in range(len(words))]
    with path.open("w", encoding="utf-8") as out:
        for _ in range(rows):
            length = min(900, max(8, round(draw.lognormvariate(4.6, 0.6))))
            text = draw.choices(words, weights, k=length)
            half = length // 2
            row = [
                {"role": "user", "content": " ".join(text[:half])},
                {"role": "assistant", "content": " ".join(text[half:])},
            ]
            out.write(json.dumps({"messages": row}) + "\n")


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 8,192 tokens with a ChatML template, made from rows of the same kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(1)
    words = make_words(random.Random(0))
    weights = [1 / (rank + 1) for rank in range(len(words))]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator((" ".join(draw.choices(words, weights, k=200)) for _ in range(3000)), trainer)
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%"
        " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template
    ).save_pretrained(folder)


def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", rows)
        write_tokenizer(folder / "tokenizer")
        config = {
            "model": "m",
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 1024, "too_long": "cut"},
            "output_dir": "o",
        }
        environment = {
            **os.environ,
            "RAYON_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        found = {}
        for start in ("first", "second"):
            command = [
                sys.executable,
                "-c",
                CHILD,
                json.dumps(config),
                str(folder / "tokenizer"),
                str(folder / "cache"),
                start,
            ]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[start] = json.loads(done.stdout.splitlines()[-1])
        command = [sys.executable, "-c", LIBRARY, str(folder / "tokenizer"), str(folder / "rows.jsonl")]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        library = json.loads(done.stdout)
        first, second = found["first"], found["second"]
        assert (first["hit"], second["hit"]) == (False, True)
        report = {
            "schema": 1, "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread",
            "rows": first["rows"], "tokens": first["tokens"], "bytes": (folder / "rows.jsonl").stat().st_size, "packed_full": first["full"],
            "first_start": {
                "cpu_s": first["cpu_s"], "wall_s": first["wall_s"], "tokens_per_cpu_second": first["tokens"] / first["cpu_s"],
                "rows_per_cpu_second": first["rows"] / first["cpu_s"], "peak_bytes": first["peak_bytes"],
            },
            "tokenizers_alone": {"cpu_s": library["cpu_s"], "tokens_per_cpu_second": library["tokens"] / library["cpu_s"]},
            "first_start_to_tokenizers_alone": first["tokens"] / first["cpu_s"] / (library["tokens"] / library["cpu_s"]),
            "second_start": {"cpu_s": second["cpu_s"], "wall_s": second["wall_s"], "peak_bytes": second["peak_bytes"]},
        }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)

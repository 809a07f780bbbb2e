"""The commands of tutorials and how-tos work: those that can run here are run, as a reader would
type them, and the others name the tests that run them.

Run: pytest tests/docs/test_commands_run.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from page_checks import BLOCK
from tests import front_server

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("tutorial/*.md"), *DOCS.glob("how-to/**/*.md"), DOCS / "reference" / "faq.md"])
EXAMPLES = ROOT / "examples" / "data"

STEPS: list[tuple[str, set[int]]] = [
    ("init --data data/train.jsonl --out train.yaml", {0}),
    ("data preview train.yaml", {0}),
    ("train train.yaml --dry-run", {0}),
    ("train train.yaml --rehearse", {0}),
    ("--version", {0}),
    ("doctor", {0, 6}),  # 6: of this machine
    ("doctor train.yaml", {0, 6}),
    ("doctor train.yaml --strict", {0, 6}),
    ("doctor train.yaml --ladder", {0, 6}),
    ("doctor --ladder --nproc 2", {0, 6}),
    ("train train.yaml", {0}),
    ("eval runs/lora --data data/test.jsonl", {0}),
    ('generate runs/lora "Where is my parcel?"', {0}),
    ("chat runs/lora", {0}),
    ("export runs/lora my-model --merge", {0}),
    ("train train.yaml optim.lr=1e-4 output_dir=runs/lr-1e-4", {0}),
    ("train train.yaml optim.lr=5e-5 output_dir=runs/lr-5e-5", {0}),
    ("train train.yaml --reason NCCL_P2P_DISABLE='hangs on these boards, ticket 4711'", {2}),  # the run is finished
    ("explain NCCL_P2P_DISABLE", {0}),
    ("init --from-llamafactory qwen3_lora_sft.yaml", {0}),
    ("data preview qwen3_lora_sft.yaml --rows 3", {0}),
    ("train qwen3_lora_sft.yaml", {0}),
    ("train qwen3_lora_sft.yaml learning_rate=2e-5 max_samples=100 --nproc 2", {2}),  # the run has another config
    ("train reward.yaml", {0}),
    ("eval runs/reward --data pairs.jsonl", {0}),
    ("eval runs/reward --data pairs.jsonl --out rewards.jsonl", {0}),
    ("export runs/reward OUT --merge", {0}),
    ("train labels.yaml", {0}),
    ("eval runs/labels --data labels-test.jsonl", {0}),
    ("eval runs/labels --data labels-test.jsonl --out labels.jsonl", {0}),
    ("export runs/labels my-classifier --merge", {0}),
    ("train embed.yaml", {0}),
    ("eval runs/embed --data similar.jsonl", {0}),
    ("export runs/embed my-embedder --merge", {0}),
    ("diagnose train.log", {0}),
    ("diagnose logs/", {0}),
    ("diagnose runs/first", {0}),
    ("diagnose logs/ --timeline --all", {0}),
    ("diagnose hang.md", {0}),
    ("diagnose hang_zh.md", {0}),
    ("init --data hours.csv --out hours.yaml", {0}),
    ("data preview hours.yaml --rows 2", {0}),
    ("train hours.yaml --dry-run", {0}),
    ("train hours.yaml", {0}),
    ('generate runs/hours "When does the pool open on Friday?"', {0}),
    ("chat runs/hours", {0}),
    ("eval runs/hours --data hours-test.csv --out answers.jsonl", {0}),
    ("export runs/hours hours-model --merge", {0}),
    ("init --from-llamafactory lora_sft.yaml", {0}),
    ("data preview lora_sft.yaml --rows 1 model_name_or_path=builtin:tiny template=default", {0}),
    ("train lora_sft.yaml model_name_or_path=builtin:tiny template=default bf16=false learning_rate=4.0e-3 num_train_epochs=10", {0}),
    ("train lora_sft.yaml", {0}),
    ('generate saves/hours "When does the pool open on Friday?"', {0}),
    ("export saves/hours lf-model --merge", {0}),
    ("train qlora-8b.yaml --dry-run", {0}),
    ("train qlora-8b.yaml --rehearse", {0}),
    ("train qlora-8b.yaml", {0}),
    ("train train.yaml --nproc 4", {2}),  # the run is finished
    ("train train.yaml batch.micro=1 memory.gradient_checkpointing=true", {2}),
    ("data preview train.yaml --rows 3", {0}),
    ("drill --list", {0}),
    ("train examples/demo.yaml output_dir=runs/small adapter.rank=2 duration='4 epochs'", {0}),
    ("chat runs/demo", {0}),
    ("train examples/demo.yaml", {2}),  # as the tutorial says: it is finished
]  # fmt: skip
"""Each command in a folder that is prepared as the pages ask for, and its exit codes."""

ELSEWHERE = {
    r"^studio": "tests/front/studio/test_page.py",
    r"--launcher slurm|^srun ": "tests/jobs/slurm/test_jobs.py",
    r"--launcher ray": "tests/jobs/ray/test_faults.py",
    r"--hosts ": "tests/jobs/nodes/test_hosts.py",
    r"--nodes |NNODES=": "tests/jobs/nodes/test_lost_nodes.py",
    r"^run -- (torchrun|accelerate|python|llamafactory-cli)": "tests/guard/integrations/test_trainers.py",
    r"^run -- deepspeed": "docs/how-to/run/deepspeed.md",  # was not tried, and says so
    r"--devices |CUDA_VISIBLE_DEVICES=": "tests/jobs/runs/test_topology.py",
    r"^drill": "tests/front/drill/test_drills.py",
    r"^diagnose nccl_trace_rank": "tests/guard/diagnosis/test_cases.py",
    r"^serve ": "tests/front/serve/test_serve.py",
    r"\d\.toml|^(generate|export) runs/aki |^export aki/": "tests/trainer/diffusion/test_commands.py",
    r"^eval .*--reward": "tests/front/talk/test_reward_evaluation.py",
    r"^eval runs/my-run": "tests/trainer/training/test_answer_metrics.py",
    r"pictures\.yaml|runs/pictures": "tests/trainer/vision/test_commands.py",
    r"--trust-code$": "tests/front/api/test_own_objective.py",
    r"^board ": "tests/front/board/test_server.py",
    r"^runs": "tests/front/board/test_list.py",
    r"^download ": "tests/front/hub/test_download.py",
    r"^push ": "tests/front/hub/test_push.py",
    r"^completion ": "tests/front/cli/test_completion.py",
    r"--format gguf": "tests/front/talk/test_gguf.py",
    r"--format (kohya|diffusers)|--out pictures|\.toml\b|^train train\.sh": (
        "tests/trainer/diffusion/test_commands.py"
    ),
}
"""Commands that need a cluster, another program or a server, and the tests of what they start."""


def shown_commands() -> dict[str, str]:
    """Each command of unisono in a block of a page, without comment and prompt, and the page."""
    found = {}
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text("utf-8")):
            for line in body.splitlines() if language in ("", "bash", "console") else ():
                line = re.sub(r" +#.*", "", line.strip())  # noqa: PLW2901 - without its comment
                if command := re.match(
                    r"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:srun \S+ )?)(?:\.venv/bin/)?unisono (.+)", line
                ):
                    found[command[1] + command[2]] = str(page.relative_to(ROOT))
    return found


def test_every_command_that_a_page_shows_is_run_here_or_by_a_named_test() -> None:
    run = {command for command, _ in STEPS}
    for command, page in shown_commands().items():
        places = [place for pattern, place in ELSEWHERE.items() if re.search(pattern, command)]
        assert command in run or places, f"{page}: unisono {command}"
    assert all((ROOT / place).exists() for place in ELSEWHERE.values())


def prepare(folder: Path) -> None:
    """What the pages ask for: rows, logs, configs."""
    rows = [json.loads(line) for line in (EXAMPLES / "train.jsonl").read_text().splitlines()[:64]]
    talks = [{"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]} for row in rows]  # fmt: skip
    for name, part in {"train": talks[:48], "test": talks[48:]}.items():
        path = folder / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(talk) + "\n" for talk in part))
    pairs = (EXAMPLES / "pairs-heldout.jsonl").read_text().splitlines()[:40]
    (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
    small = {"model": "builtin:tiny", "duration": "2 steps", "batch": {"global": 4}}
    reward = small | {"objective": "reward", "data": {"train": "pairs.jsonl", "eval": 0.2, "max_length": 256}, "eval": {"every": "2 steps", "samples": 0}, "output_dir": "runs/reward"}  # fmt: skip
    (folder / "reward.yaml").write_text(yaml.safe_dump(reward))
    texts = [{"text": row["prompt"], "label": ("short", "long")[len(row["prompt"]) > 60]} for row in rows]  # fmt: skip
    for name in ("rows-with-labels.jsonl", "labels-test.jsonl"):
        (folder / name).write_text("".join(json.dumps(text) + "\n" for text in texts))
    labels = small | {"objective": "classify", "data": {"train": "rows-with-labels.jsonl", "eval": 0.2, "max_length": 256}, "classify": {"labels": ["short", "long"]}, "output_dir": "runs/labels"}  # fmt: skip
    (folder / "labels.yaml").write_text(yaml.safe_dump(labels))
    similar = [{"anchor": row["prompt"], "positive": row["completion"]} for row in rows]
    (folder / "similar.jsonl").write_text("".join(json.dumps(row) + "\n" for row in similar))
    embed = small | {"objective": "embed", "data": {"train": "similar.jsonl", "eval": 0.2, "max_length": 256}, "output_dir": "runs/embed"}  # fmt: skip
    (folder / "embed.yaml").write_text(yaml.safe_dump(embed))
    theirs = {
        "model_name_or_path": "my-model", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 4, "dataset": "mine", "dataset_dir": "lf",
        "template": "default", "cutoff_len": 256, "output_dir": "saves", "max_steps": 2, "per_device_train_batch_size": 2,
    }  # fmt: skip
    (folder / "qwen3_lora_sft.yaml").write_text(yaml.safe_dump(theirs))
    (folder / "lf").mkdir()
    (folder / "lf" / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json"}}))
    (folder / "lf" / "rows.json").write_text(json.dumps([{"instruction": r["prompt"], "input": "", "output": r["completion"]} for r in rows]))  # fmt: skip
    (folder / "logs").mkdir()
    log = (
        '[rank1]: Traceback (most recent call last):\n  File "train.py", line 8, in <module>\n[rank1]:'
        " KeyError: 'labels'\n"
    )
    for name in ("train.log", "logs/rank_1.log"):
        (folder / name).write_text(log)
    (folder / "hang.md").write_text("Training hangs on two nodes.\n\nAfter the checkpoint shards are loaded nothing happens, and nvidia-smi shows 100 % on all GPUs.\n")  # fmt: skip
    (folder / "hang_zh.md").write_text(
        "单机四卡训练，数据处理完之后就卡住了，一直没有反应，GPU 利用率 100 %。\n"
    )
    (folder / "examples").symlink_to(ROOT / "examples")
    prepare_new_pages(folder)


def block(page: str, language: str, start: str = "") -> str:
    """The first block of a page in this language that begins so."""
    bodies = BLOCK.findall((DOCS / page).read_text("utf-8"))
    return next(body for found, body in bodies if found == language and body.startswith(start))


def prepare_new_pages(folder: Path) -> None:
    """The files that pages show whole: a script that writes rows, configs; with small models."""
    script = folder / "make_rows.py"
    script.write_text(block("tutorial/csv-to-chat.md", "python", "# make_rows.py"))
    subprocess.run([sys.executable, script], cwd=folder, check=True)
    page = "tutorial/llamafactory-in-five-minutes.md"
    text = block(page, "yaml", "# lora_sft.yaml")  # the small model lacks the tokens of Qwen's template
    (folder / "lora_sft.yaml").write_text(text.replace("qwen3_nothink", "default"))
    (folder / "data" / "dataset_info.json").write_text(block(page, "json", '{"hours"'))
    (folder / "data" / "hours.json").write_text(json.dumps(json.loads(block(page, "json", "["))[:2] * 9))
    shutil.copytree(ROOT / "src" / "unisono" / "builtin" / "tiny", folder / "Qwen" / "Qwen3-4B-Instruct-2507")
    config = yaml.safe_load(block("how-to/7b-on-24gb.md", "yaml", "# qlora-8b.yaml"))
    config["model"]["path"] = "builtin:tiny"
    config |= {"duration": "2 steps", "batch": {"global": 2}}
    (folder / "qlora-8b.yaml").write_text(yaml.safe_dump(config))
    (folder / "rows.jsonl").write_text((folder / "data" / "train.jsonl").read_text())


@pytest.mark.long
@pytest.mark.ranks
def test_the_commands_of_tutorials_and_how_tos_run(tmp_path: Path) -> None:
    prepare(tmp_path)
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "keys"), "OMP_NUM_THREADS": "1"}  # fmt: skip
    for command, codes in STEPS:
        words = [word.strip("'\"") if not re.search(r"=['\"]", word) else re.sub(r"['\"]", "", word) for word in re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", command)]  # fmt: skip
        if command.startswith(
            "train examples/demo.yaml output_dir"
        ):  # steps instead of epochs: the same path, in seconds
            words[-1] = "duration=2 steps"
        if command == "chat runs/demo":
            shutil.copytree(tmp_path / "runs" / "small", tmp_path / "runs" / "demo")
        done = front_server.run(
            [sys.executable, "-m", "unisono", *words], cwd=tmp_path, env=env, input="", timeout=300
        )
        assert done.returncode in codes, f"unisono {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if command.startswith("init --data data/"):
            config = yaml.safe_load((tmp_path / "train.yaml").read_text())
            config |= {"model": "builtin:tiny", "duration": "2 steps", "batch": {"global": 4}}
            config["data"]["eval"] = 0.1
            (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
        if command.startswith("init --data hours.csv"):
            config = yaml.safe_load((tmp_path / "hours.yaml").read_text())
            for key, value in yaml.safe_load(block("tutorial/csv-to-chat.md", "yaml")).items():
                config[key] = config[key] | value if isinstance(value, dict) else value
            (tmp_path / "hours.yaml").write_text(yaml.safe_dump(config | {"duration": "2 steps"}))
        if command == "train train.yaml":
            shutil.copytree(tmp_path / "runs" / "lora", tmp_path / "runs" / "first")

"""No secret of a log is printed, whatever stands around it.

Run: pytest tests/guard/diagnosis/test_redaction.py
"""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.diagnosis.lines import SHOWN_CHARS, redacted, shown
from unisono.guard.diagnosis.scan import scan

# Put together here, so that nobody's scanner takes this file for a leak.
BODY = "Zq7Rw2Xk9Lm4Tn8Vb3Yc6Hd1"
SHAPED = (
    "hf_" + BODY, "sk-" + BODY, "sk-proj-" + BODY, "sk-ant-api03-" + BODY, "ghp_" + BODY + BODY, "github_pat_" + BODY, "glpat-" + BODY, "AKIA" + "IOSFODNN7UNISON1", "ASIA" + "IOSFODNN7UNISON2",
    "xoxb-" + "123456789012-" + BODY, "AIza" + BODY + "AbCdEfGhIjK", "nvapi-" + BODY, "eyJ" + BODY + "." + BODY + "." + BODY, "pypi-" + BODY + BODY,
)  # fmt: skip
NAMED = (
    "WANDB_API_KEY={}", "export HF_TOKEN={}", "HUGGING_FACE_HUB_TOKEN: {}", 'os.environ["OPENAI_API_KEY"] = "{}"', "{{'api_key': '{}', 'model': 'x'}}", '{{"token": "{}"}}', "AWS_SECRET_ACCESS_KEY={}", "aws_secret_access_key = {}",
    "AWS_SESSION_TOKEN={}", "train.py --token {} --lr 1e-4", "train.py --hub_token={}", "cmd = ['x', '--wandb-api-key', '{}']", "--api-key {}", "password: {}", "MYSQL_PWD={}", "DB_PASS={}", "Authorization: Bearer {}",
    "-H 'authorization: token {}'", "{{'Authorization': 'Basic {}'}}", "X-Auth-Token: {}", "Cookie: session={}", "wandb login {}", "wandb login --relogin {}", "sshpass -p {} ssh node", "https://user:{}@host/x", "https://{}@github.com/a/b",
    "postgresql://me:{}@db:5432/x", "redis://:{}@h:1", "https://h/x?access_token={}&a=1", "https://h/x?X-Amz-Signature={}", "https://h/x?sig={}", "UNISONO_TOKEN={}", "AccountKey={};", "client_secret={}", "MASTER_SECRET: '{}'", "https://me:p@{}@h/",
)  # fmt: skip
AROUND = (
    "{}",
    "[rank3]: {}",
    "(RayTrainWorker pid=1, ip=10.0.0.1) {} and more",
    "\x1b[31m{}\x1b[0m",
    "Traceback: {}",
    "x={}",
)
HARMLESS = (
    "tokens: 4096, num_tokens=12345678, max_new_tokens=128, tokens_per_second: 11.5", "pad_token: '<|endoftext|>', eos_token='</s>', bos_token = <s>", "'pad_token_id': 151643, 'image_token': 'IMAGE_PLACEHOLDER'",
    "tokenizer: Qwen/Qwen3-0.6B, --tokenizer_name Qwen/Qwen3", "Setting `pad_token_id` to `eos_token_id`:128001 for open-end generation.", "torch.distributed.elastic: [rank0]: keys=12 passed=4", "https://github.com/pytorch/pytorch/issues/1234?x=1",
    "--max_tokens 4096 --token_type bert", "HF_TOKEN is not set", "token: None", "use_auth_token=True", "ask me@example.org, s3://bucket/runs", "pwd=/home/u/run, PWD=/home/u", "the token was refused", "num_key_value_heads=8, key=value, monkey: banana",
    "Bearer of bad news", "=" * 70, "Use `wandb login --relogin` to force relogin",
)  # fmt: skip


@pytest.mark.parametrize("secret", SHAPED)
def test_a_token_is_known_by_its_shape(secret: str) -> None:
    assert not [around for around in AROUND if secret in shown(around.format(secret))]


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize(
    "secret", ["correcthorsebattery", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "Ab+/12=xyzXYZ.~_-99"]
)
def test_a_secret_is_known_by_what_stands_before_it(named: str, secret: str) -> None:
    if "://" in named and "/" in secret:
        secret = secret.replace("/", "%2F")  # as URLs have it
    for around in AROUND:
        assert secret[:12] not in shown(around.format(named.format(secret)))


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_not_a_secret_stays(text: str) -> None:
    assert shown(text) == text


@given(st.text(max_size=60), st.sampled_from(SHAPED), st.text(max_size=60))
def test_a_token_between_any_words_is_not_shown(before: str, secret: str, after: str) -> None:
    assert secret not in redacted(f"{before} {secret} {after}")


def test_a_private_keys_lines_are_not_shown() -> None:
    assert redacted("MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj") == "…"


def test_a_token_is_not_cut_in_two_where_a_line_is_cut() -> None:
    for place in range(SHOWN_CHARS - 30, SHOWN_CHARS + 5):
        assert BODY[:8] not in shown("a " * (place // 2) + " " * (place % 2) + SHAPED[0])
        assert BODY[:8] not in shown("a " * (2 * place) + " " * (place % 4) + SHAPED[0])


@pytest.mark.parametrize(
    "unit",
    [
        "token",
        "token=",
        "a_",
        "--",
        "://",
        "://a",
        "sk-",
        "eyJa.",
        "password: '",
        "authorization: ",
        "x" * 40 + "=",
    ],
)
def test_no_text_takes_long(unit: str) -> None:
    began = time.process_time()
    redacted((unit * 100_000)[:100_000])
    assert time.process_time() - began < 5


def test_nothing_of_a_log_full_of_secrets_is_printed(tmp_path: Path) -> None:
    secrets = [f"{BODY}{number:03d}" for number in range(len(NAMED))]
    lines = [
        f"[rank0]: RuntimeError: {named.format(secret)}" for named, secret in zip(NAMED, secrets, strict=True)
    ]
    lines += [f"[rank1]: ValueError: refused {secret}" for secret in SHAPED]
    body = (
        '[rank0]: Traceback (most recent call last):\n[rank0]:   File "t.py", line 3, in f\n'
        + "\n".join(lines)
        + "\n"
    )
    (tmp_path / "train.log").write_text(
        f"torchrun train.py --token {BODY}\n{body}Process rank: 0, world size: 2\n{body}"
    )
    for words in ((), ("--json",)):
        command = [sys.executable, "-m", "unisono", "diagnose", str(tmp_path), "--all", "--timeline", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        for secret in (*secrets, *SHAPED, BODY):
            assert secret not in done.stdout + done.stderr
        if words:
            json.loads(done.stdout)


def test_a_colour_that_lost_its_first_character_hides_no_token() -> None:
    assert BODY not in redacted("[31m [0mhf_" + BODY)


def test_a_log_in_utf_16_without_its_mark_is_read() -> None:
    log = f"[rank1]: KeyError: 'labels' hf_{BODY}\n" * 3
    found = scan("x.log", io.BytesIO(log.encode("utf-16-be")))
    assert {event.who.rank for event in found.events} == {1}
    assert not any(BODY in event.text for event in found.events)

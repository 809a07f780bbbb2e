"""Other programs' texts lose what is a secret by its looks.

Run: pytest tests/guard/facts/test_redaction.py
"""

import pytest

from unisono.base.text import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('cannot connect: "http://me:hunter2@host:9/b?list-type=2"', 'cannot connect: "http://…@host:9/b?list-type=2"'),
        ("https://hf_token@host/x", "https://…@host/x"),
        ("https://host/x?a=1&X-Amz-Signature=abc&b=2", "https://host/x?a=1&X-Amz-Signature=…&b=2"),
        ("https://host/x?sig=abc", "https://host/x?sig=…"),
        ("the key AKIAUNISONOTESTS1234 is unknown", "the key … is unknown"),
        ("s3://bucket/runs, ask me@example.org", "s3://bucket/runs, ask me@example.org"),
        ("https://host/@scope/name", "https://host/@scope/name"),
    ],
)  # fmt: skip
def test_a_secret_in_a_text_is_veiled_and_nothing_else(text: str, shown: str) -> None:
    assert redact(text) == shown

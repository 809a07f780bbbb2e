"""Pieces of a stream are the text, no more and no less. Run: pytest tests/front/talk/test_decoding.py"""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.trainer.task.inference import StopStrings, TextStream, cut_at_stop, decode

SETTINGS = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
STOPS = st.lists(st.text(alphabet="abé😀 ", min_size=1, max_size=4), max_size=3)


@SETTINGS
@given(st.text(alphabet="abcé日😀 \n", max_size=30), STOPS)
def test_the_pieces_of_an_answer_are_its_text_up_to_its_first_stop(
    make_tokenizer: Callable[[], Any], text: str, stops: list[str]
) -> None:
    tokenizer = make_tokenizer()
    stream, is_done = TextStream(tokenizer, stops), StopStrings(tokenizer, stops)
    answer: list[int] = []
    pieces = []
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        answer.append(token)
        pieces.append(stream.push(token))
        if is_done(0, answer):
            break
    assert "".join(pieces) + stream.close() == cut_at_stop(decode(tokenizer, answer), stops)


@SETTINGS
@given(st.lists(st.integers(0, 299), max_size=30))
def test_the_pieces_of_any_tokens_are_what_they_decode_to(
    make_tokenizer: Callable[[], Any], ids: list[int]
) -> None:
    tokenizer = make_tokenizer()
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.close() == decode(tokenizer, ids)


@SETTINGS
@given(
    st.text(alphabet="abé😀 ", max_size=20),
    st.lists(st.text(alphabet="abé😀 ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_an_answer_ends_at_the_token_that_completes_a_stop(
    make_tokenizer: Callable[[], Any], text: str, stops: list[str]
) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    is_done = StopStrings(tokenizer, stops)
    for length in range(1, len(ids) + 1):
        so_far = decode(tokenizer, ids[:length])
        assert is_done(0, ids[:length]) == (cut_at_stop(so_far, stops) != so_far)
        if is_done(0, ids[:length]):
            break

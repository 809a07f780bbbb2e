"""llama.cpp by its package llama-cpp-python, where it is installed.

Without torch: a fresh process imports this alone.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

_F32 = 0  # of ggml_type
_CONTEXT = 64  # tokens


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("llama_cpp") is not None


def tokens(file: str, texts: Sequence[str]) -> list[list[int]]:
    """The tokens into which llama.cpp splits texts, without those that it adds at the beginning.

    Args:
        file: in the format GGUF.
        texts: in which special tokens are recognized.

    Raises:
        ValueError, RuntimeError: if llama.cpp cannot load the file.
    """
    from llama_cpp import Llama

    model = Llama(file, vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


def last_logits(file: str, rows: Sequence[Sequence[int]], count: int) -> list[Any]:
    """The logits that llama.cpp gives on a CPU with a cache in float32.

    It aborts the process where it has no answer.

    Args:
        file: in the format GGUF.
        rows: tokens, at most 64 of each.
        count: of tokens at the end of a row whose logits are wanted, K.

    Returns:
        for each row a float32 array (K, V), with V tokens of the vocabulary.

    Raises:
        ValueError, RuntimeError, AssertionError: if llama.cpp cannot load the file, or compute.
    """
    from llama_cpp import Llama

    model = Llama(
        file, n_ctx=_CONTEXT, n_batch=_CONTEXT, logits_all=True, type_k=_F32, type_v=_F32, verbose=False
    )
    logits = []
    for row in rows:
        model.reset()
        model.eval(row)
        logits.append(model.scores[max(0, len(row) - count) : len(row)].copy())
    return logits

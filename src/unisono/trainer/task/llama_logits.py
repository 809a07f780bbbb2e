"""The logits that llama.cpp itself computes from a GGUF file, where llama-cpp-python is installed:
they must be those of the model in it.

Tensors that were stored as they were may still be another model there: llama.cpp takes what
config.json has no field for from its own code.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from unisono.base.errors import IntegrityError
from unisono.base.text import library_words, show_bytes
from unisono.guard.facts.limits import available_memory
from unisono.guard.integrations.llama_cpp import is_installed, last_logits, tokens
from unisono.trainer.model.result_logits import KEPT, ResultLogits
from unisono.trainer.task.read_back import ReadBack

T = TypeVar("T")

_ROOM = 1.3  # times the file: buffers of loading, and of three rows
_TOLERANCE = {"f32": 1e-2, "bf16": 3e-2, "f16": 3e-2}
"""Largest difference per dtype, like model.result_outputs.TOLERANCE: llama.cpp has GELU as a table
of f16, and rounds what it multiplies with 16-bit weights.
"""


def read_in_llama_cpp(file: Path, wanted: ResultLogits, *, dtype: str) -> ReadBack:
    """Loads a GGUF file in llama.cpp, and compares its logits.

    Args:
        file: of a whole model.
        wanted: of the model that was written.
        dtype: of its matrices: f32, f16 or bf16.

    Raises:
        IntegrityError: if llama.cpp does not load it, or computes something else.
    """
    if not is_installed():
        return ReadBack("tensors", "llama-cpp-python is not installed")
    needed, free = int(_ROOM * file.stat().st_size), available_memory()
    if needed > free:  # the kernel would end its process, which says nothing about the file
        return ReadBack(
            "tensors", f"loading it takes {show_bytes(needed)} of memory, and {show_bytes(free)} are free"
        )
    outputs = _in_a_process(file, lambda pool: pool.submit(last_logits, str(file), wanted.rows, KEPT))
    logits = replace(wanted, outputs=[torch.tensor(one) for one in outputs])
    difference, tolerance = wanted.difference(logits), _TOLERANCE[dtype]
    if not difference <= tolerance:
        why = (
            f"its logits differ by {difference:.2g} of their spread; rounding in {dtype} explains"
            f" {tolerance:.2g}"
        )
        raise _refused(file, why)
    return ReadBack("logits", "", difference, tolerance)


def tokens_in_llama_cpp(file: Path, texts: Sequence[str]) -> list[list[int]] | None:
    """The tokens of texts in llama.cpp, as in `guard.integrations.llama_cpp.tokens`; None without
    llama-cpp-python.

    Raises:
        IntegrityError: if llama.cpp does not load the file.
    """
    if not is_installed():
        return None
    return _in_a_process(file, lambda pool: pool.submit(tokens, str(file), texts))


def _in_a_process(file: Path, submit: "Callable[[ProcessPoolExecutor], Future[list[T]]]") -> list[T]:
    """What a separate process computes: llama.cpp aborts its process where it has no answer."""
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return submit(pool).result()
    except BrokenProcessPool as error:
        raise _refused(file, "llama.cpp cannot load it: it ended its process") from error
    except Exception as error:  # llama-cpp-python raises ValueError, RuntimeError and AssertionError
        raise _refused(file, f"llama.cpp cannot load it: {library_words(error)}") from error


def _refused(file: Path, why: str) -> IntegrityError:
    return IntegrityError.of(
        "llama.cpp does not compute the model that was written",
        where=file.name,
        why=why,
        fix=(
            "nothing was written. If it is too old for this model, update llama-cpp-python, or add"
            " --no-read-back; else please report it with the model's config.json"
        ),
    )

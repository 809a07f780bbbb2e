"""llama.cpp as a library, through its C interface: `Llama(file)` gives logits and tokens of a GGUF
file.

The library is that of the package @node-llama-cpp/linux-x64 of npm, which `make system` installs;
neither node nor a compiler is needed.
"""

import ctypes
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

PACKAGE, VERSION = "@node-llama-cpp/linux-x64", "3.22.1"
_PLACES = (Path(sys.prefix), Path("/usr/local"), Path("/usr"))
"""Where `npm install --global --prefix` puts packages, in lib/node_modules."""
_F32, _F16 = 0, 1  # of ggml_type
# Places in llama_context_params, in units of 4 bytes.
_N_CTX, _N_BATCH, _N_UBATCH, _N_THREADS, _N_THREADS_BATCH, _FLASH_ATTENTION, _TYPE_K, _TYPE_V = 0, 1, 2, 7, 8, 13, 26, 27  # fmt: skip
_DEFAULTS = {_N_CTX: 512, _N_BATCH: 2048, _N_UBATCH: 512, _N_THREADS: 4, _N_THREADS_BATCH: 4, _FLASH_ATTENTION: -1, _TYPE_K: _F16, _TYPE_V: _F16}  # fmt: skip


class _Params(ctypes.Structure):
    """A structure of parameters, at least as long as it is there: it is passed in memory, where
    more at its end does no harm.
    """

    _fields_ = [("words", ctypes.c_int32 * 128)]


class _Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_said: list[str] = []


def _keep(_level: int, text: bytes, _data: object) -> None:
    _said.append(text.decode(errors="replace"))


_KEEP = _Log(_keep)  # as long as the library may call it


def find() -> Path | None:
    """The folder of the libraries; None where the package is not installed."""
    inside = f"lib/node_modules/{PACKAGE}/bins/linux-x64"
    return next((place / inside for place in _PLACES if (place / inside).is_dir()), None)


@functools.cache
def _library() -> ctypes.CDLL:
    folder = find()
    assert folder is not None
    (file,) = folder.glob("libllama.v*.so")
    (backends,) = folder.glob("libggml.v*.so")
    library = ctypes.CDLL(str(file))
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    kinds: dict[str, tuple[object, list[object]]] = {
        "llama_model_default_params": (_Params, []),
        "llama_context_default_params": (_Params, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _Params]),
        "llama_init_from_model": (pointer, [pointer, _Params]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (number, [pointer]),
        "llama_tokenize": (
            number,
            [
                pointer,
                ctypes.c_char_p,
                number,
                ctypes.POINTER(number),
                number,
                ctypes.c_bool,
                ctypes.c_bool,
            ],
        ),
        "llama_decode": (number, [pointer, _Batch]),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [pointer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_adapter_lora_init": (pointer, [pointer, ctypes.c_char_p]),
        "llama_set_adapters_lora": (
            number,
            [pointer, ctypes.POINTER(pointer), ctypes.c_size_t, ctypes.POINTER(ctypes.c_float)],
        ),
        "llama_log_set": (None, [_Log, pointer]),
        "llama_free": (None, [pointer]),
        "llama_model_free": (None, [pointer]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_KEEP, None)
    library.llama_backend_init()
    ctypes.CDLL(str(backends)).ggml_backend_load_all_from_path(str(folder).encode())
    words = library.llama_context_default_params().words
    found = {place: words[place] for place in _DEFAULTS}
    assert found == _DEFAULTS, f"{PACKAGE} is not {VERSION}: its parameters are laid out in another way"
    return library


class Llama:
    """A model of llama.cpp, on one thread, with a cache of keys and values in float32.

    Attributes:
        vocabulary: the number of tokens.
    """

    def __init__(self, file: Path | str, *, lora: Path | str | None = None, context: int = 256) -> None:
        self._library = library = _library()
        _said.clear()
        self._model = library.llama_model_load_from_file(
            str(file).encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise OSError("".join(_said)[-2000:])
        params = library.llama_context_default_params()
        wanted = {_N_CTX: context, _N_BATCH: context, _N_UBATCH: context, _N_THREADS: 1, _N_THREADS_BATCH: 1, _FLASH_ATTENTION: 0, _TYPE_K: _F32, _TYPE_V: _F32}  # fmt: skip
        for place, value in wanted.items():
            params.words[place] = value
        self._context = library.llama_init_from_model(self._model, params)
        assert self._context, "".join(_said)[-2000:]
        self._vocab = library.llama_model_get_vocab(self._model)
        self.vocabulary = int(library.llama_vocab_n_tokens(self._vocab))
        if lora is not None:
            adapter = library.llama_adapter_lora_init(self._model, str(lora).encode())
            assert adapter, "".join(_said)[-2000:]
            one = (ctypes.c_void_p * 1)(adapter), 1, (ctypes.c_float * 1)(1.0)
            assert library.llama_set_adapters_lora(self._context, *one) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text, without one at its beginning; `special`: names of control tokens in
        it are these tokens.
        """
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self._library.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, special)
        assert count >= 0
        return list(ids[:count])

    def reset(self) -> None:
        """Forgets all tokens."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def read(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits after each of some further tokens, (len(ids), vocabulary)."""
        count = len(ids)
        tokens, wanted = (ctypes.c_int32 * count)(*ids), (ctypes.c_int8 * count)(*[1] * count)
        assert self._library.llama_decode(self._context, _Batch(count, tokens, logits=wanted)) == 0
        found = self._library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, (count, self.vocabulary)).copy()

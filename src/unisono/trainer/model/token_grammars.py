"""Grammars over tokens, with llguidance: which tokens may come next in answers that must have a
form, e.g. that of a JSON schema.

Letters: R answers with a grammar, V vocabulary.
"""

import re
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

_THREADS = 1  # the model's own threads have the other cores
_NOTHING = "NoExtensionBias"  # llguidance's word for no token, and no end
_AT = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
INSTALL = "pip install 'unisono[serve]'"


class GrammarError(ValueError):
    """A grammar that cannot be used, or has been left."""


class TokenGrammars:
    """Compiles grammars for a tokenizer, and computes what they allow."""

    def __init__(self, tokenizer: Any, *, stop_ids: set[int], vocabulary: int) -> None:
        """Grammars for a tokenizer.

        Args:
            tokenizer: of transformers.
            stop_ids: tokens that end an answer.
            vocabulary: number of logits.
        """
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # of the two threads that may need the first one

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer of llguidance, which takes up to a second to make.

        Raises:
            GrammarError: if llguidance is not installed, or does not read the tokenizer.
        """
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise GrammarError(f"llguidance is not installed: {INSTALL}") from error
        try:
            return from_tokenizer(
                self._tokenizer, n_vocab=self._vocabulary, eos_token=sorted(self._stop_ids) or None
            )
        except Exception as error:  # of any kind, from Rust
            raise GrammarError(f"llguidance cannot read the model's tokenizer: {error}") from error

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(_THREADS)

    def check(self, grammar: str) -> None:
        """Compiles a grammar and forgets it.

        Raises:
            GrammarError: with the reason why it cannot be used.
        """
        matcher = self.compile(grammar).matcher
        matcher.compute_bitmask()
        if matcher.is_error():  # it has more alternatives in one place than llguidance follows
            raise GrammarError(_reason(matcher))

    def compile(self, grammar: str) -> "LLGrammar":
        """The grammar of one answer.

        Raises:
            GrammarError: with the reason why it cannot be used.
        """
        with self._lock:
            tokens = self._tokens
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return LLGrammar(matcher)

    def allow(self, logits: torch.Tensor, grammars: Sequence[Any]) -> None:
        """Sets logits (R, V) to -inf where the grammars do not allow the token, in place.

        Args:
            logits: float32.
            grammars: R of `compile`.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        masks = allocate_token_bitmask(len(grammars), self._vocabulary)  # (R, V / 32) int32
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        words = torch.from_numpy(masks).to(logits.device)
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (words[:, :, None] >> bits).bitwise_and_(1).flatten(1)[:, : logits.shape[1]]
        logits.masked_fill_(allowed == 0, -torch.inf)


class LLGrammar:
    """The grammar of one answer, at its newest token."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def take(self, token: int) -> None:
        """Continues after a token.

        Raises:
            GrammarError: if it was not allowed.
        """
        if not self.matcher.consume_token(token):
            raise GrammarError(f"the answer does not follow its form: {_reason(self.matcher)}")

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return bool(self.matcher.is_stopped())


def _reason(matcher: Any) -> str:
    """Why a matcher cannot go on, without the grammar, which llguidance shows beside it."""
    if matcher.get_error().startswith(_NOTHING):
        return "nothing can be written that satisfies it"
    text: str = matcher.get_error().partition("\n")[0].partition("<state>")[0]
    return _AT.sub("", text).strip() or "llguidance cannot follow it"

"""How near answers come to their references: pure functions of pairs of texts."""

import re
from collections.abc import Sequence

__all__ = ["Pair", "bleu", "exact_match", "rouge_l"]


Pair = tuple[str, str]
"""An answer, and its reference."""

# Runs of letters and digits; a character of a script that sets no spaces between words is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")


def exact_match(pairs: Sequence[Pair]) -> float:
    """The share of answers, 0 to 1, that are their reference but for white space at the ends."""
    assert pairs
    return sum(answer.strip() == reference.strip() for answer, reference in pairs) / len(pairs)


def rouge_l(pairs: Sequence[Pair]) -> float:
    """The mean over pairs, 0 to 1, of the F1 of the longest common subsequence of words (ROUGE-L, no stemming).

    On ASCII text it is what rouge-score gives; letters of other scripts, which rouge-score drops, are words, too.
    """
    from rouge_score.rouge_scorer import RougeScorer

    assert pairs
    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    return sum(_rouge_l(scorer, answer, reference) for answer, reference in pairs) / len(pairs)


def bleu(pairs: Sequence[Pair]) -> float:
    """BLEU of the whole corpus, 0 to 100, as sacrebleu gives it (13a tokens, exponential smoothing).

    A corpus in which no answer has four words scores 0, as BLEU counts runs of up to four.
    """
    from sacrebleu import corpus_bleu

    assert pairs
    score: float = corpus_bleu([answer for answer, _ in pairs], [[reference for _, reference in pairs]]).score
    return min(score, 100.0)  # rounding leads a hair beyond


class _Words:
    """The tokenizer that rouge-score asks for."""

    def tokenize(self, text: str) -> list[str]:
        """Words in lower case."""
        return _WORD.findall(text.lower())


def _rouge_l(scorer: "object", answer: str, reference: str) -> float:
    if answer.strip() == reference.strip():
        return 1.0  # also where there is no word in it, as in `{}`
    value: float = scorer.score(reference, answer)["rougeL"].fmeasure  # type: ignore[attr-defined]
    return value

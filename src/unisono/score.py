"""Scores of answers against references: exact match, ROUGE-L, BLEU. Pure functions of at least one pair of texts."""

import re
from collections.abc import Sequence

__all__ = ["Pair", "bleu", "exact_match", "rouge_l"]


Pair = tuple[str, str]
"""An answer and its reference."""

# Runs of letters and digits; in scripts without spaces between words every character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")


def exact_match(pairs: Sequence[Pair]) -> float:
    """The share of answers, 0 to 1, that equal their reference up to white space at the ends."""
    assert pairs
    return sum(answer.strip() == reference.strip() for answer, reference in pairs) / len(pairs)


def rouge_l(pairs: Sequence[Pair]) -> float:
    """The mean over pairs, 0 to 1, of the F1 of the longest common subsequence of words (ROUGE-L, no stemming).

    On ASCII text it equals rouge-score; letters of other scripts, which rouge-score drops, count as words, too.
    """
    from rouge_score.rouge_scorer import RougeScorer

    assert pairs
    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    return sum(_rouge_l(scorer, answer, reference) for answer, reference in pairs) / len(pairs)


def bleu(pairs: Sequence[Pair]) -> float:
    """BLEU of the corpus, 0 to 100, by sacrebleu (13a tokens, exponential smoothing).

    A corpus without any answer of four words scores 0, as BLEU counts n-grams of up to four words.
    """
    from sacrebleu import corpus_bleu

    assert pairs
    score: float = corpus_bleu([answer for answer, _ in pairs], [[reference for _, reference in pairs]]).score
    return min(score, 100.0)  # rounding can exceed it slightly


class _Words:
    """The tokenizer for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        """Words in lower case."""
        return _WORD.findall(text.lower())


def _rouge_l(scorer: "object", answer: str, reference: str) -> float:
    if answer.strip() == reference.strip():
        return 1.0  # also for texts without words, e.g. `{}`
    value: float = scorer.score(reference, answer)["rougeL"].fmeasure  # type: ignore[attr-defined]
    return value

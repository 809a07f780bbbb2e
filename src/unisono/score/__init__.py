"""How near answers come to their references: pure functions of pairs of texts."""

from unisono.score.text import Pair, bleu, exact_match, rouge_l

__all__ = ["Pair", "bleu", "exact_match", "rouge_l"]

"""What becomes of a row that is longer than max_length. Pure."""

from dataclasses import dataclass
from typing import Literal

from unisono.data.encode import Encoded

TooLong = Literal["error", "cut", "drop", "split"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A row in pieces of at most max_length tokens.

    Attributes:
        pieces: one; several where it was split; none where it was dropped, or nothing of it counts in the loss.
        what: used, cut, split, drop, or error.
        tokens_cut: tokens of the row that are in no piece.
    """

    pieces: list[Encoded]
    what: Literal["used", "cut", "split", "drop", "error"]
    tokens_cut: int = 0


def fit(row: Encoded, *, max_length: int, too_long: TooLong) -> Fitted:
    """The row within max_length tokens.

    A split row's pieces overlap by one token: the first token of a piece is there to predict from and is itself
    predicted in the piece before, so that no loss token is lost. Pieces without a loss token are left out.
    """
    length = len(row.ids)
    if length <= max_length:
        return Fitted([row] if row.targets.any() else [], "used")
    if too_long == "cut":
        kept = Encoded(row.ids[:max_length], row.targets[:max_length])
        return Fitted([kept] if kept.targets.any() else [], "cut", length - max_length)
    if too_long == "split":
        return _split(row, max_length)
    return Fitted([], "drop" if too_long == "drop" else "error")


def _split(row: Encoded, max_length: int) -> Fitted:
    pieces: list[Encoded] = []
    left_out = 0
    for first in range(0, len(row.ids) - 1, max_length - 1):
        piece = Encoded(row.ids[first : first + max_length], row.targets[first : first + max_length].copy())
        piece.targets[0] = False
        if piece.targets.any():
            pieces.append(piece)
        else:
            left_out += len(piece.ids) - 1  # its last token is the next piece's first
    return Fitted(pieces, "split", left_out)


def explain(what: str, *, length: int, max_length: int, pieces: int, tokens_cut: int) -> str:
    """Why something was done to a row of `length` tokens, for the ledger."""
    why = f"{length} tokens, max_length is {max_length}"
    if what == "cut":
        return f"{why}: {tokens_cut} cut off"
    if what == "split":
        all_pieces = -(-(length - 1) // (max_length - 1))
        lost = (
            f", {all_pieces - pieces} without loss tokens left out ({tokens_cut} tokens)"
            if tokens_cut
            else ""
        )
        return f"{why}: split into {all_pieces} pieces{lost}"
    return why

"""Names of the entities of all worlds, split so that no split shares a name with another.

A name is two syllables of a fixed list ("BelMar"), each one token of the nano tokenizer: copying
a name is two tokens, and every syllable is seen in training although no hidden name ever is.
Knows nothing about families.
"""

from __future__ import annotations

from typing import Literal

Split = Literal["train", "dev", "hidden"]
SPLITS: tuple[Split, ...] = ("train", "dev", "hidden")

FIRST = (
    "Bel Cor Dan Eri Fal Gar Hul Isa Jor Kel Lum Mor Nel Osk Pel Quin Ras Sol Tam Uri Vel Wil Yar "
    "Zan"
).split()
SECOND = (
    "Bar Den Fin Gil Hal Jin Kan Lor Mar Nes Por Rik Ron Sel Tas Tol Van Wen Xan Yel Zor Dux Lok "
    "Vik"
).split()

_DEV, _HIDDEN = 0, 1


def names(split: Split) -> tuple[str, ...]:
    """All names of a split: two thirds are for training, a sixth each for dev and hidden."""
    return tuple(
        first + second
        for i, first in enumerate(FIRST)
        for j, second in enumerate(SECOND)
        if _split_of(i, j) == split
    )


def _split_of(i: int, j: int) -> Split:
    """Diagonals of the syllable table, so that each syllable occurs in every split."""
    residue = (i + j) % 6
    return "dev" if residue == _DEV else "hidden" if residue == _HIDDEN else "train"

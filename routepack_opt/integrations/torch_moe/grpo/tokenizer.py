"""Characters as tokens: the smallest tokenizer an arithmetic task needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable

CHARACTERS = "0123456789+="
END = len(CHARACTERS)  # closes an answer; a token of its own that no text contains
VOCAB_SIZE = 16  # a few unused ids, so that the table divides by common sizes


def encode(text: str) -> list[int]:
    """Token ids of ``text``.

    Raises
    ------
    InvalidInput
        A character outside :data:`CHARACTERS`; names it and its place.
    """
    ids = []
    for place, character in enumerate(text):
        token = CHARACTERS.find(character)
        if token < 0:
            raise InvalidInput(f"text[{place}]: {character!r} is not one of {CHARACTERS!r}")
        ids.append(token)
    return ids


def decode(tokens: Iterable[int]) -> str:
    """Text of ``tokens``; END is shown as ".", unused ids as "?"."""
    return "".join(CHARACTERS[t] if 0 <= t < END else "." if t == END else "?" for t in map(int, tokens))

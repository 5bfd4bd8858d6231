"""Text and ids of a checkpoint with a ``tokenizer.json``, by the package tokenizers (the extra ``text``).

A token's bytes may be a part of a character, so text is streamed: ids come one by one, and a character when its last
byte is there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tilekern.errors import InputError, needing

if TYPE_CHECKING:
    import tokenizers

_FILE = "tokenizer.json"
# Decoders write it in place of bytes that are no character, or not yet.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Ids that may wait for a character's last byte. A character has four bytes at most, so only noise waits for so many.
_MOST_WAITING = 64


class Tokenizer:
    """The tokenizer of a checkpoint."""

    @needing("text of a model")
    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read ``tokenizer.json`` of a folder.

        Raises:
            ExtraMissing: tokenizers is not installed.
            InputError: the folder has no tokenizer.json, or it cannot be read.
        """
        import tokenizers

        path = Path(folder) / _FILE
        if not os.path.isfile(path):
            raise InputError(f"{folder} has no {_FILE}, which turns text into ids; give ids in place of text")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (tokenizers raises Exception itself)
            raise InputError(f"{path} is not a file of tokenizers: {str(error)[:200]}") from None
        # The file may say how training made batches; a prompt is neither cut nor filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with those that the tokenizer puts around it, such as BOS."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def stream(self) -> TextStream:
        """Return the text of ids that come one by one."""
        return TextStream(self._tokenizer, self._special)


class TextStream:
    """The text of ids that come one by one; special tokens have none.

    All parts together are the text of all ids: spaces at the beginning of a word depend on the word before, so ids are
    decoded behind those of the last part. A part takes as long at the end of a text as at its beginning.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer, self._special = tokenizer, special
        # Ids behind the last safe point but one; the text of the first ``_safe`` has been given out.
        self._ids: list[int] = []
        self._safe = 0
        self._before = ""

    def add(self, token: int) -> str:
        """Return the text that an id completes; it may be empty."""
        if token in self._special or self._tokenizer.id_to_token(token) is None:
            return ""
        self._ids.append(token)
        text = self._decoded()
        if text.endswith(_UNKNOWN) and len(self._ids) - self._safe < _MOST_WAITING:
            return ""
        return self._given_out(text)

    def rest(self) -> str:
        """Return the text of the ids that still wait; no more will come."""
        return self._given_out(self._decoded())

    def _given_out(self, text: str) -> str:
        part = text[len(self._before) :]
        self._ids = self._ids[self._safe :]
        self._safe = len(self._ids)
        self._before = self._decoded()
        return part

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._ids)
        return text

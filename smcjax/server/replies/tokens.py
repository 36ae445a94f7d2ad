"""A token's own text and bytes, beside the text of an answer, for log-probabilities."""

from __future__ import annotations

from smcjax.engine.results.text import UNDECODED
from smcjax.tokenizer.token_bytes import byte_of_mark
from smcjax.tokenizer.tokenizer import Tokenizer


class TokenTexts:
    """Looks tokens up by id. Without a tokenizer a token's text is its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._names = {} if tokenizer is None else {id: token for token, id in tokenizer.vocab.items()}
        self._special = frozenset() if tokenizer is None else frozenset(tokenizer.special_tokens.values())
        # A token whose text stands before that of others, so that no decoder strips at the start of these.
        self._before = next((id for id in self._names if self._plain(id) == "a"), None)

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes, which may be no whole characters. Empty for an id that has no token."""
        name = self._names.get(token)
        if name is None or self._tokenizer is None:
            return b"" if self._tokenizer is not None else str(token).encode()
        if token in self._special:
            return name.encode()
        if token in self._tokenizer.byte_ids:
            return bytes([int(name[3:5], 16)])
        text = self._plain(token)
        if UNDECODED in text:  # part of a character, of a vocabulary in which characters stand for bytes
            byte_of = byte_of_mark()
            if all(character in byte_of for character in name):
                return bytes(byte_of[character] for character in name)
        return text.encode()

    def is_special(self, token: int) -> bool:
        """True for tokens that no answer's text shows."""
        return token in self._special

    def text_of(self, token: int) -> str:
        """The token's text; bytes that are no whole characters are written as "bytes:\\xe2\\x80"."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _plain(self, token: int) -> str:
        assert self._tokenizer is not None
        before = getattr(self, "_before", None)
        if before is None:
            return self._tokenizer.decode([token])
        return self._tokenizer.decode([before, token])[1:]

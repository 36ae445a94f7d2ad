"""The bytes that tokens of a tokenizer stand for, by the spelling in its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from smcjax.tokenizer.tokenizer import Tokenizer

SPACE = "▁"  # SentencePiece's mark


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of tokens 0 … `vocab_size` − 1 in the middle of a text; empty for special tokens and ids without one.

    Raises ValueError for a tokenizer whose tokens are neither of byte-level BPE nor of SentencePiece.
    """
    kinds = set(_kinds(tokenizer.decoder))
    if "ByteLevel" in kinds:
        byte_of = byte_of_mark()

        def spelled(token: str) -> bytes:
            if all(mark in byte_of for mark in token):
                return bytes(byte_of[mark] for mark in token)
            return token.encode()  # an added token, which is text as it stands
    elif kinds & {"Metaspace", "ByteFallback", "Replace"} and not kinds & {"WordPiece", "BPEDecoder", "CTC"}:

        def spelled(token: str) -> bytes:
            return token.replace(SPACE, " ").encode()
    else:
        raise ValueError(
            "response_format needs a tokenizer whose tokens are bytes (byte-level BPE, or SentencePiece), and this one "
            f"has the decoder {', '.join(sorted(kinds)) or 'none'}; leave it out."
        )
    result = [b""] * vocab_size
    for token, id in tokenizer.vocab.items():
        if id in tokenizer.text_ids and id < vocab_size:
            result[id] = bytes([int(token[3:5], 16)]) if id in tokenizer.byte_ids else spelled(token)
    return result


def _kinds(decoder: Mapping[str, Any] | None) -> list[str]:
    """The types of a decoder and of its parts, as tokenizer.json names them."""
    if decoder is None:
        return []
    return [decoder["type"], *(kind for part in decoder.get("decoders", ()) for kind in _kinds(part))]


@cache
def byte_of_mark() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary (GPT-2) stands for."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}

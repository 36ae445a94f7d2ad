"""Tokenizers in the shapes of real ones, small, without files."""

from __future__ import annotations

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from smcjax.tokenizer.tokenizer import Tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "<|end|>")
WORDS = ("▁a", "b", "c", "▁", "▁▁", "c▁", "é", "\ufffd", "▁the", "!")


def _wrapped(inner: tokenizers.Tokenizer) -> Tokenizer:
    inner.add_special_tokens(list(SPECIAL))
    inner.add_tokens(["<tool>"])  # added, and no special one
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return Tokenizer(fast, fast.get_vocab())


def byte_level() -> Tokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): a token is some bytes, seldom whole characters."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    marks = {byte: chr(byte) for byte in printed}
    marks |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in marks)}
    pieces = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in (" a", " the", "é", "🎈", "  "))]
    pieces += [b"\x8e\x88\xf0\x9f", b"a\xf0\x9f", b"\x88b", b"\xff\xff"]
    vocab = {"".join(marks[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _wrapped(inner)


def _with_bytes() -> dict[str, int]:
    tokens = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    return {token: i for i, token in enumerate(tokens)}


def byte_fallback() -> Tokenizer:
    """SentencePiece's (Llama 2, Mistral): what has no token is its bytes; the text's first space is stripped."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=_with_bytes(), merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(inner)


def metaspace() -> Tokenizer:
    """SentencePiece's without bytes (T5, XLM): the first token loses its space."""
    vocab = [(token, -float(i)) for i, token in enumerate([*SPECIAL[:3], *WORDS])]
    inner = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    inner.decoder = decoders.Metaspace()
    return _wrapped(inner)


def wordpiece() -> Tokenizer:
    """BERT's: a space before each word but the first, none before its pieces."""
    tokens = [*SPECIAL[:3], "a", "the", "##b", "##ing", "!", ",", "é", "do", "n't"]
    inner = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.decoder = decoders.WordPiece()
    return _wrapped(inner)


def suffixes() -> Tokenizer:
    """BPE of words that end in a mark, which is a space but at the text's end (CLIP's kind)."""
    tokens = [*SPECIAL[:3], "a</w>", "b", "the</w>", "é</w>", "</w>"]
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    inner.decoder = decoders.BPEDecoder()
    return _wrapped(inner)


def plain() -> Tokenizer:
    """Words, joined by spaces."""
    return _wrapped(
        tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL[:3], "a", "b"])}, "<unk>"))
    )


KINDS = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace, wordpiece, suffixes, plain)}

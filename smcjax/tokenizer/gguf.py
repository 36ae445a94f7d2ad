"""The tokenizer and the chat template inside a GGUF file, as a transformers tokenizer.

Two models are read: "gpt2" (byte-level BPE: merges, and a pre-tokenizer that the file only names) and "llama"
(SentencePiece's BPE: a score a piece, bytes for what no piece covers).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPACE = "▁"  # SentencePiece's
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS_AND_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LETTERS_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """One value of tokenizer.ggml.pre: how text is cut into words, within each of which bytes are merged.

    A pattern's matches and what lies between them are words, which the next pattern may cut further.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken as it is, whatever the merges make of it
    adds_bos: bool = False  # where the file does not say
    composes: bool = False  # into Unicode's NFC


_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),  # llama.cpp's
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _PreTokenizer(
        (rf"{_CONTRACTIONS_AND_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        whole_words=True,
        adds_bos=True,
    ),
    "qwen2": _PreTokenizer(
        (rf"{_CONTRACTIONS_AND_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",), composes=True
    ),
    "tekken": _PreTokenizer(
        (rf"{_LETTERS_BY_CASE}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",), whole_words=True, adds_bos=True
    ),
}
_PRE_TOKENIZERS["deepseek-r1-qwen"] = _PRE_TOKENIZERS["qwen2"]


def tokenizer_of(file: GGUFFile) -> Any:
    """A `transformers.PreTrainedTokenizerFast` of the file's vocabulary and chat template; None where it has neither.

    Raises CheckpointError, naming the key, for a vocabulary that is incomplete or of a kind that is not read.
    """
    import transformers

    keys = _Keys(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise keys.refusal("model", "only 'gpt2' and 'llama' are implemented; use another model, or token ids")
    vocabulary = _vocabulary(keys)
    inner, adds_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(keys, vocabulary)
    special = {
        f"{name}_token": vocabulary.text(keys, f"{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    inner.add_tokens(vocabulary.added())
    adding = {"bos": keys.flag("add_bos_token", adds_bos), "eos": keys.flag("add_eos_token", False)}
    for name, place in (("bos", "begins"), ("eos", "ends")):
        if adding[name] and special[f"{name}_token"] is None:
            raise keys.refusal(f"{name}_token_id", f"that token {place} every prompt; convert the model again")
    if any(adding.values()):
        first, last = (str(special[f"{name}_token"]) for name in ("bos", "eos"))
        inner.post_processor = processors.TemplateProcessing(
            single=[*([first] if adding["bos"] else []), "$A", *([last] if adding["eos"] else [])],
            special_tokens=[(text, vocabulary.ids[text]) for text in {first, last} if text in vocabulary.ids],
        )
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{file.path}: tokenizer.chat_template is no text; convert the model again")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **{name: text for name, text in special.items() if text is not None},
    )


class _Keys:
    """Typed access to the keys below tokenizer.ggml."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def raw(self, key: str) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{key}")

    def refusal(self, key: str, reason: str) -> CheckpointError:
        shown = repr(self.raw(key))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{self._file.path}: tokenizer.ggml.{key} is {shown}, but {reason}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(key, "it must be true or false; convert the model again")
        return default if value is None else value

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        """A list of `kind`, as long as the tokens are many."""
        value = self.raw(key)
        if not isinstance(value, list) or not all(isinstance(element, kind) for element in value):
            raise self.refusal(key, f"it must be a list of {kind.__name__}; convert the model again")
        if length is not None and len(value) != length:
            raise self.refusal(key, f"it must have {length} elements, one a token; convert the model again")
        return value


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """Tokens in the order of their ids, and what each is."""

    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]  # without those that are not used

    def added(self) -> list[AddedToken]:
        """Tokens that are found in a text before it is cut into words: control ones, which are special, and others."""
        return [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def text(self, keys: _Keys, key: str) -> str | None:
        """The token whose id `key` gives; None where it gives none."""
        token = keys.raw(key)
        if token is None:
            return None
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < len(self.tokens):
            raise keys.refusal(key, f"ids end before {len(self.tokens)}; convert the model again")
        return self.tokens[token]


def _vocabulary(keys: _Keys) -> _Vocabulary:
    tokens = keys.array("tokens", str)
    if keys.raw("token_type") is None:
        raise keys.refusal("token_type", "without it special tokens are not known; convert the model again")
    kinds = keys.array("token_type", int, len(tokens))
    ids: dict[str, int] = {}
    for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != _UNUSED and ids.setdefault(text, token) != token:
            raise keys.refusal("tokens", f"tokens {ids[text]} and {token} are both {text!r}; convert the model again")
    return _Vocabulary(tokens, kinds, ids)


def _byte_level(keys: _Keys, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """BPE over bytes, each written as a letter; and whether a BOS is added by default."""
    pre = keys.raw("pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise keys.refusal("pre", f"only these pre-tokenizers are implemented: {', '.join(_PRE_TOKENIZERS)}")
    rule = _PRE_TOKENIZERS[pre]
    merges = []
    for index, merge in enumerate(keys.array("merges", str)):
        left, space, right = merge.partition(" ")
        if not space or any(text not in vocabulary.ids for text in (left, right, left + right)):
            raise keys.refusal("merges", f"number {index}, {merge!r}, is not of two tokens that make one")
        merges.append((left, right))
    inner = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=rule.whole_words))
    if rule.composes:
        inner.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return inner, rule.adds_bos


def _sentencepiece(keys: _Keys, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE; a BOS is added by default.

    Of two neighbours those merge first whose piece has the highest score. Scores fall as ids rise; files made from a
    tokenizer.json have one score for all, and the order of ids stands for it.
    """
    scores = keys.array("scores", float, len(vocabulary.tokens))
    pieces = {
        text: token for text, token in vocabulary.ids.items() if vocabulary.kinds[token] in (_NORMAL, _USER_DEFINED)
    }
    merges = [
        (-scores[token], token, -cut, text[:cut], text[cut:])
        for text, token in pieces.items()
        if vocabulary.kinds[token] == _NORMAL
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    merges.sort()
    unknown = vocabulary.text(keys, "unknown_token_id")
    inner = Tokenizer(
        models.BPE(
            vocabulary.ids,
            [(left, right) for *_, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = keys.flag("add_space_prefix", True)
    inner.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return inner, True

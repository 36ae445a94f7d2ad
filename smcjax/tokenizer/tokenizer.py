"""Text to token ids and back, by the tokenizer files of a model directory or what a GGUF file says."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsInt

from smcjax.checks import short
from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile
from smcjax.tokenizer.chat_template import RENDERER, plain_messages
from smcjax.tokenizer.files import load_tokenizer

_CONTENTS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_FILES = (*_CONTENTS, "tokenizer_config.json")
# A text is long with more characters than `PIECE`, and than `USUAL` for each token that it may have. It is then counted
# by its pieces first, each of which has fewer tokens by `CUT` within the whole, for it may begin and end amid a word.
PIECE, USUAL, CUT = 1 << 16, 8, 64


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' remarks (no PyTorch, class names, text lengths) out of the user's terminal."""
    if "transformers" not in sys.modules:
        # Its logger is set up on import, from this variable; afterwards the level goes back to the library's own.
        before = os.environ.get("TRANSFORMERS_VERBOSITY")
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        try:
            import transformers
        finally:
            if before is None:
                del os.environ["TRANSFORMERS_VERBOSITY"]
            else:
                os.environ["TRANSFORMERS_VERBOSITY"] = before
        if before is None:
            transformers.logging.set_verbosity_warning()
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Tokenizer:
    """A tokenizer as the package needs it; `load` makes one."""

    def __init__(self, inner: Any, vocab: dict[str, int]) -> None:
        self._inner = inner
        # What decodes inside of the tokenizers that have it, in a fifth of the time.
        self._backend = inner.backend_tokenizer if inner.is_fast else None
        self.vocab = vocab  # every token, special and added ones too, to its id
        # Tokens of single bytes (SentencePiece's fallback): a run of them is decoded as a whole.
        self.byte_ids = frozenset(id for token, id in vocab.items() if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token))
        special = {id for id, token in inner.added_tokens_decoder.items() if token.special} | {*inner.all_special_ids}
        # By their ids: a vocabulary has another order in each process.
        of_special = [(id, token) for token, id in vocab.items() if id in special]
        self.special_tokens = {token: id for id, token in sorted(of_special)}
        self.text_ids = frozenset(vocab.values()) - special  # of the tokens that have a text

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Tokenizer | None:
        """The tokenizer of a model directory or GGUF file, or None where it has none. Never the network.

        A tokenizer.json is taken as it stands, with the special tokens and the chat template of the files beside it
        (`load_tokenizer`). Raises CheckpointError for files that are corrupt, too large, or ask for code to be run.
        """
        directory = Path(directory)
        if directory.is_file():
            with _quiet():
                from smcjax.tokenizer.gguf import tokenizer_of  # which imports transformers

                inner = tokenizer_of(GGUFFile.open(directory))
            return None if inner is None else cls(inner, inner.get_vocab())
        if not any((directory / name).exists() for name in _FILES):
            return None
        if not any((directory / name).exists() for name in _CONTENTS):
            raise CheckpointError(
                f"{directory} has tokenizer_config.json but no vocabulary; fetch tokenizer.json, or remove that file "
                "to work with token ids"
            )
        with _quiet():
            return cls(*load_tokenizer(directory))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat template, as `load` reads them."""
        with _quiet():
            self._inner.save_pretrained(directory)

    def __len__(self) -> int:
        """The number of tokens, special and added ones included; ids may have gaps, so no bound on them."""
        return len(self.vocab)

    @property
    def eos_token_id(self) -> int | None:
        return self._inner.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        return self._inner.bos_token_id

    @property
    def has_chat_template(self) -> bool:
        return self._inner.chat_template is not None

    @property
    def decoder(self) -> dict[str, Any] | None:
        """How tokens become text, as tokenizer.json says it; None where that is not known."""
        decoder = None if self._backend is None else self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a prompt, with the BOS where the tokenizer's own rule adds one.

        A text that already begins with the BOS token, as a rendered chat does, gets no second one. Raises ValueError
        for one that is long, as soon as it is clear that it has more than `most` tokens.
        """
        self._require_no_more(text, most)
        with _quiet():
            ids: list[int] = self._inner(text)["input_ids"]
        bos = self.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and text.startswith(self._inner.bos_token):
            return ids[1:]
        return ids

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of `ids` without special tokens; ids that no token has (padding of the embedding) are skipped.

        Spaces are left as the tokens have them: cleaning them up would change text that a stream has already shown.
        """
        shown = [token for token in map(int, ids) if token in self.text_ids]
        if self._backend is not None:
            return self._backend.decode(shown)
        return self._inner.decode(shown, clean_up_tokenization_spaces=False)

    def _require_no_more(self, text: str, most: int | None) -> None:
        """Raises ValueError for a long text of more tokens, by the pieces that it begins with."""
        if most is None or len(text) <= max(PIECE, USUAL * most):
            return
        tokens = 0
        for begin in range(0, len(text), PIECE):
            with _quiet():
                ids = self._inner(text[begin : begin + PIECE], add_special_tokens=False)["input_ids"]
            tokens += max(len(ids) - CUT, 0)
            if tokens > most:
                raise ValueError(
                    f"the prompt has more than {most} tokens and max_model_len is {most}; shorten the prompt or raise "
                    "max_model_len."
                )

    def apply_chat_template(
        self, messages: Any, variables: Mapping[str, Any] | None = None, most: int | None = None
    ) -> list[int]:
        """Token ids of a conversation, a list of {"role", "content"} dicts, up to where the assistant is to speak.

        A content is a string or a list of {"type": "text", "text"} parts, which are joined. The template alone decides
        on the BOS. Further `variables` are for it, plain data. Raises ValueError where there is no template, it rejects
        `messages`, or it does not end in time, for variables that are set already, and as `encode` does.
        """
        if not self.has_chat_template:
            raise ValueError(
                "this tokenizer has no chat template; use generate with a plain prompt, or add chat_template.jinja to "
                "the model directory"
            )
        plain = plain_messages(messages)
        template = self._inner.chat_template
        if isinstance(template, Mapping):  # several, by name
            if "default" not in template:
                raise ValueError(
                    f"this tokenizer has the chat templates {sorted(template)}; name one of them 'default'"
                )
            template = template["default"]
        special = {name: str(token) for name, token in self._inner.special_tokens_map.items()}
        known = {**special, "messages": plain, "tools": None, "documents": None, "add_generation_prompt": True}
        for name in variables or ():
            if name in known:
                raise ValueError(f"the chat template's variable {short(name)} is set already; leave it out")
        text = RENDERER.render(template, {**known, **(variables or {})})
        self._require_no_more(text, most)
        with _quiet():
            ids: list[int] = self._inner(text, add_special_tokens=False)["input_ids"]
        return ids

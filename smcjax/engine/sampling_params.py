"""The parameters of one request, checked before any work starts. Names and meanings follow vLLM's where it has one."""

from __future__ import annotations

import dataclasses

from smcjax.plain import use_plain_numbers

MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Per-request sampling. Nothing here ever recompiles a program, but for top_k/top_p and control, once.

    Attributes:
        max_tokens: tokens to generate at most, EOS included; None: up to max_model_len.
        min_tokens: EOS and stop tokens are impossible before this many have been generated.
        temperature: T of p_T = softmax(logits / T); 0 is greedy, for decoders that have it.
        top_p: keep the smallest set of tokens of this total probability; 1 keeps all.
        top_k: keep this many most probable tokens; 0 or −1 keeps all.
        stop: strings that end the text, themselves not part of it; one that is a special token ends the sequence as
            `stop_token_ids` does. The work ends a cycle after every row that may still answer has one.
        stop_token_ids: token ids that end a sequence, besides EOS.
        ignore_eos: treat EOS, as configs and tokenizer name it, as an ordinary token.
        seed: of this request's own randomness; None takes one from the engine's seed and a request counter.
        logprobs: 1 returns log p_T of the generated tokens.
        control: c in [0, 1] in place of `SMC(control=…)`, by which drafts of this request are rejected; None: the
            decoder's. Other decoders refuse it.
        n: refused; a population is asked for with SMC(n_particles=…).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    control: float | None = None
    n: None = None

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        if self.n is not None:
            raise ValueError(
                f"n is not a sampling parameter here, got {self.n!r}; ask for a population with SMC(n_particles=…)."
            )
        if self.max_tokens is not None and not _is_int(self.max_tokens, 1):
            raise ValueError(f"max_tokens must be a whole number of at least 1, or None, got {self.max_tokens!r}.")
        if not _is_int(self.min_tokens, 0):
            raise ValueError(f"min_tokens must be a whole number of at least 0, got {self.min_tokens!r}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must not exceed max_tokens, got {self.min_tokens} and {self.max_tokens}.")
        if not _is_real(self.temperature) or not (self.temperature == 0 or 1e-3 <= self.temperature <= 1e3):
            raise ValueError(f"temperature must be 0 (greedy) or from 0.001 to 1000, got {self.temperature!r}.")
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}.")
        if not _is_int(self.top_k, -1):
            raise ValueError(f"top_k must be a whole number of at least 1, or 0 or -1 for all, got {self.top_k!r}.")
        if not isinstance(self.stop, str | list | tuple | None) or not all(
            isinstance(text, str) and text for text in self.stop_strings
        ):
            raise ValueError(f"stop must be a non-empty string or a list of them, got {self.stop!r}.")
        if not isinstance(self.stop_token_ids, list | tuple | None) or not all(
            _is_int(token, 0) for token in self.stop_token_ids or ()
        ):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}.")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        if self.seed is not None and not (_is_int(self.seed, 0) and self.seed <= MAX_SEED):
            raise ValueError(f"seed must be a whole number from 0 to {MAX_SEED}, or None, got {self.seed!r}.")
        if self.logprobs is not None and not (_is_int(self.logprobs, 0) and self.logprobs <= 1):
            raise ValueError(f"logprobs must be None or 1 (of the chosen tokens only), got {self.logprobs!r}.")
        if self.control is not None and not (_is_real(self.control) and 0 <= self.control <= 1):
            raise ValueError(f"control must be a number from 0 to 1, or None for the decoder's, got {self.control!r}.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def truncates(self) -> bool:
        """True where top_k or top_p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)  # comparisons refuse NaN and infinities

"""The parameters of one request, checked before any work starts. Names and meanings follow vLLM's where it has one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from smcjax.checks import (
    FLAG,
    SHARE,
    Rule,
    is_number,
    is_whole,
    names_unknown,
    normalize_fields,
    number,
    or_none,
    require,
    short,
    whole,
)
from smcjax.decoders import MAX_ALTERNATIVES
from smcjax.decoders.parts import Potential, is_part
from smcjax.decoders.text_potential import TextPotential
from smcjax.structured.response_format import Expression, expression_of

MAX_SEED = 2**32 - 1
MAX_BIASED_TOKENS = 1024  # tokens of a request's logit_bias
MAX_STOP_STRINGS = 64  # of a request; each is looked for with each token
MAX_STOP_LENGTH = 1024  # characters of a stop string


def _is_stop(value: Any) -> bool:
    texts = value if isinstance(value, list | tuple) else () if value is None else (value,)
    return all(isinstance(text, str) and text for text in texts)


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(is_whole(token, 0) for token in value)


_RULES = {
    "max_tokens": or_none(whole(1)),
    "min_tokens": whole(0),
    "temperature": Rule(
        lambda value: is_number(value, 0, 0) or is_number(value, 1e-3, 1e3), "0 (greedy) or from 0.001 to 1000"
    ),
    "top_p": SHARE,
    "top_k": Rule(lambda value: is_whole(value, -1), "a whole number of at least 1, or 0 or -1 for all"),
    "stop": Rule(_is_stop, "a non-empty string or a list of them"),
    "stop_token_ids": or_none(Rule(_are_token_ids, "a list of token ids"), ""),
    "seed": or_none(whole(0, MAX_SEED)),
    **dict.fromkeys(("ignore_eos", "trace"), FLAG),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), or_none(whole(0, MAX_ALTERNATIVES))),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), number(-2, 2)),
    "repetition_penalty": Rule(
        lambda value: is_number(value, 0, 100) and value > 0, "a number above 0 and at most 100"
    ),
    "control": or_none(number(0, 1), ", or None for the decoder's"),
}


@names_unknown
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Per-request sampling. Nothing here recompiles a program, but for features, once each.

    Features are top_k and top_p, penalties and logit_bias, response_format, control, potentials, logprobs, and
    prompt_logprobs.

    Attributes:
        max_tokens: tokens to generate at most, EOS included; None: up to max_model_len.
        min_tokens: EOS and stop tokens are impossible before this many have been generated.
        temperature: T of p_T = softmax(logits / T); 0 is greedy, for decoders that have it.
        top_p: keep the smallest set of tokens of at least this total probability, and all that are as likely as the
            least likely of them; 1 keeps all.
        top_k: keep this many most probable tokens, and all that are as likely as the last of them; 0 or −1 keeps all.
        stop: strings that end the text, themselves not part of it, at most 64 of up to 1,024 characters; one that is a
            special token ends the sequence as `stop_token_ids` does. The work ends a cycle after every row that may
            still answer has one.
        stop_token_ids: token ids that end a sequence, besides EOS.
        ignore_eos: treat EOS, as configs and tokenizer name it, as an ordinary token.
        seed: of this request's own randomness; None takes one from the engine's seed and a request counter.
        logprobs: n from 0 to 20 returns log p_T of the answer's tokens and, at each position, of the n likeliest tokens
            there; p_T is the target's law that the token is drawn from, at temperature 1 where the request is greedy.
        prompt_logprobs: n from 0 to 20 returns the same of the prompt's tokens but the first, under the target's own
            law: temperature 1, nothing cut off or adjusted.
        presence_penalty: from −2 to 2; taken from the logits of tokens that are in the answer so far.
        frequency_penalty: from −2 to 2; taken from a token's logit for each time that it is in the answer so far.
        repetition_penalty: above 0, at most 100; logits of tokens that are in the prompt or the answer so far are
            divided by it where they are above 0, else multiplied. 1: none.
        logit_bias: what to add to the logits of single tokens, from −100 to 100, by token id; at most 1,024 of them.
        response_format: the form that the whole answer has, as {"type": "json_object"}, {"type": "json_schema",
            "json_schema": {"schema": …}}, {"type": "regex", "regex": …}, {"type": "choice", "choice": [...]} or
            {"type": "grammar", "grammar": …} (`smcjax.structured.response_format`); it ends within max_tokens. None:
            any.
        trace: keeps the population's history for the result, and streams a `Cycle` with each cycle.
        control: c in [0, 1] in place of `SMC(control=…)`, by which drafts of this request are rejected; None: the
            decoder's. Other decoders refuse it.
        potentials: factors of this request's target, beside `SMC(potentials=…)`: each a `smcjax.TextPotential`, a
            function of text on the host, or a `smcjax.smc.Potential`, a function of tokens on the device, for which
            programs are compiled. SMC alone takes them.
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
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    response_format: Mapping[str, Any] | None = None
    trace: bool = False
    control: float | None = None
    potentials: Sequence[TextPotential | Potential] = ()
    n: None = None

    def __post_init__(self) -> None:
        normalize_fields(self)
        if self.n is not None:
            raise ValueError(
                f"n is not a sampling parameter here, got {self.n!r}; ask for a population with SMC(n_particles=…)."
            )
        require(vars(self), _RULES)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must not exceed max_tokens, got {self.min_tokens} and {self.max_tokens}.")
        if len(self.stop_strings) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_LENGTH for text in self.stop_strings):
            raise ValueError(
                f"stop must have at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters each, got "
                f"{len(self.stop_strings)} of up to {max(map(len, self.stop_strings))}; leave some out."
            )
        if self.logit_bias is not None:
            self._check_bias()
        if self.expression is not None:
            self._check_form()
        self._check_potentials()

    def _check_potentials(self) -> None:
        """Refuses what is no potential, and device potentials for which no program can be compiled."""
        if not isinstance(self.potentials, list | tuple) or not all(
            is_part(one, TextPotential | Potential) for one in self.potentials
        ):
            raise ValueError(
                f"potentials must be a list of TextPotentials or smcjax.smc.Potentials, got {short(self.potentials)}."
            )
        object.__setattr__(self, "potentials", tuple(self.potentials))
        try:
            if len(set(self.device_potentials)) < len(self.device_potentials):
                raise ValueError("potentials has a potential on the device twice; say its square in one.")
        except TypeError as error:
            raise ValueError(
                f"potentials on the device must be hashable, as programs are compiled for them: {error}; make them "
                "frozen dataclasses of numbers and tuples."
            ) from None

    @property
    def text_potentials(self) -> tuple[TextPotential, ...]:
        """The potentials that are functions of text, on the host."""
        return tuple(one for one in self.potentials if isinstance(one, TextPotential))

    @property
    def device_potentials(self) -> tuple[Potential, ...]:
        """The potentials that are functions of tokens, on the device."""
        return tuple(one for one in self.potentials if not isinstance(one, TextPotential))

    def _check_bias(self) -> None:
        """Refuses biases of what is no token, or out of range."""
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            is_whole(token, 0) and is_number(value, -100, 100) for token, value in bias.items()
        ):
            raise ValueError(f"logit_bias must map token ids to numbers from -100 to 100, got {short(bias)}.")
        object.__setattr__(self, "logit_bias", dict(bias))  # the caller's own may change
        if len(bias) > MAX_BIASED_TOKENS:
            raise ValueError(
                f"logit_bias has {len(bias)} entries, and {MAX_BIASED_TOKENS} are the most; leave some out."
            )

    def _check_form(self) -> None:
        """Refuses what says otherwise about where an answer of a given form may end."""
        assert self.response_format is not None
        object.__setattr__(self, "response_format", dict(self.response_format))  # the caller's own may change
        if self.stop_strings:
            raise ValueError(f"stop is {short(self.stop)} and response_format says where an answer ends; keep one.")
        if self.min_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens} and response_format says where an answer may end; leave it out."
            )

    @functools.cached_property
    def expression(self) -> Expression | None:
        """The regular expression that `response_format` asks for; None where it asks for nothing."""
        return expression_of(self.response_format)

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

    def scores(self, *, streams: bool) -> bool:
        """True where the program has to bring the answer's log-probabilities as it goes.

        Those of the answer's own tokens are there in any case once it has ended; a stream's reader wants them before.
        """
        return bool(self.logprobs) or (streams and self.logprobs is not None)

    @property
    def adjustments(self) -> tuple[str, ...]:
        """The names of the penalties and biases that change the logits."""
        unchanged = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
        names = [name for name, value in unchanged.items() if getattr(self, name) != value]
        return (*names, "logit_bias") if self.logit_bias else tuple(names)

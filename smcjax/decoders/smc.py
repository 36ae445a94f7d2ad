"""The choice of SMC, with all its options."""

from __future__ import annotations

import dataclasses
from dataclasses import InitVar
from typing import Any, Literal, get_args

from smcjax.checks import (
    FLAG,
    FLAG_OR_NONE,
    Rule,
    either,
    is_number,
    names_unknown,
    normalize_fields,
    number,
    require,
    short,
)
from smcjax.decoders.base import (
    COLDEST,
    DRAFT_TEMPERATURE,
    SIZES,
    SPARSE,
    Decoding,
    Drafting,
    NeedsExact,
    Speculation,
    in_words,
)
from smcjax.decoders.parts import Acceptance, Ending, Potential, Resampler, is_part
from smcjax.sparse.verification import SparseVerification

Scheme = Literal["systematic", "stratified", "multinomial", "residual"]  # of resampling
Selection = Literal["sample", "best"]  # of the answer
SCHEMES, SELECTIONS = get_args(Scheme), get_args(Selection)

# Beyond it float32 rounds weights by over 1e-3 nats a token: `smcjax.smc.weights`, tests/smc/test_precision.py.
SHARPEST = 1000.0  # α/T at most
ALARM = 3.0  # nats by which evidence falls short of a rate before a warning is given
WARNING_RATE = 0.5  # nats a token: SMC warns where evidence falls faster (docs/explanation/control.md)


class _Default(float):
    """A control that was not given. It goes along with `dataclasses.replace`, and follows `pipelined` there."""


DEFAULT_CONTROL = _Default(0.1)  # what each c gives and costs: docs/explanation/control.md


_RULES = {
    "n_particles": SIZES["n_particles"],
    "gamma": SIZES["gamma"],
    "draft_temperature": DRAFT_TEMPERATURE,
    "power": number(1e-3, 1e3),
    "ess_threshold": number(0, 1),
    "control": Rule(
        lambda value: is_part(value, Acceptance) or is_number(value, 0, 1), "a number from 0 to 1, or an Acceptance"
    ),
    "resampling": Rule(
        lambda value: is_part(value, Resampler) or value in SCHEMES, f"one of {', '.join(SCHEMES)}, or a Resampler"
    ),
    "early_end": Rule(lambda value: isinstance(value, bool) or is_part(value, Ending), "True, False or an Ending"),
    "potentials": Rule(
        lambda value: isinstance(value, tuple) and all(is_part(one, Potential) for one in value),
        "a tuple of Potentials",
    ),
    "select": either(*SELECTIONS),
    **dict.fromkeys(("bonus", "trace", "approximate", "pipelined"), FLAG),
    "defer_bonus": FLAG_OR_NONE,
    "sparse": SPARSE,
}


@names_unknown
@dataclasses.dataclass(frozen=True)
class SMC(Decoding):
    """Sequential Monte Carlo speculative decoding (arXiv 2604.15672).

    Attributes:
        n_particles: N, sequences kept per request.
        gamma: K, draft tokens per cycle; a cycle advances every particle by K + 1 tokens, with a control at most.
        draft_temperature: T_q ≥ 0.01; None follows the request's temperature.
        power: α > 0, the exponent of the target distribution; 1 is the plain target model. Requests whose
            power/temperature exceeds 1,000 are refused, as float32 would round their weights too much.
        ess_threshold: in [0, 1]; resample when ESS < threshold · N. 0 never resamples.
        resampling: one of `smcjax.smc.SCHEMES`.
        select: "sample" draws the answer from the final weights, "best" takes the largest (a heuristic: neither a
            sample of the target nor its mode).
        bonus: draw one more token a cycle from the target's last column.
        defer_bonus: feed the bonus token to the draft together with the token before it in the next cycle's first
            draft forward (K draft forwards a cycle instead of K + 1). Same law, same tokens. None: yes, where there is
            a bonus token.
        trace: keep ESS, weights and ancestors of every cycle in the result.
        control: c in [0, 1], where a request brings none; 0.1 unless given, and 0 of a `pipelined` one, which can
            reject nothing. Draft d is accepted with probability min(1, p(d)/(c·q(d))), else its particle's block ends
            with a token of the residual max(p − q, 0), and a token's weight is at least c. 0 accepts everything, which
            is the algorithm as published; 1 is speculative sampling of every particle, whose weights are 1 at power 1
            (rejection control: Liu, Chen & Wong 1998). Above 0 a cycle advances a particle by 1 to K + 1 tokens. 0.1
            keeps answers near the target's with good and bad drafts, for a cycle that takes 2% longer and gives a few
            tokens less with a good draft, many less with a bad one (docs/explanation/control.md).
        sparse: how the target's selected blocks are read in verification, by a target with Native Sparse Attention;
            None: each query by itself, which an engine does in groups of 16, "merged", where kernels do that.
        approximate: whether `sparse` may be approximate, which makes a particle's weight depend on its siblings.
        early_end: once some particles have finished, a coin of their share of the weight ends the request with these,
            or lets the others go on without them, so that it does not wait for the longest particle. Unbiased;
            the others weigh 0 then, until they are resampled.
        potentials: factors of the target, each a `smcjax.smc.Potential`: the target is then p(x)^α·∏ φ(x).
        pipelined: draft each block while the target scores the one before it. Where JAX has two alike devices, and no
            argument divides a model, one drafts and the other scores at the same time; each has both models whole.
            Weights decide about a block a cycle later, which is unbiased as well; there is no bonus token, an answer
            takes one cycle more, and nothing can be rejected: control 0.

    A part of one's own takes the place of a short spelling: `acceptance` (a `smcjax.smc.Acceptance`) that of control,
    `ending` (an `Ending`) that of early_end, `resampler` (a `Resampler`) that of resampling. The field of that name
    then holds the part.
    """

    name = "smc"
    weighted = True
    rows_argument = "n_particles"

    n_particles: int = 8
    gamma: int = 8
    draft_temperature: float | None = None
    power: float = 1.0
    ess_threshold: float = 0.5
    resampling: Scheme | Resampler = "systematic"
    select: Selection = "sample"
    bonus: bool = True
    defer_bonus: bool | None = None
    trace: bool = False
    control: float | Acceptance = DEFAULT_CONTROL
    sparse: SparseVerification | None = None
    approximate: bool = False
    early_end: bool | Ending = False
    potentials: tuple[Potential, ...] = ()
    pipelined: bool = False
    acceptance: InitVar[Acceptance | None] = dataclasses.field(default=None, kw_only=True)
    ending: InitVar[Ending | None] = dataclasses.field(default=None, kw_only=True)
    resampler: InitVar[Resampler | None] = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self, acceptance: object, ending: object, resampler: object) -> None:
        normalize_fields(self)
        self._take_part("acceptance", acceptance, Acceptance, "control")
        self._take_part("ending", ending, Ending, "early_end")
        self._take_part("resampler", resampler, Resampler, "resampling")
        if isinstance(self.control, _Default):
            object.__setattr__(self, "control", _Default(0.0) if self.pipelined else DEFAULT_CONTROL)
        if isinstance(self.potentials, list):
            object.__setattr__(self, "potentials", tuple(self.potentials))
        require(vars(self), _RULES)
        try:
            hash(self)
        except TypeError as error:
            raise ValueError(
                f"control, resampling, early_end and potentials must be hashable, as they are static parts of a "
                f"compiled program: {error}; make them frozen dataclasses of numbers and tuples."
            ) from None
        if self.pipelined and (self.ragged or self.rejection_control is None):
            raise ValueError(
                f"pipelined is True and control {_shown(self.control)}, which decides about drafts that the next block "
                "stands on already; leave one of them out."
            )
        self._check_effects()
        is_approximate = self.sparse is not None and self.sparse.precision == "approximate"
        if self.sparse is not None and is_approximate and not self.approximate:
            raise ValueError(
                f"sparse has mode {self.sparse.mode!r} for groups of {self.sparse.group}, where a particle's weight "
                "depends on its siblings; use mode='merged', which is exact, or allow it by approximate=True."
            )
        if self.approximate and not is_approximate:
            raise ValueError("approximate is True and nothing is; give sparse a shared mode, or leave it out.")

    def _take_part(self, name: str, part: object, kind: type, field: str) -> None:
        """Puts a part where its short spelling is, which must not be given as well."""
        if part is None:
            return
        if isinstance(part, type):
            raise ValueError(f"{name} is the class {part.__name__}; pass an object of it, {part.__name__}(…).")
        if not isinstance(part, kind):
            raise ValueError(f"{name} must be a smcjax.smc.{kind.__name__}, got {short(part)}.")
        if getattr(self, field) is not getattr(type(self), field):
            raise ValueError(f"{name} and {field} {_shown(getattr(self, field))} say the same; leave one of them out.")
        object.__setattr__(self, field, part)

    def _check_effects(self) -> None:
        """Refuses options that others leave without an effect."""
        idle: dict[str, tuple[bool, tuple[str, ...]]] = {
            "n_particles is 1": (self.n_particles == 1, ("resampling", "select", "early_end")),
            "pipelined is True": (self.pipelined, ("bonus", "defer_bonus")),
            "bonus is False": (not self.bonus, ("defer_bonus",)),
            "ess_threshold is 0": (self.ess_threshold == 0, ("resampling",)),
        }
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for cause, (holds, names) in idle.items():
            for name in names:
                if holds and getattr(self, name) != usual[name]:
                    raise ValueError(
                        f"{cause}, which leaves {name} {getattr(self, name)!r} without an effect; leave {name} out."
                    )

    @property
    def rejection_control(self) -> float | None:
        """c where the rule about drafts is rejection control; None for another rule."""
        return None if isinstance(self.control, Acceptance) else self.control

    @property
    def speculation(self) -> Speculation:
        """The numbers of a cycle that draft and verification need."""
        bonus = self.bonus and not self.pipelined
        return Speculation(
            self.n_particles,
            self.gamma,
            bonus,
            bonus and self.defer_bonus is not False,
            self.draft_temperature,
            sparse=self.sparse,
        )

    @property
    def exact(self) -> bool:
        """True at control 1 and power 1, where a particle drawn by weight is a sample of the target.

        The heaviest particle is none where coins make weights differ.
        """
        drawn = self.select == "sample" or not self.early_end
        plain = self.power == 1.0 and not self.potentials
        return self.rejection_control == 1.0 and plain and drawn and super().exact

    @property
    def ragged(self) -> bool:
        """True where drafts can be rejected."""
        return self.control.rejects if isinstance(self.control, Acceptance) else self.control > 0.0

    @property
    def overlaps(self) -> bool:
        """True of the pipelined cycle."""
        return self.pipelined

    def __str__(self) -> str:
        words = [f"SMC, N={self.n_particles}, K={self.gamma}"]
        words += [f"control {_shown(self.control)}"] if self.control else []
        words += ["early end" if self.early_end is True else _shown(self.early_end)] if self.early_end else []
        words += [f"power {self.power:g}"] if self.power != 1.0 else []
        words += [] if self.draft_temperature is None else [f"drafts at temperature {self.draft_temperature:g}"]
        words += [f"threshold {self.ess_threshold:g}"] if self.ess_threshold != type(self).ess_threshold else []
        words += [str(self.resampling)] if self.resampling in SCHEMES[1:] else []
        words += [_shown(self.resampling)] if isinstance(self.resampling, Resampler) else []
        words += [_shown(one) for one in self.potentials]
        words += [] if self.bonus else ["no bonus"]
        words += ["undeferred"] if self.defer_bonus is False else []
        words += ["pipelined"] if self.pipelined else []
        return ", ".join(words) + in_words(self.sparse)

    def check_draft(self, draft: Drafting, control: float | None = None) -> None:
        """Refuses drafts that give probability 0 to tokens of the target, but at control 1.

        No weight makes up for tokens that are never drawn, such as those beside a deterministic draft that is always
        accepted: below a control of 1 it is, if the target likes it. Pipelined, SMC refuses drafts that wait for the
        target.
        """
        if self.pipelined and draft.aux_layers:
            raise ValueError(
                f"pipelined is True and draft_model is {draft}, which drafts from what the target has computed; use "
                "pipelined=False, or a draft model that needs none of it."
            )
        own = self.control if control is None else control
        suits = own.suits_any_draft if isinstance(own, Acceptance) else own == 1.0
        if not draft.full_support and not suits:
            raise ValueError(
                f"draft_model is {draft}, whose drafts leave the target's other tokens no probability, and SMC weighs "
                "drafts by target over draft; use decoding=Rejection() or SMC(control=1), which are exact with any "
                "draft, or a model."
            )

    def check(self, params: Any) -> None:
        """Refuses requests at temperature 0 or near it, sharpened beyond float32, or ended by text at α ≠ 1.

        Refuses truncation, penalties and biases at any temperature.
        Strings that name special tokens have become token ids before (`smcjax.engine.requests.requests.split_stops`).
        """
        if params.temperature == 0:
            raise NeedsExact(
                "temperature is 0, where every draft token that differs from the target's would weigh nothing; "
                "use decoding=Rejection() or Autoregressive(), whose greedy decoding is exact, or a temperature "
                "above 0.",
                "temperature is 0, which an exact decoder answers",
            )
        sharpness = self.power / params.temperature
        if sharpness > SHARPEST:
            raise ValueError(
                f"power / temperature is {sharpness:g}, and beyond {SHARPEST:g} float32 rounds the weights by more "
                "than they may differ; lower power, or raise temperature."
            )
        if self.draft_temperature is None and params.temperature < COLDEST:
            raise NeedsExact(
                f"temperature is {params.temperature:g} for the draft too, and below {COLDEST:g} float32 rounds its "
                "log-probabilities by more than weights may differ; raise it, set draft_temperature, or use "
                "temperature=0 with decoding=Rejection() or Autoregressive().",
                f"temperature is {params.temperature:g}, too low for weights, and an exact decoder has none",
            )
        if params.truncates:
            of_k = [f"top_k is {params.top_k}"] if params.top_k > 0 else []
            given = " and ".join(of_k + ([f"top_p is {params.top_p:g}"] if params.top_p < 1 else []))
            raise NeedsExact(
                f"{given}, and draft tokens outside the kept set would weigh nothing; use decoding=Rejection() or "
                "Autoregressive(), which honour it, or leave it out.",
                "top_k or top_p cuts the distribution, which an exact decoder honours",
            )
        if params.adjustments:
            name = params.adjustments[0]
            raise NeedsExact(
                f"{name} is {short(getattr(params, name))}, and SMC's weights are not shown to be right for the laws "
                "that it makes; use decoding=Rejection() or Autoregressive(), which honour it, or leave it out.",
                f"{name} changes the distribution, which an exact decoder honours",
            )
        if self.rejection_control is None and params.control is not None:
            raise ValueError(
                f"control is {params.control:g} and decoding has a rule of its own about drafts, "
                f"{_shown(self.control)}; leave control out, or use SMC() without that rule."
            )
        if self.pipelined and params.control:
            raise ValueError(
                f"control is {params.control:g} and the decoder pipelined, which cannot reject drafts that the next "
                "block stands on; leave control out, or use SMC(pipelined=False)."
            )
        if params.stop_strings and (self.potentials or params.device_potentials):
            raise ValueError(
                "stop strings cut answers behind which potentials of tokens have looked; use stop_token_ids, which are "
                "exact, or a TextPotential, which sees what is left."
            )
        if params.stop_strings and self.power != 1.0:
            raise ValueError(
                f"stop strings change the law at power {self.power}; use power=1, or stop_token_ids, which are exact."
            )


def _shown(part: object) -> str:
    """A number as users write it, or a part of their own by what its repr says."""
    return f"{part:g}" if isinstance(part, float | int) else short(part)

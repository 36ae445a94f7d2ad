"""The law class of a decoder: those of one exact class give a request answers of one distribution, so speed may choose.

exact                the target's own law: `Rejection` of any K, candidates or tree, `Autoregressive`, and SMC at
                     control 1; sparse verification that is strict changes nothing
exact, <schedule>    likewise of the model whose layers reuse selected blocks by that schedule: another model
population …         SMC by all its options but K. N, control and power say how near to the target it comes, so that
                     speed alone may not choose among them. K says it too, where the control is below 1: those of one
                     such class agree in the target and in unbiased evidence; reports rank them side by side, and a
                     request never changes from one to another (docs/explanation/planner.md)
inexact …            another decoder that does not claim the target's own law: every option counts
approximate …        sparse verification that shares blocks: depends on who reads together, so every option counts
"""

from __future__ import annotations

import dataclasses
from typing import Any

from smcjax.checks import short
from smcjax.decoders import DECODINGS, SMC, Decoding
from smcjax.sparse.verification import SparseVerification

EXACT = "exact"
ABSENT = {"control": 0.0}  # of SMC, in JSON: its default when the first profiles were written


def law_of(decoding: Decoding) -> str:
    """The name of the decoder's law class."""
    sparse = decoding.speculation.sparse
    if sparse is not None and sparse.precision == "approximate":
        return f"approximate, {_options(decoding)}"
    reused = "" if sparse is None or sparse.precision == "strict" else f", blocks by schedule {sparse.schedule}"
    if decoding.exact:
        return EXACT + reused
    if not isinstance(decoding, SMC):
        return f"inexact, {_options(decoding)}{reused}"
    alike = dataclasses.replace(decoding, gamma=1, bonus=True, defer_bonus=None, trace=False, sparse=None)
    return f"population, {_options(alike)}{reused}"


def same_tokens(one: Decoding, other: Decoding) -> bool:
    """True where two decoders differ at most in how queries read the blocks that a sparse target has selected.

    Both then have the same drafts, rows and pages, and the same tokens of every seed, but for rounding.
    """
    without, others = ({**as_json(decoding), "sparse": None} for decoding in (one, other))
    return law_of(one) == law_of(other) and without == others


def _options(decoding: Decoding) -> str:
    options = {"name": decoding.name, **as_json(decoding)}
    return " ".join(f"{name} {value}" for name, value in options.items() if name != "decoder")


def as_json(decoding: Decoding) -> dict[str, Any]:
    """The decoder's name and its options that are not their defaults, as JSON has them; SMC's control unless 0."""
    result: dict[str, Any] = {"decoder": decoding.name}
    for field in dataclasses.fields(decoding):  # type: ignore[arg-type]
        value = getattr(decoding, field.name)
        if isinstance(value, SparseVerification):
            result[field.name] = dataclasses.asdict(value)
        elif value != ABSENT.get(field.name, field.default):
            result[field.name] = value
    return result


def from_json(value: Any) -> Decoding:
    """The decoder that `as_json` wrote; raises ValueError for anything that is none."""
    if not isinstance(value, dict) or value.get("decoder") not in DECODINGS:
        raise ValueError(f"a strategy's decoding must name a decoder of {', '.join(DECODINGS)}, got {short(value)}.")
    kind = DECODINGS[value["decoder"]]
    options = {name: _tuples(option) for name, option in value.items() if name != "decoder"}
    unknown = options.keys() - {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"{kind.__name__} has no option {sorted(unknown)[0]!r}.")
    if isinstance(options.get("sparse"), dict):
        sparse = {name: _tuples(option) for name, option in options["sparse"].items()}
        unknown = sparse.keys() - {field.name for field in dataclasses.fields(SparseVerification)}
        if unknown:
            raise ValueError(f"SparseVerification has no option {sorted(unknown)[0]!r}.")
        options["sparse"] = SparseVerification(**sparse)
    return kind(**{**ABSENT, **options}) if kind is SMC else kind(**options)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

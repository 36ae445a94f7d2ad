"""A potential of a word, beside the exact answer, which enumeration gives.

Each " apples" among an answer's four tokens has the factor e². All answers with their probabilities under the target
are listed, but for beginnings less likely than 1e-6; so the share of answers with the word is known, and the evidence.
The picture has what populations say of both, ± two standard errors over the requests.

    python examples/enumerated.py [requests] [largest N] [picture]
"""

import sys
from pathlib import Path

import jax
import numpy as np

from smcjax import LLM, SMC, SamplingParams, smc
from smcjax.model import load_checkpoint, logits
from smcjax.model.files.hub import bundled_model
from smcjax.viz.picture import INK, colour_of, new_figure, styled, write_figure

PROMPT, WORD, LENGTH, TEMPERATURE = "Tom has 12 apples. He", " apples", 4, 0.7


def answers(prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Every answer's probability under the target."""
    config, params = load_checkpoint(bundled_model("target"))
    following = jax.jit(lambda rows: jax.nn.softmax(logits(config, params, rows)[:, -1].astype(float) / TEMPERATURE))
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        rows = np.array([[*prompt, *beginning] for beginning in found], np.int32)
        blocks = np.resize(rows, (-(-len(rows) // 64), 64, rows.shape[1]))  # of one shape, the last one filled up
        laws = np.concatenate([following(block) for block in blocks])[: len(rows)]
        longer = [(x, mass * law) for (x, mass), law in zip(found.items(), laws, strict=True)]
        found = {(*x, v): float(mass[v]) for x, mass in longer for v in np.flatnonzero(mass > 1e-6).tolist()}
    return found


@styled
def main(count: int = 400, largest: int = 16, picture: str = "enumerated.svg") -> None:
    numbers, found = [2**power for power in range(largest.bit_length())], []
    for n in numbers:
        with LLM(decoding=SMC(n_particles=n, gamma=1, control=1), max_num_seqs=64, max_model_len=32) as llm:
            prompt, word = llm.tokenizer.encode(PROMPT), llm.tokenizer.encode(WORD)[-1]
            common = {"temperature": TEMPERATURE, "potentials": [smc.TokenPotential(((word, 2.0),))]}
            params = [SamplingParams(seed=n * count + i, max_tokens=LENGTH, **common) for i in range(count)]
            outputs = [output.smc for output in llm.generate([PROMPT] * count, params, use_tqdm=False)]
        shares = [sum(one.weight for one in output.particles if word in one.token_ids) for output in outputs]
        found.append((shares, [np.exp(output.log_evidence) for output in outputs]))
    law = answers(prompt)
    steered = {x: mass * np.exp(2.0 * x.count(word)) for x, mass in law.items()}
    plain, evidence = sum(law.values()), sum(steered.values())
    without, share = (sum(each[x] for x in each if word in x) / sum(each.values()) for each in (law, steered))
    print(f"{len(law)} answers have {plain:.2%} of the probability.")
    title = f"A word in {without:.0%} of answers, by its potential in {share:.0%} (dotted: exact)"
    panels = (figure := new_figure(9, 3.5, title)).subplots(1, 2)
    for axes, label, exact, values in zip(
        panels, ("share of answers with the word", "evidence"), (share, evidence), np.moveaxis(found, 1, 0), strict=True
    ):
        means, halves = values.mean(axis=1), 2 * values.std(axis=1) / count**0.5
        axes.axhline(exact, linestyle=":", color=INK)
        axes.errorbar(numbers, means, halves, fmt="o-", capsize=3, color=colour_of(0))
        axes.set(xlabel="particles", ylabel=label, xscale="log", xticks=numbers, xticklabels=numbers)
        axes.minorticks_off()
        for n, mean, half in zip(numbers, means, halves, strict=True):
            print(f"N = {n}: {label} {mean:.3f} ± {half:.3f}, exactly {exact:.3f}")
    write_figure(figure, Path(picture), title)


if __name__ == "__main__":
    main(*(kind(value) for kind, value in zip((int, int, str), sys.argv[1:], strict=False)))

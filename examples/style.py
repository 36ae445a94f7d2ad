"""A model judges while another one writes: film reviews that a small chat model finds good.

SmolLM2 continues beginnings of reviews; its draft is the same without two layers. The judge is the same SmolLM2, asked
whether a review is good: log p(" good") − log p(" bad"), after each eighth token and at the end. The picture has what
the populations' mean verdict gains by the potential, over its exponent, ± two standard errors over the beginnings.

    python examples/style.py [beginnings, 2 to 6] [N] [largest exponent] [picture]        (extra smollm2)
"""

import sys
from pathlib import Path
from statistics import fmean, stdev

from smcjax import LLM, SMC, Judge, RequestOutput, SamplingParams, TextPotential
from smcjax.viz.picture import colour_of, new_figure, styled, write_figure

BEGINNINGS = [
    *("I saw this film last night. It was", "The critics say that this film is", "I took my family to see it and we"),
    *("The actors in this film are", "The story of the film is", "After two hours in the cinema I felt"),
]
ASK = "<|im_start|>user\nIs this review good or bad?\n{prompt}{text}<|im_end|>\n<|im_start|>assistant\nThe review is"


@styled
def main(count: int = 6, n: int = 16, largest: int = 8, picture: str = "style.svg") -> None:
    beginnings, exponents, verdicts = BEGINNINGS[:count], sorted({0, largest // 4, largest}), []

    def verdict(judge: Judge, beginning: str, output: RequestOutput) -> float:
        """The population's mean."""
        texts = [particle.text for particle in output.smc.particles]
        weights = [particle.weight for particle in output.smc.particles]
        return sum(w * value for w, value in zip(weights, judge(beginning, texts), strict=True))

    arguments = {"draft_model": "smollm2", "draft_drop_layers": (3, 12), "max_model_len": 64, "max_num_seqs": count}
    with LLM("smollm2", decoding=SMC(n_particles=n, gamma=4, control=1), **arguments) as llm:
        judge = Judge(llm, ASK, verdicts=(" good", " bad"))
        for exponent in exponents:
            common = {"max_tokens": 24, "temperature": 0.8, "potentials": [TextPotential(judge, 8, None, exponent)]}
            params = [SamplingParams(seed=seed, **common) for seed in range(count)]
            outputs = llm.generate(beginnings, params, use_tqdm=False)
            verdicts.append([verdict(judge, *both) for both in zip(beginnings, outputs, strict=True)])
            print(f"exponent {exponent}: {fmean(verdicts[-1]):+.2f}. {beginnings[0]}{outputs[0].outputs[0].text}")
    gains = [[b - a for a, b in zip(verdicts[0], some, strict=True)] for some in verdicts]
    means, halves = [fmean(some) for some in gains], [2 * stdev(some) / count**0.5 for some in gains]
    title = f"Reviews that a judge finds better, by {means[-1]:.1f} ± {halves[-1]:.1f}"
    axes = (figure := new_figure(6, 3.5, title)).subplots()
    axes.errorbar(exponents, means, halves, fmt="o-", capsize=3, color=colour_of(0))
    axes.set(xlabel="exponent of the potential", ylabel="gain of log p(good) − log p(bad)", xticks=exponents)
    write_figure(figure, Path(picture), title)


if __name__ == "__main__":
    main(*(kind(value) for kind, value in zip((int, int, int, str), sys.argv[1:], strict=False)))

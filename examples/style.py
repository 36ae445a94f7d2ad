"""A model judges while another one writes: film reviews that a small chat model finds good.

SmolLM2 continues beginnings of reviews; its draft is the same without two layers. The judge is the same SmolLM2, asked
whether a review is good: log p(" good") − log p(" bad"), after each eighth token and at the end. The picture has the
verdict's mean in the populations over the potential's exponent, ± two standard errors over the beginnings.

    python examples/style.py [beginnings] [N] [largest exponent] [picture]        (extra smollm2)
"""

import sys
from statistics import fmean, stdev

from matplotlib.figure import Figure

from smcjax import LLM, SMC, Judge, RequestOutput, SamplingParams, TextPotential

BEGINNINGS = [
    *("I saw this film last night. It was", "The critics say that this film is", "I took my family to see it and we"),
    *("The actors in this film are", "The story of the film is", "After two hours in the cinema I felt"),
]
ASK = "<|im_start|>user\nIs this review good or bad?\n{prompt}{text}<|im_end|>\n<|im_start|>assistant\nThe review is"


def main(count: int = 6, n: int = 8, largest: int = 8, picture: str = "style.svg") -> None:
    beginnings, exponents, means, halves = BEGINNINGS[:count], (0, largest // 4, largest), [], []

    def verdict(judge: Judge, beginning: str, output: RequestOutput) -> float:
        """The population's mean."""
        texts = [particle.text for particle in output.smc.particles]
        weights = [particle.weight for particle in output.smc.particles]
        return sum(w * value for w, value in zip(weights, judge(beginning, texts), strict=True))

    arguments = {"draft_model": "smollm2", "draft_drop_layers": (3, 12), "max_model_len": 64, "max_num_seqs": 6}
    with LLM("smollm2", decoding=SMC(n_particles=n, gamma=4, control=1), **arguments) as llm:
        judge = Judge(llm, ASK, verdicts=(" good", " bad"))
        for exponent in exponents:
            common = {"max_tokens": 24, "temperature": 0.8, "potentials": [TextPotential(judge, 8, None, exponent)]}
            params = [SamplingParams(seed=seed, **common) for seed in range(count)]
            outputs = llm.generate(beginnings, params, use_tqdm=False)
            verdicts = [
                verdict(judge, beginning, output) for beginning, output in zip(beginnings, outputs, strict=True)
            ]
            means.append(fmean(verdicts))
            halves.append(2 * stdev(verdicts) / count**0.5)
            print(
                f"exponent {exponent}: {means[-1]:+.2f} ± {halves[-1]:.2f}. {beginnings[0]}{outputs[0].outputs[0].text}"
            )
    axes = (figure := Figure()).subplots()
    axes.errorbar(exponents, means, halves, fmt="o-", capsize=3)
    axes.set(xlabel="exponent of the potential", ylabel="verdict: log p(good) − log p(bad)", xticks=exponents)
    figure.savefig(picture)


if __name__ == "__main__":
    main(*(kind(value) for kind, value in zip((int, int, int, str), sys.argv[1:], strict=False)))

"""A verifier of arithmetic steers a population: accuracy over N on word problems, beside majority and best of N.

Answers have a calculation a line, as `Tom has 12 - 7 = 5 apples`. The potential looks at each line when it ends; a
false one costs 4 nats. At temperature 1.8 the bundled pair miscalculates often. Each point has N sequences a problem.

    python examples/verifier.py [problems] [largest N] [temperature] [picture]
"""

import re
import sys
from collections import Counter, defaultdict

from matplotlib.figure import Figure

from smcjax import LLM, SMC, Rejection, SamplingParams, TextPotential
from smcjax.tasks.intervals import wilson_interval
from smcjax.tasks.word_problems import extract_answer, generate

RESULTS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": lambda a, b: a // b if b else -1}


def verify(prompt: str, texts: list[str]) -> list[float]:
    """The log potential: −4 for each false calculation."""
    found = [re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text) for text in texts]
    return [-4.0 * sum(RESULTS[sign](int(a), int(b)) != int(c) for a, sign, b, c in each) for each in found]


def main(count: int = 20, largest: int = 8, temperature: float = 1.8, picture: str = "verifier.svg") -> None:
    problems, curves = generate(seed=5, n=count, split="eval"), defaultdict(list)

    def texts(llm: LLM, seed: int, *potentials: TextPotential) -> list[str]:
        common = {"max_tokens": 96, "temperature": temperature, "potentials": potentials}
        params = [SamplingParams(seed=seed + number, **common) for number in range(count)]
        outputs = llm.generate([problem.question for problem in problems], params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    with LLM(decoding=Rejection(gamma=4), max_num_seqs=16) as llm:
        samples = list(zip(*(texts(llm, 1000 * (1 + number)) for number in range(largest)), strict=True))
    for n in (2**power for power in range(1, largest.bit_length())):
        with LLM(decoding=SMC(n_particles=n, gamma=4), max_num_seqs=8) as llm:
            answers = {"SMC": texts(llm, 0), "SMC, steered": texts(llm, 0, TextPotential(verify, ask="\n"))}
        answers["best of N by the verifier"] = [max(x[:n], key=lambda y: verify("", [y])) for x in samples]
        numbers = {name: [extract_answer(text) for text in own] for name, own in answers.items()}
        numbers["majority of N"] = [Counter(map(extract_answer, x[:n])).most_common(1)[0][0] for x in samples]
        for name, own in numbers.items():
            right = sum(answer == problem.answer for answer, problem in zip(own, problems, strict=True))
            curves[name].append((n, right / count, *wilson_interval(right, count)))
            print("N = {}: {:6.1%} ({:.1%} to {:.1%})".format(*curves[name][-1]), name)
    axes = (figure := Figure()).subplots()
    for name, points in curves.items():
        n, share, low, high = zip(*points, strict=True)
        (line,) = axes.plot(n, share, "o-", label=name)
        axes.fill_between(n, low, high, color=line.get_color(), alpha=0.1)
    axes.set(xscale="log", xticks=n, xticklabels=n, xlabel="N, sequences a problem", ylabel="share of right answers")
    axes.legend()
    figure.savefig(picture)


if __name__ == "__main__":
    main(*(kind(value) for kind, value in zip((int, int, float, str), sys.argv[1:], strict=False)))

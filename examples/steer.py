"""A verifier of arithmetic steers the population: accuracy on word problems beside majority and best of N.

The model's answers have a calculation a line, as `Tom has 12 - 7 = 5 apples`. The potential looks at each line when it
ends: a false calculation costs 4 nats. All rows of the table have N sequences a problem.

    python examples/steer.py [problems] [N] [temperature]

At temperature 1.8 the bundled pair, which seldom miscalculates, does so often enough to be corrected.
"""

import collections
import re
import sys

from smcjax import LLM, SMC, Rejection, RequestOutput, SamplingParams, TextPotential
from smcjax.tasks.word_problems import Problem, extract_answer, generate, is_correct

CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def false_calculations(text: str) -> int:
    """How many calculations of a text are wrong."""
    results = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    results["/"] = lambda a, b: a // b if b else -1
    found = CALCULATION.findall(text)
    return sum(results[sign](int(a), int(b)) != int(c) for a, sign, b, c in found)


def verify(prompt: str, texts: list[str]) -> list[float]:
    """The log potential: −4 for each false calculation."""
    return [-4.0 * false_calculations(text) for text in texts]


def share(problems: list[Problem], answers: list[str]) -> float:
    """The share of right answers."""
    return sum(is_correct(problem, answer) for problem, answer in zip(problems, answers, strict=True)) / len(problems)


def majority(texts: list[str]) -> str:
    """A text with the number that most texts have."""
    numbers = collections.Counter(extract_answer(text) for text in texts)
    return next(text for text in texts if extract_answer(text) == numbers.most_common(1)[0][0])


def main(count: int = 20, n: int = 8, temperature: float = 1.8) -> None:
    problems = generate(seed=5, n=count, split="eval")
    prompts = [problem.question for problem in problems]

    def asked(llm: LLM, seed: int, **fields: object) -> list[RequestOutput]:
        own = [SamplingParams(max_tokens=96, temperature=temperature, seed=seed + i, **fields) for i in range(count)]
        return llm.generate(prompts, own, use_tqdm=False)

    with LLM(decoding=SMC(n_particles=n, gamma=4), max_num_seqs=8) as llm:
        plain, steered = (asked(llm, 0, potentials=p) for p in ([], [TextPotential(verify, ask="\n")]))
    with LLM(decoding=Rejection(gamma=4), max_num_seqs=16) as llm:
        samples = [[out.outputs[0].text for out in asked(llm, 1000 * (1 + i))] for i in range(n)]
    of_each = [list(texts) for texts in zip(*samples, strict=True)]
    rows = {
        "one sample": samples[0],
        f"majority of {n} samples": [majority(texts) for texts in of_each],
        f"best of {n} samples by the verifier": [min(texts, key=false_calculations) for texts in of_each],
        f"SMC, {n} particles": [out.outputs[0].text for out in plain],
        f"SMC, {n} particles, steered by the verifier": [out.outputs[0].text for out in steered],
    }
    for name, answers in rows.items():
        print(f"{share(problems, answers):6.1%}  {name}")


if __name__ == "__main__":
    main(*(kind(value) for kind, value in zip((int, int, float), sys.argv[1:], strict=False)))

"""A verifier of arithmetic steers a population: accuracy on word problems, beside majority and best of N.

Answers have a calculation a line, as `Tom has 12 - 7 = 5 apples`. The potential looks at each line when it ends; a
false one costs 4 nats. At temperature 1.8 the bundled pair miscalculates often. A point has N sequences a problem, and
the picture has it over the seconds that a problem takes, with as many sequences at a time everywhere. The lines below
"as long" have as many of the target's own answers as are made in the steered population's time.

    python examples/verifier.py [problems] [largest N, from 2] [temperature] [picture]
"""

import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from smcjax import LLM, SMC, Rejection, SamplingParams, TextPotential
from smcjax.tasks.intervals import wilson_interval
from smcjax.tasks.word_problems import extract_answer, generate
from smcjax.viz.picture import colour_of, label_right, log_ticks, new_figure, styled, write_figure

RESULTS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": lambda a, b: a // b if b else -1}


def verify(prompt: str, texts: list[str]) -> list[float]:
    """The log potential: −4 for each false calculation."""
    found = [re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text) for text in texts]
    return [-4.0 * sum(RESULTS[sign](int(a), int(b)) != int(c) for a, sign, b, c in each) for each in found]


def main(count: int = 20, largest: int = 8, temperature: float = 1.8, picture: str = "verifier.svg") -> None:
    problems, curves = generate(seed=5, n=count, split="eval"), defaultdict(dict)
    together = min(count, 8) * largest

    def timed(llm: LLM, seed: int, *potentials: TextPotential) -> tuple[list[str], float]:
        """Answers, and the seconds that a problem takes, but for those of compiling."""
        common = {"max_tokens": 96, "temperature": temperature, "potentials": potentials}
        params = [SamplingParams(seed=seed + number, **common) for number in range(count)]
        began, compiling = time.perf_counter(), llm.engine.metrics()["compile_seconds"]
        outputs = llm.generate([problem.question for problem in problems], params, use_tqdm=False)
        seconds = time.perf_counter() - began - (llm.engine.metrics()["compile_seconds"] - compiling)
        return [output.outputs[0].text for output in outputs], seconds / count

    def note(name: str, n: int, numbers: list[int | None], seconds: float) -> None:
        right = sum(number == problem.answer for number, problem in zip(numbers, problems, strict=True))
        curves[name][n] = (seconds, right / count, *wilson_interval(right, count))
        print("N = {}: {:.3f} s, {:6.1%} ({:.1%} to {:.1%})".format(n, *curves[name][n]), name)

    def chosen(n: int) -> None:
        """The target's answers, of which n are made and one is chosen."""
        best = [max(own[:n], key=lambda text: verify("", [text])) for own in samples]
        note("best of N by the verifier", n, [extract_answer(text) for text in best], n * each)
        votes = [Counter(map(extract_answer, own[:n])).most_common(1)[0][0] for own in samples]
        note("majority of N", n, votes, n * each)

    with LLM(decoding=Rejection(gamma=4), max_num_seqs=together) as llm:
        drawn = [timed(llm, 1000 * (1 + number)) for number in range(largest)]
    samples = list(zip(*(texts for texts, _ in drawn), strict=True))
    each = sum(seconds for _, seconds in drawn) / largest
    for n in (2**power for power in range(1, largest.bit_length())):
        with LLM(decoding=SMC(n_particles=n, gamma=4), max_num_seqs=together // n) as llm:
            for name, potentials in {"SMC": (), "SMC, steered": (TextPotential(verify, ask="\n"),)}.items():
                texts, seconds = timed(llm, 0, *potentials)
                note(name, n, [extract_answer(text) for text in texts], seconds)
        chosen(n)
        print("as long:")
        chosen(min(largest, max(1, round(seconds / each))))
    draw(curves, Path(picture))


@styled
def draw(curves: dict[str, dict[int, tuple[float, float, float, float]]], picture: Path) -> None:
    """Draws shares of right answers, with their 95% intervals, over the seconds of a problem."""
    best = [(*max(points.values(), key=lambda point: point[1])[:2], name) for name, points in curves.items()]
    (seconds, share, name), (sooner, less, other) = sorted(best, key=lambda each: -each[1])[:2]
    title = f"Right at best: {name} {share:.0%} in {seconds:.2f} s, {other} {less:.0%} in {sooner:.2f} s"
    axes = (figure := new_figure(9, 4.5, title)).subplots()
    axes.set(xscale="log", xlabel="seconds a problem, at N sequences", ylabel="share of right answers")
    labels = []
    for number, (name, points) in enumerate(curves.items()):
        seconds, share, low, high = zip(*(points[n] for n in sorted(points)), strict=True)
        axes.plot(seconds, share, "o-", color=colour_of(number))
        axes.fill_between(seconds, low, high, color=colour_of(number), alpha=0.08, linewidth=0)
        for n, point in points.items():
            axes.annotate(n, point[:2], textcoords="offset points", xytext=(3, 3), color=colour_of(number))
        labels.append((share[-1], name, colour_of(number)))
    log_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:.0%}")
    label_right(axes, labels)
    write_figure(figure, picture, title)


if __name__ == "__main__":
    main(*(kind(value) for kind, value in zip((int, int, float, str), sys.argv[1:], strict=False)))

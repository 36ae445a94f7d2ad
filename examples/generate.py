"""Answers a question by a population of eight particles, and prints every answer with its weight."""

from smcjax import LLM, SMC, SamplingParams

QUESTION = "Tom has 12 apples. He gives 7 apples to Mia. How many apples does Tom have now?"


def main() -> None:
    with LLM(decoding=SMC(n_particles=8, gamma=4)) as llm:  # no path: the bundled pair
        out = llm.generate(QUESTION, SamplingParams(max_tokens=96, temperature=0.7, seed=1), use_tqdm=False)[0]
    print("answer:", out.outputs[0].text.strip())
    for particle in sorted(out.smc.particles, key=lambda particle: -particle.weight):
        print(f"{particle.weight:5.1%}  {particle.text.strip()!r}")


if __name__ == "__main__":
    main()

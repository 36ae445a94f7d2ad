"""Prints an answer piece by piece: the text on which all living particles agree, which no later cycle changes."""

from smcjax import LLM, SMC, SamplingParams

QUESTION = "Anna has 20 apples. She loses 4 apples. How many apples does Anna have left?"


def main() -> None:
    with LLM(decoding=SMC(n_particles=8, gamma=4)) as llm:
        for chunk in llm.generate_stream(QUESTION, SamplingParams(max_tokens=96, temperature=0.7, seed=1)):
            print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()

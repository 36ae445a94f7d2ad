"""Compares two models by evidence: the probability that each gives to all answers of a form together.

`log_evidence` of a request with a form estimates the log of the probability that the target's answer has it, without
bias on the scale of probabilities. The difference of two such logs is the log of a Bayes factor.
"""

import math

from smcjax import LLM, SMC, SamplingParams

QUESTION = (
    "Tom has 12 apples. He buys 3 bags with 5 apples each and gives 7 apples to Mia. How many apples does Tom have now?"
)
RIGHT = {"type": "regex", "regex": "[^#]{1,90}#### 20"}  # ends with the right number


def log_evidence(model: str) -> float:
    """The log of the mean evidence of 4 populations of 8 particles."""
    params = [SamplingParams(max_tokens=96, response_format=RIGHT, seed=seed) for seed in range(4)]
    with LLM(model, draft_model="words-draft", decoding=SMC(n_particles=8, gamma=4)) as llm:
        outs = llm.generate([QUESTION] * len(params), params, use_tqdm=False)
    return math.log(sum(math.exp(out.smc.log_evidence) for out in outs) / len(outs))


def main() -> None:
    large, small = log_evidence("words"), log_evidence("words-draft")
    print(f"log probability of a right answer: {large:.2f} (target), {small:.2f} (draft)")
    print(f"log Bayes factor for the target: {large - small:.2f}")


if __name__ == "__main__":
    main()

"""Brings a rule of one's own for keeping drafts, proves its law, and decodes with it."""

import dataclasses

import jax.numpy as jnp

from smcjax import LLM, SMC, SamplingParams, smc
from smcjax.testing import battery

QUESTION = "Tom has 12 apples. He gives 7 apples to Mia. How many apples does Tom have now?"


@dataclasses.dataclass(frozen=True)
class Softened(smc.Acceptance):
    """Keeps a draft with probability min(1, p/q)^sharpness; 1 is speculative sampling, 0 keeps every draft."""

    sharpness: float = 0.5

    def probability(self, log_p, log_q):
        """The probability of keeping a draft of log-probabilities `log_p` in the target and `log_q` in the draft."""
        return jnp.exp(self.sharpness * jnp.minimum(0.0, log_p - log_q))


def main() -> None:
    battery(Softened())  # raises AssertionError with the law that is broken
    with LLM(decoding=SMC(n_particles=4, gamma=4, acceptance=Softened())) as llm:
        out = llm.generate(QUESTION, SamplingParams(max_tokens=96, temperature=0.7, seed=1), use_tqdm=False)[0]
    print(out.outputs[0].text.strip())


if __name__ == "__main__":
    main()

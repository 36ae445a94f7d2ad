"""Sequential Monte Carlo speculative decoding: weights, resampling, the cycle, and a population's life.

program = Program(SMC(n_particles=8, gamma=4), target_config, draft_config, max_model_len=512)
requests = Requests.alike(key, prompt_lengths, vocab_size=target_config.vocab_size, max_tokens=128)
state = init(program, PairParams(target_params, draft_params), prompts, requests)
state, info = step(program, params, state)              # one cycle
state, infos = run(program, params, state, 16)          # many, in one program
"""

from smcjax.decoders import SCHEMES, SMC
from smcjax.decoding.sequences import Requests
from smcjax.decoding.speculation import Memory, PairParams, prefill
from smcjax.smc.cycle import run, step
from smcjax.smc.lifecycle import begin, conclude, init, log_evidence, release_all, select, start
from smcjax.smc.resampling import resample
from smcjax.smc.state import Info, Program, State
from smcjax.smc.weights import effective_sample_size

__all__ = [
    "SCHEMES",
    "SMC",
    "Info",
    "Memory",
    "PairParams",
    "Program",
    "Requests",
    "State",
    "begin",
    "conclude",
    "effective_sample_size",
    "init",
    "log_evidence",
    "prefill",
    "release_all",
    "resample",
    "run",
    "select",
    "start",
    "step",
]

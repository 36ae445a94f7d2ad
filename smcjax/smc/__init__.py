"""Sequential Monte Carlo speculative decoding: weights, resampling, the cycle, and a population's life.

program = Program(SMC(n_particles=8, gamma=4), target_config, draft_config, max_model_len=512)
requests = Requests.alike(key, prompt_lengths, vocab_size=target_config.vocab_size, max_tokens=128)
state = init(program, PairParams(target_params, draft_params), prompts, requests)
state, info = step(program, params, state)              # one cycle
state, infos = run(program, params, state, 16)          # many, in one program
"""

from smcjax.decoders import SCHEMES, SMC
from smcjax.decoders.parts import Ending, Potential, Resampler
from smcjax.decoding.admission import prefill
from smcjax.decoding.groups import Memory, PairParams
from smcjax.decoding.program import Program
from smcjax.decoding.sequences import Requests
from smcjax.smc.acceptance import Acceptance, KeepAll, RejectionControl
from smcjax.smc.decoder import SMCDecoder, run, step
from smcjax.smc.ending import Outcomes, Roulette, WaitForAll
from smcjax.smc.heads import Twist, ValueHead
from smcjax.smc.lifecycle import begin, conclude, init, log_evidence, select, start
from smcjax.smc.potential import Answers, ConstantPotential, TokenPotential
from smcjax.smc.resampling import resample
from smcjax.smc.state import Info, State
from smcjax.smc.weights import effective_sample_size

__all__ = [
    "SCHEMES",
    "SMC",
    "Acceptance",
    "Answers",
    "ConstantPotential",
    "Ending",
    "Info",
    "KeepAll",
    "Memory",
    "Outcomes",
    "PairParams",
    "Potential",
    "Program",
    "RejectionControl",
    "Requests",
    "Resampler",
    "Roulette",
    "SMCDecoder",
    "State",
    "TokenPotential",
    "Twist",
    "ValueHead",
    "WaitForAll",
    "begin",
    "conclude",
    "effective_sample_size",
    "init",
    "log_evidence",
    "prefill",
    "resample",
    "run",
    "select",
    "start",
    "step",
]

"""Exact speculative sampling, batched with ragged acceptance: of a chain, of candidates or of a tree.

program = Program(Rejection(gamma=4), target_config, draft_config, max_model_len=512)
"""

from smcjax.decoders import Rejection
from smcjax.decoding.admission import begin, prefill
from smcjax.decoding.groups import Memory, PairParams
from smcjax.decoding.program import Program
from smcjax.rejection.decoder import Info, RejectionDecoder, State, conclude, run, start, step
from smcjax.rejection.rules import TreeVerification, Verification, candidates, tree

__all__ = [
    "Info",
    "Memory",
    "PairParams",
    "Program",
    "Rejection",
    "RejectionDecoder",
    "State",
    "TreeVerification",
    "Verification",
    "begin",
    "candidates",
    "conclude",
    "prefill",
    "run",
    "start",
    "step",
    "tree",
]

"""Hand-written GPU kernels (Pallas, Mosaic GPU, Hopper); each with a plain reference and behind a wrapper."""

from smcjax.pallas.attention.paged_attention import (
    attends_by_kernels,
    find_tasks,
    paged_attention,
    plan_sharing,
)
from smcjax.pallas.attention.paged_attention_sm90 import paged_attention_mosaic, supports
from smcjax.pallas.attention.prefix_plan import Sharing
from smcjax.pallas.attention.prefix_shared import shared_attention_mosaic
from smcjax.pallas.attention.reference import attention, paged_attention_reference
from smcjax.pallas.cache.page_copy import copy_all_pages
from smcjax.pallas.cache.rotate_and_write import (
    Copies,
    HeadNorms,
    copy_pages,
    rotate,
    rotate_and_write,
    split_and_rotate,
    split_heads,
)
from smcjax.pallas.collectives.peer_memory import PeerMemory, Workspaces, reach_each_other, supports_peers
from smcjax.pallas.dispatch import active_implementation, implementations
from smcjax.pallas.layer.norm import Norm, PendingNorm, add_rms_norm, rms_norm
from smcjax.pallas.layer.skinny_gemm import round_rows, skinny_gemm, skinny_gemm_eight_bits, skinny_gemm_swiglu
from smcjax.pallas.layer.swiglu import swiglu
from smcjax.pallas.sparse.gated_merge import gated_merge_mosaic
from smcjax.pallas.sparse.grouped_attention import grouped_attention
from smcjax.pallas.sparse.grouped_attention_sm90 import grouped_attention_mosaic
from smcjax.pallas.sparse.grouped_tasks_kernel import tasks_of_blocks_mosaic

__all__ = [
    "Copies",
    "HeadNorms",
    "Norm",
    "PeerMemory",
    "PendingNorm",
    "Sharing",
    "Workspaces",
    "active_implementation",
    "add_rms_norm",
    "attends_by_kernels",
    "attention",
    "copy_all_pages",
    "copy_pages",
    "find_tasks",
    "gated_merge_mosaic",
    "grouped_attention",
    "grouped_attention_mosaic",
    "implementations",
    "paged_attention",
    "paged_attention_mosaic",
    "paged_attention_reference",
    "plan_sharing",
    "reach_each_other",
    "rms_norm",
    "rotate",
    "rotate_and_write",
    "round_rows",
    "shared_attention_mosaic",
    "skinny_gemm",
    "skinny_gemm_eight_bits",
    "skinny_gemm_swiglu",
    "split_and_rotate",
    "split_heads",
    "supports",
    "supports_peers",
    "swiglu",
    "tasks_of_blocks_mosaic",
]

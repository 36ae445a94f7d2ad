"""Hand-written GPU kernels (Pallas, Mosaic GPU, Hopper); each with a plain reference and behind a wrapper."""

from smcjax.pallas.attention import attention, paged_attention_reference
from smcjax.pallas.dispatch import implementations, uses_kernels
from smcjax.pallas.few_row_products import few_row_product, few_row_swiglu
from smcjax.pallas.gated_merge import gated_merge_mosaic
from smcjax.pallas.grouped_attention import grouped_attention
from smcjax.pallas.grouped_attention_sm90 import grouped_attention_mosaic
from smcjax.pallas.grouped_tasks_kernel import tasks_of_blocks_mosaic
from smcjax.pallas.kv_write import (
    Copies,
    HeadNorms,
    copy_pages,
    rotate,
    rotate_and_write,
    split_and_rotate,
    split_heads,
)
from smcjax.pallas.norm import PendingNorm, add_rms_norm, rms_norm, supports_norm
from smcjax.pallas.page_copy import copy_all_pages
from smcjax.pallas.paged_attention import (
    attends_by_kernels,
    find_tasks,
    paged_attention,
    plan_sharing,
)
from smcjax.pallas.paged_attention_sm90 import paged_attention_mosaic, supports
from smcjax.pallas.peers import MOST_DEVICES, Peers, Workspaces, reach_each_other
from smcjax.pallas.shared_attention import shared_attention_mosaic
from smcjax.pallas.sharing import Sharing
from smcjax.pallas.swiglu import swiglu

__all__ = [
    "MOST_DEVICES",
    "Copies",
    "HeadNorms",
    "Peers",
    "PendingNorm",
    "Sharing",
    "Workspaces",
    "add_rms_norm",
    "attends_by_kernels",
    "attention",
    "copy_all_pages",
    "copy_pages",
    "few_row_product",
    "few_row_swiglu",
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
    "shared_attention_mosaic",
    "split_and_rotate",
    "split_heads",
    "supports",
    "supports_norm",
    "swiglu",
    "tasks_of_blocks_mosaic",
    "uses_kernels",
]

"""Megatron's options of data parallelism, one row each: what they are here, or why they are not.

Every field of Megatron-LM's `DistributedDataParallelConfig` has a row. `mfun plan --options` prints
them, and a configuration that sets one by Megatron's name is answered with its row.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["option", "built in", "not needed", "refused"]


class Option(NamedTuple):
    """A row.

    Args:
      name: Megatron's.
      verdict: `option` is one here too; `built in` always so; `not needed` for its reason;
        `refused` for want of what only CUDA has.
      keys: ours that do it, or come nearest.
      why: in words.
    """

    name: str
    verdict: Verdict
    keys: tuple[str, ...]
    why: str

    @property
    def hint(self) -> str:
        """What to tell who sets it.

        Example:
          >>> OPTIONS["overlap_grad_reduce"].hint
          "Megatron's overlap_grad_reduce is parallel.overlap here: buckets are reduced during ..."
        """
        keys = ", ".join(self.keys)
        here = f"is {keys} here" if self.verdict == "option" else f"is {self.verdict}"
        nearest = f" (see {keys})" if keys and self.verdict != "option" else ""
        return f"Megatron's {self.name} {here}: {self.why}{nearest}."


OVERLAP, SHARDING, BUCKET = "parallel.overlap", "parallel.sharding", "parallel.bucket_size"
PREFETCH, COPIES = "parallel.prefetch", "parallel.shard_copies"
AHEAD = "parallel.gather_ahead"
GRADS, MASTERS = "precision.grads", "precision.masters"
FP8 = "stored 8-bit parameters need the tensor cores and kernels of recent NVIDIA devices"
NCCL = "it registers buffers with NCCL, the communication library of NVIDIA devices"

_ROWS: tuple[tuple[Verdict, str, tuple[str, ...], str], ...] = (
    # gradients on their way
    ("option", "overlap_grad_reduce", (OVERLAP,), "buckets are reduced during the backward"),
    ("option", "bucket_size", (BUCKET,), "elements at which a bucket closes"),
    ("not needed", "num_buckets", (BUCKET,), "it is the parameters divided by the bucket size"),
    (
        "option",
        "pad_buckets_for_high_nccl_busbw",
        ("parallel.bucket_pad",),
        "65536 is its padding, to a multiple of lcm(ranks, 2^16); by default it is lcm(ranks, 128)",
    ),
    ("option", "grad_reduce_in_fp32", (GRADS,), "gradients are reduced in their own type"),
    (
        "option",
        "reduce_scatter_with_fp32_accumulation",
        ("parallel.wide_sums",),
        "16-bit gradients are exchanged as they are, added up in fp32 and rounded once",
    ),
    (
        "not needed",
        "param_name_patterns_for_fp32_local_accumulation",
        (GRADS,),
        "in fp32 all gradients are added up and reduced in it",
    ),
    (
        "option",
        "average_in_collective",
        ("parallel.mean_gradients",),
        "collectives take the mean of the data ranks' gradients, to the same values",
    ),
    (
        "not needed",
        "gradient_reduce_div_fusion",
        (),
        "the division is in the gradient of the loss: no pass over gradients is there to fuse",
    ),
    (
        "option",
        "check_for_nan_in_grad",
        ("train.check_gradients",),
        "ends the run by rank and parameter, before they are reduced; a bad norm always does",
    ),
    (
        "option",
        "check_for_large_grads",
        ("train.large_gradient",),
        "from which absolute value on, by rank and parameter",
    ),
    (
        "option",
        "delay_wgrad_compute",
        ("parallel.split_backward",),
        "schedules with W ops compute weights' gradients when nothing else is to do",
    ),
    # what is cut over the ranks
    (
        "option",
        "data_parallel_sharding_strategy",
        (SHARDING,),
        "no_shard, optim, optim_grads and optim_grads_params, as ZeRO 0 to 3",
    ),
    ("option", "use_distributed_optimizer", (SHARDING,), "as sharding=optim"),
    (
        "option",
        "num_distributed_optimizer_instances",
        (COPIES,),
        "each copy of the shards lies within its own part of the ranks",
    ),
    (
        "option",
        "outer_dp_sharding_strategy",
        (COPIES,),
        "copies of the shards are the outer no_shard; cut over all ranks, they need no outer level",
    ),
    (
        "option",
        "overlap_param_gather",
        (AHEAD, PREFETCH),
        "updated parameters are gathered beside the next forward, sharded ones ahead of their use",
    ),
    (
        "not needed",
        "align_param_gather",
        (),
        "where each stage gathers is in its stream before the step starts",
    ),
    ("not needed", "use_megatron_fsdp", (SHARDING,), "all strategies share one path"),
    ("not needed", "megatron_fsdp_version", (SHARDING,), "all strategies share one path"),
    ("not needed", "use_custom_fsdp", (SHARDING,), "Megatron's own old name of use_megatron_fsdp"),
    (
        "option",
        "suggested_communication_unit_size",
        (BUCKET, PREFETCH),
        "a bucket is one collective, and so many are gathered ahead",
    ),
    (
        "built in",
        "fsdp_all_gather_in_start_param_sync",
        (PREFETCH,),
        "the first gathers are the first ops of the stream",
    ),
    (
        "built in",
        "megatron_fsdp_enable_fine_grained_param_gather",
        (PREFETCH,),
        "a bucket is of one layer, gathered and let go of by itself",
    ),
    (
        "not needed",
        "fsdp_double_buffer",
        (PREFETCH,),
        "a bucket keeps its storage, emptied and filled again; the stream bounds how many are full",
    ),
    (
        "not needed",
        "megatron_fsdp_max_pool_double_buffer",
        (PREFETCH,),
        "there is no pool of buffers, see fsdp_double_buffer",
    ),
    # number formats
    ("option", "preserve_fp32_weights", (MASTERS,), "fp32 copies, cut as the optimizer is"),
    ("option", "megatron_fsdp_main_params_dtype", (MASTERS,), "the type of these copies"),
    ("option", "megatron_fsdp_main_grads_dtype", (GRADS,), "the type gradients are added up in"),
    ("option", "megatron_fsdp_grad_comm_dtype", (GRADS,), "gradients are reduced in their type"),
    (
        "built in",
        "megatron_fsdp_use_decoupled_grad",
        (GRADS,),
        "an optimizer is given gradients, of whatever type; parameters carry none",
    ),
    # what only NVIDIA devices have
    ("refused", "fp8_param_gather", (), FP8),
    ("refused", "fp4_param_gather", (), FP8),
    ("refused", "reuse_grad_buf_for_mxfp8_param_ag", (), FP8),
    ("refused", "keep_fp8_transpose_cache", (), FP8),
    ("refused", "nccl_ub", (), NCCL),
    ("refused", "disable_symmetric_registration", (), NCCL),
    ("refused", "fsdp_manual_registration", (), NCCL),
    (
        "refused",
        "fsdp_db_use_persist_buf_on_alloc_fail",
        (),
        "it is about the pool of buffers that are registered with NCCL",
    ),
    (
        "refused",
        "megatron_fsdp_cuda_graph_mode",
        (),
        "it captures CUDA graphs, which other devices lack",
    ),
)
OPTIONS: dict[str, Option] = {
    name: Option(name, verdict, keys, why) for verdict, name, keys, why in _ROWS
}
"""By Megatron's name."""


def find(name: str) -> Option | None:
    """The row that is meant by a key or by a flag of Megatron's command line.

    Example:
      >>> found = find("--ddp-bucket-size")
      >>> found and found.keys
      ('parallel.bucket_size',)
    """
    plain = name.lstrip("-").replace("-", "_")
    return OPTIONS.get(plain) or OPTIONS.get(plain.removeprefix("ddp_"))

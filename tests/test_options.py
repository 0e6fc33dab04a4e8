"""Megatron's data-parallel options: each has a row, and the rows agree with the configuration."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from mfun.cli import main
from mfun.config import SECTIONS, ConfigError, ParallelConfig, from_toml, load, resolve
from mfun.config.options import OPTIONS, Option, find
from mfun.plan.memory import account
from mfun.train.plan import plan

DOCUMENT = """
overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer
num_distributed_optimizer_instances average_in_collective grad_reduce_in_fp32
reduce_scatter_with_fp32_accumulation check_for_nan_in_grad check_for_large_grads
gradient_reduce_div_fusion bucket_size pad_buckets_for_high_nccl_busbw fp8_param_gather
reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache use_megatron_fsdp
data_parallel_sharding_strategy outer_dp_sharding_strategy suggested_communication_unit_size
preserve_fp32_weights nccl_ub fsdp_double_buffer disable_symmetric_registration
delay_wgrad_compute use_custom_fsdp
""".split()
"""The tables of the documents' section on DistributedDataParallelConfig."""

NEWEST = """
grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather
use_distributed_optimizer num_distributed_optimizer_instances check_for_nan_in_grad
check_for_large_grads bucket_size num_buckets pad_buckets_for_high_nccl_busbw
reduce_scatter_with_fp32_accumulation param_name_patterns_for_fp32_local_accumulation
average_in_collective fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag
use_megatron_fsdp megatron_fsdp_version use_custom_fsdp data_parallel_sharding_strategy
gradient_reduce_div_fusion suggested_communication_unit_size keep_fp8_transpose_cache nccl_ub
fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync
outer_dp_sharding_strategy disable_symmetric_registration fsdp_manual_registration
delay_wgrad_compute megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype
megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
""".split()
"""Megatron-LM's own fields, at the newest version that was read."""

OTHER = set(
    """
    tp cp ep etp dp pp order chunks schedule microbatch_group in_flight layers_per_stage
    count_embedding count_loss sequence_parallel recompute recompute_layers offload
    offload_optimizer
    """.split()
)
"""Fields of the section parallel that are not about data parallelism's communication."""

CUDA_ONLY = """
fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache nccl_ub
disable_symmetric_registration fsdp_manual_registration fsdp_db_use_persist_buf_on_alloc_fail
megatron_fsdp_cuda_graph_mode
""".split()


def test_every_field_has_a_row() -> None:
    """The documents' and the newest ones, once each, and no other."""
    assert len(NEWEST) == 39
    assert sorted(OPTIONS) == sorted({*DOCUMENT, *NEWEST})


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_a_row_is_sound(option) -> None:
    """Its keys are there, an option has one, a refusal none, and everything has its reason."""
    for key in option.keys:
        section, _, name = key.partition(".")
        assert name in attrs.fields_dict(SECTIONS[section]), key
    assert option.keys or option.verdict != "option"
    assert not option.keys or option.verdict != "refused"
    assert len(option.why.split()) >= 2 and not option.why.endswith(".")


def test_every_key_of_data_parallelism_is_in_a_row() -> None:
    """A new field of the section is put into a row, or among the others."""
    named = {key.partition(".")[2] for option in OPTIONS.values() for key in option.keys}
    fields = set(attrs.fields_dict(ParallelConfig))
    assert fields >= OTHER
    assert fields - OTHER <= named, "give these a row in mfun/config/options.py"


def test_what_only_cuda_has_is_refused() -> None:
    """These and no others; what every device can do is not refused."""
    assert [o.name for o in OPTIONS.values() if o.verdict == "refused"] == CUDA_ONLY


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_setting_it_is_answered_with_its_row(name: str) -> None:
    """By setting, in a file, and as a flag; one whose name is ours too is led there."""
    why = "parallel.bucket_size" if name == "bucket_size" else OPTIONS[name].hint
    with pytest.raises(ConfigError, match=re.escape(why)):
        load("tiny", [f"optim.{name}=true"])
    with pytest.raises(ConfigError, match=re.escape(why)):
        from_toml(f"[optim]\n{name} = true")
    done = CliRunner().invoke(main, ["train", "--" + name.replace("_", "-")])
    assert done.exit_code == 2 and why in done.output


def test_refusals_say_why() -> None:
    """The reason itself, not only the name."""
    with pytest.raises(ConfigError, match=r"nccl_ub is refused: it registers buffers with NCCL"):
        load("tiny", ["parallel.nccl_ub=true"])
    with pytest.raises(ConfigError, match=r"fp8_param_gather is refused: .* tensor cores"):
        load("tiny", ["parallel.fp8_param_gather=true"])


def test_a_row_reads_as_a_sentence() -> None:
    """An option leads to its keys; another verdict to those that come nearest, if there are any."""
    assert Option("a", "option", ("x.b", "x.c"), "so").hint == "Megatron's a is x.b, x.c here: so."
    assert Option("a", "built in", ("x.b",), "so").hint == "Megatron's a is built in: so (see x.b)."
    assert Option("a", "refused", (), "it is so").hint == "Megatron's a is refused: it is so."


def test_flags_of_megatrons_command_line_are_found() -> None:
    """With their prefix; a name that is nobody's is not."""
    assert find("--ddp-average-in-collective") is OPTIONS["average_in_collective"]
    assert find("overlap") is None and find("") is None


def test_the_table_is_printed() -> None:
    """`mfun plan --options` has every name, verdict and key."""
    done = CliRunner().invoke(main, ["plan", "--options"])
    assert done.exit_code == 0
    told = " ".join(done.output.split())
    for option in OPTIONS.values():
        assert option.name in told and all(key in told for key in option.keys)
        assert option.why in told
        assert option.verdict == "option" or f"{option.name} {option.verdict}: " in told


# ---------------------------------------------------------------------- mfun plan


def mib(text: str) -> float:
    """Bytes as printed."""
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


def test_the_memory_table_is_the_account() -> None:
    """A row for each strategy, its own with a star; of the fullest stage."""
    words = ["tiny", "parallel.tp=1", "parallel.dp=2", "parallel.sharding=optim_grads"]
    done = CliRunner().invoke(main, ["plan", *words, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    head, *rows = done.output.splitlines()[1:6]
    names = head.split()[1:]
    assert [row.split()[0] for row in rows] == [
        "no_shard",
        "optim",
        "optim_grads*",
        "optim_grads_params",
    ]
    layout = plan(resolve(load("tiny", words[1:]), None))
    want = max((account(layout, s) for s in range(2)), key=lambda a: a.total)
    shown = re.findall(r"[\d.]+ [KMG]?i?B", rows[2])
    for name, text in zip(names, shown, strict=True):
        assert mib(text) == pytest.approx(getattr(want, name), rel=0.006), name


def test_a_strategy_that_does_not_go_is_refused_in_its_row() -> None:
    """The others are shown all the same."""
    done = CliRunner().invoke(main, ["plan", "tiny", "precision.compute=bf16"])
    assert done.exit_code == 0, done.output
    row = next(x for x in done.output.splitlines() if x.startswith("optim_grads_params"))
    assert "refused: precision.params is fp32 and precision.compute is bf16" in row
    assert "MiB" in next(x for x in done.output.splitlines() if x.startswith("optim_grads "))
    bad = CliRunner().invoke(main, ["plan", "tiny", "parallel.nccl_ub=true"])
    assert bad.exit_code == 1 and "refused: it registers buffers" in bad.output


def test_readme_shows_what_is_printed() -> None:
    """Its table is the command's output."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (words, table), *more = re.findall(r"\$ mfun plan (.*)\n((?:.+\n)+?)```", text)
    assert not more
    done = CliRunner().invoke(main, ["plan", *words.split()])
    assert done.output.startswith(table) and len(table.splitlines()) == 6

"""Planted faults: each breaks one thing in mfun and is caught by a named property.

A row is (name, plant, property, says, why): `plant(monkeypatch)` breaks mfun from outside,
`property` holds of mfun as it is and must fail with the fault, `says` is a pattern that the failure
must show, so that a report leads to the cause, and `why` what the fault would mean in training.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from mfun.comm import p2p
from mfun.comm.collectives import DUALS, Rule
from mfun.convert import Row
from mfun.grads.table import Kind
from mfun.pipeline import mailbox
from mfun.schedule import Recv, Send
from tests import checkpoint_properties as saved
from tests import convert_properties as convert
from tests import data_properties as datasets
from tests import extras_properties as inserted
from tests import func_properties as derivatives
from tests import memory_properties as memory
from tests import precision_properties as sixteen
from tests import properties as holds
from tests import sharding_properties as shards
from tests.planting import Plant, all_of, edit, put, row
from tests.properties import Property, train


class Fault(NamedTuple):
    """One row of the table."""

    name: str
    plant: Plant
    property: Property
    says: str
    why: str


# Tiny trainings that exercise what their settings say, compared with the reference.
ONE = train("dropout=0")
TP = train("tp=2")  # padded vocabulary, learned positions, tied
SEQUENCE = train("tp=2 sequence_parallel=true bias=all dropout=0.1")
BIAS = train("tp=2 bias=all steps=2 lr=0.1")
GROUPED = train("tp=4 heads=4 kv_heads=2 qk_norm=true position=rotary bias=qkv norm=rmsnorm")
QUERIES = train("heads=4 kv_heads=2 activation=swiglu position=rotary qk_norm=true")
DATA = train("dp=2 global_batch=6")  # unequal microbatches
MICROBATCH = train("dp=2 global_batch=6 loss_norm=microbatch")
STAGES = train("pp=2 layers=3 microbatches=3 global_batch=3 parallel.schedule=gpipe")
UNTIED = train("pp=2 layers=2 tied=false parallel.schedule=1f1b global_batch=3")
SPLIT = train("pp=2 layers=2 parallel.schedule=zb-h1 microbatches=3 global_batch=3", "plain")
CHUNKS = train("pp=2 layers=5 parallel.schedule=interleaved microbatches=3 global_batch=3")
WAVE = train("pp=2 layers=4 parallel.schedule=zbv microbatches=5 global_batch=5")
PLAIN = train("pp=2 layers=2 tied=false microbatches=3 global_batch=3", "plain")
WIDE = train("pp=2 layers=2 tied=false microbatches=1 global_batch=3", "plain")  # tokens > hidden
MESH = train("tp=2 dp=3 pp=2 layers=2 order=dp-tp-pp global_batch=3 microbatches=1 tied=false")
SHARDED = train("pp=2 dp=2 layers=2 global_batch=4 clip=0.05 parallel.sharding=optim steps=2")
SHARDED_GRADS = train("dp=2 layers=2 global_batch=4 parallel.sharding=optim_grads")
SHARDED_PARAMS = train("dp=2 layers=2 global_batch=4 parallel.sharding=optim_grads_params")
SHARD_COPIES = train(
    "dp=4 layers=2 clip=0.05 parallel.sharding=optim parallel.shard_copies=2 global_batch=8"
)
AHEAD = train(
    "dp=2 layers=2 global_batch=4 sharding=optim gather_ahead=true bucket_size=50 steps=3 lr=0.1",
    "threads",
)
AWAY = train("steps=3 lr=0.1 parallel.offload_optimizer=true bias=all")
SMOOTH = train("tp=2 label_smoothing=0.1 z_loss=0.01")
DROPOUT = train("tp=2 dp=2 dropout=0.2 steps=2")
WINDOW = train("sliding_window=2 position=none")
PACKED = train("packed=true")
PACKED_SEQUENCE = train("tp=2 packed=true sequence_parallel=true")
RECOMPUTE = train("dropout=0.2 recompute=full")
OVERLAP = train("pp=2 layers=2 dp=2 parallel.overlap=true bucket_size=100 tied=true", "threads")
OFFLOAD = train("layers=2 parallel.schedule=gpipe offload=1", "plain")
ADAM = train("steps=3 lr=0.1 weight_decay=0.5 bias=all")
CLIP = train("tp=2 pp=2 layers=2 clip=0.05")
SGD = train("name=sgd steps=3 clip=0.05 weight_decay=0.5")
MUON = train("name=muon tp=2 steps=2 lr=0.1")
MUON_HEADS = train("name=muon tp=4 heads=4 kv_heads=2 position=rotary steps=2 lr=0.1")
LION = train("name=lion steps=3 lr=0.1 weight_decay=0.5")
OVERRIDES = 'overrides={"embed.*"={lr=0.3},"*"={decay=2.0},"*norm*"={decay=0.5}}'
GROUPS = train(f"steps=2 lr=0.1 weight_decay=0.5 {OVERRIDES}")
GROUPS_SHARDED = train(f"dp=2 sharding=optim steps=2 lr=0.1 weight_decay=0.5 {OVERRIDES}")
FALLS = holds.train_all(
    *(
        f"steps=3 warmup=1 decay_steps=4 min_lr=0.01 lr=0.1 optim.schedule={name}"
        for name in ("constant", "linear", "cosine", "inverse_sqrt", "wsd")
    )
)
YARN = train("position=rotary rope_scaling=yarn rope_factor=4 rope_original=8 rope_beta_fast=4")
SCALED = holds.train_all(
    "position=rotary rope_scaling=linear rope_factor=4",
    "position=rotary rope_scaling=llama3 rope_factor=4 rope_original=64",
)
# The same as processes run it, each rank a thread.
RANKS = train("tp=2 pp=2 layers=2 bias=all", "threads")
RANKS_SEQUENCE = train("tp=2 sequence_parallel=true bias=all dropout=0.1", "threads")
RANKS_STAGES = train("pp=2 dp=2 layers=2 global_batch=6", "threads")
RANKS_GPIPE = train(
    "pp=2 layers=2 microbatches=3 global_batch=3 parallel.schedule=gpipe", "threads"
)
RANKS_LOSS = train("tp=2 label_smoothing=0.1 z_loss=0.01 packed=true", "threads")
RANKS_WINDOW = train("heads=4 kv_heads=2 sliding_window=2", "threads")


def rule(name: str, dual: str) -> Plant:
    """Another dual in a row of `DUALS`."""
    types, _, megatron = DUALS[name]
    return row("comm.collectives:DUALS", name, Rule(types, dual, megatron))


def kind(name: str, weight: Any) -> Plant:
    """Another weight in a row of `KINDS`."""
    return row("grads.table:KINDS", name, Kind(weight, ""))


def swap_messages(kind: str, to: int) -> Plant:
    """Microbatches 0 and 1 change places in the mailbox, tags unchanged."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = mailbox.MailboxWorld.post

        def post(self: Any, batch: Any, outgoing: Any, sizes: Any) -> None:
            original(self, batch, outgoing, sizes)
            boxes = self._office.boxes
            a, b = (kind, 0, to), (kind, 1, to)
            if a in boxes and any(op.tag == b for op in batch):
                boxes[a], boxes[b] = boxes[b], boxes[a]

        patch.setattr(mailbox.MailboxWorld, "post", post)

    return Plant("pipeline.mailbox:MailboxWorld.post", plant)


def send_second_first(patch: pytest.MonkeyPatch) -> None:
    """Each rank's transport holds back its first message and sends it after its second."""
    original = p2p.Transport.post

    def post(self: Any, batch: Any, outgoing: Any, sizes: Any) -> None:
        sends = [op for op in batch if isinstance(op, Send)]
        late = self.__dict__.setdefault("late", [])
        if sends and not late:
            late.append((sends, {op: outgoing[op] for op in sends}))
            batch = [op for op in batch if isinstance(op, Recv)]
        if batch:
            original(self, batch, outgoing, sizes)
        if sends and len(late) == 1 and late[0][0] != sends:
            late.append(None)
            first, messages = late[0]
            original(self, first, messages, sizes)

    patch.setattr(p2p.Transport, "post", post)


SECOND_FIRST = Plant("comm.p2p:Transport.post", send_second_first)


COLLECTIVES = (
    Fault(
        "copy's dual does not sum",
        rule("copy", "copy"),
        TP,
        r"`copy` \(I -> R\).* axis 'tp'",
        "Megatron's f without its all-reduce: the loss is right, gradients are one rank's part",
    ),
    Fault(
        "copy's dual does not sum, unchecked",
        rule("copy", "copy"),
        holds.every_collective,
        "copy's dual",
        "the same, seen by the collective's own law",
    ),
    Fault(
        "reduce's dual sums again",
        rule("reduce", "reduce"),
        TP,
        "2 times too large.* tp",
        "torch's all-reduce derivative: gradients tp times too large",
    ),
    Fault(
        "all_reduce's dual does not sum",
        rule("all_reduce", "copy"),
        holds.every_collective,
        "all_reduce's dual",
        "a metric used by each rank's loss loses the other ranks' use of it",
    ),
    Fault(
        "gather's dual only splits",
        rule("gather", "split"),
        SEQUENCE,
        r"`split`.* axis 'tp'",
        "sequence parallelism: each rank's tokens get one rank's share of the gradient",
    ),
    Fault(
        "reduce_scatter's dual has another dual",
        rule("reduce_scatter", "unsplit"),
        holds.second_derivatives,
        "cut along the sequence",
        "gather and unsplit give equal values: only the second derivative tells",
    ),
    Fault(
        "split's dual sums",
        rule("split", "reduce_scatter"),
        holds.every_collective,
        "split's|sizes",
        "a layer that cuts its own input",
    ),
    Fault(
        "unsplit's dual sums",
        rule("unsplit", "reduce_scatter"),
        holds.linear_variants,
        "column: gradient of",
        "a gathered output's gradient comes n times too large",
    ),
    Fault(
        "gathered output where an unsplit is meant",
        edit("nn.linear:column_linear", ("comm.unsplit(y, axis, -1)", "comm.gather(y, axis, -1)")),
        holds.linear_variants,
        "column: gradient of",
        "the two have equal values and other derivatives",
    ),
    Fault(
        "all_to_all's dual keeps its dims",
        edit("comm.collectives:dual_of", ("(params[1], params[0])", "params")),
        holds.every_collective,
        "all_to_all|sizes",
        "the gradient comes back permuted",
    ),
    Fault(
        "shift's dual goes the same way",
        edit("comm.collectives:dual_of", ("(-params[0],)", "params")),
        holds.every_collective,
        "shift's dual",
        "a ring's gradients land on the wrong rank",
    ),
    Fault(
        "broadcast's dual does not sum",
        rule("broadcast", "copy"),
        holds.every_collective,
        "broadcast's dual",
        "the root gets its own use of the value only",
    ),
    Fault(
        "collect's dual stays at home",
        rule("collect", "copy"),
        holds.every_collective,
        "collect's dual",
        "ranks other than the root get no gradient",
    ),
    Fault(
        "backward computes on the stack, without a dual of its own",
        edit(
            "comm.collectives:Ranked.backward",
            (
                "Ranked.apply(grad, axis, *dual_of(name, params), rank_dim)",
                "kernels.on_ranks(dual_of(name, params)[0], grad, axis, params, rank_dim)",
            ),
        ),
        holds.second_derivatives,
        "the product",
        "first derivatives are right, Hessian-vector products are not",
    ),
    Fault(
        "forward mode does not communicate",
        edit(
            "comm.collectives:Ranked.jvp", ("Ranked.apply(tangent, *ctx.static)", "tangent.clone()")
        ),
        holds.every_collective,
        "forward derivative",
        "jvp and Hessians by forward over reverse are one rank's part",
    ),
    Fault(
        "reduce_scatter does not sum",
        edit(
            "comm.kernels:_on_members",
            ("_cut(g.sum(1), dim, size, 1)", "_cut(g[:, 0], dim, size, 1)"),
        ),
        SEQUENCE,
        "loss off",
        "row layers return one rank's summand",
    ),
    Fault(
        "all_reduce averages",
        edit(
            "comm.kernels:_on_members",
            ("g.sum(1, keepdim=True).expand_as(g)", "g.mean(1, keepdim=True).expand_as(g)"),
        ),
        TP,
        "loss off",
        "the data-parallel habit, in a tensor-parallel region",
    ),
    Fault(
        "gather in the wrong order",
        edit(
            "comm.kernels:_on_members",
            ("whole = _glue(g, 1, dim)", "whole = _glue(g.flip(1), 1, dim)"),
        ),
        SEQUENCE,
        "loss off",
        "tokens of one rank under another's positions",
    ),
    Fault(
        "split takes the other end",
        edit(
            "comm.kernels:_on_members",
            ("_cut(g, dim, size, 2).diag", "_cut(g, dim, size, 2).flip(2).diag"),
        ),
        holds.linear_variants,
        "column|row",
        "a rank works on a piece that its weights do not belong to",
    ),
    Fault(
        "results go back to the ranks in group order",
        edit("comm.kernels:_ungrouped", ("_, inverse =", "inverse, _ =")),
        MESH,
        "axis 'tp'",
        "only seen where groups are not consecutive ranks",
    ),
    Fault(
        "the tp axis is the dp axis",
        edit("comm.groups:Groups.tp", ('self.over("tp")', 'self.over("dp")')),
        train("tp=2 dp=2"),
        "axis 'dp'",
        "a process group built from the wrong ranks",
    ),
)

REDUCTIONS = (
    Fault(
        "the data-parallel row is skipped",
        put("grads.table:DATA_AXES", ("cp",)),
        DATA,
        r"embed\.tokens.*sum over dp is missing",
        "data ranks train apart",
    ),
    Fault(
        "data-parallel gradients are averaged",
        kind("data", lambda size: 1.0 / size),
        DATA,
        r"embed\.tokens.*2 times too small.*dp",
        "the token count already is the global one",
    ),
    Fault(
        "the tensor-parallel row is skipped",
        put("grads.table:MODEL_AXES", ()),
        SEQUENCE,
        r"norm1\.weight.*sum over tp is missing",
        "norms train apart under sequence parallelism",
    ),
    Fault(
        "equal gradients have weight 1",
        kind("equal", lambda size: 1.0),
        TP,
        r"norm1\.weight.*2 times too large.*tp",
        "norm gradients tp times too large",
    ),
    Fault(
        "partial gradients are averaged",
        kind("partial", lambda size: 1.0 / size),
        SEQUENCE,
        r"norm1\.weight.*2 times too small.*tp",
        "norm gradients tp times too small",
    ),
    Fault(
        "repeated heads are averaged",
        kind("repeated", lambda size: 1.0 / size),
        GROUPED,
        r"attn\.kv: .*2 times too small.*tp",
        "key and value heads fewer than tp",
    ),
    Fault(
        "repeated heads are not summed",
        edit("spec:others", ("if axis not in named:", "if axis not in named and not halves:")),
        GROUPED,
        r"attn\.kv: .*tp",
        "a rank's copy of a key head sees its own query heads only",
    ),
    Fault(
        "repeated heads declared equal",
        edit("models.specs:_grouped", ('{cut.inner: "partial"}', '{cut.inner: "equal"}')),
        GROUPED,
        r"attn\.kv: .*tp",
        "the same by declaration",
    ),
    Fault(
        "repeated heads are the other ranks'",
        edit(
            "spec:axis_index",
            (
                'at // inner if axis.part == "outer" else at % inner',
                'at % inner if axis.part == "outer" else at // inner',
            ),
        ),
        GROUPED,
        r"attn\.kv",
        "query heads use the key head of another group",
    ),
    Fault(
        "averaged gradients are summed",
        kind("mean", lambda size: 1.0),
        holds.declared_mean,
        "gradient of w",
        "a row for parameters that are averaged by declaration",
    ),
    Fault(
        "tied stages are averaged",
        kind("tied", lambda size: 1.0 / size),
        STAGES,
        r"embed\.tokens.*2 times too small.*pp",
        "embedding and head each give a summand",
    ),
    Fault(
        "tied stages are not joined",
        edit(
            "grads.table:Reduction.joined",
            ("self.stages if len(self.stages) > 1 else None", "None"),
        ),
        STAGES,
        r"embed\.tokens.*pp",
        "the two copies of a tied table drift apart",
    ),
    Fault(
        "norms under sequence parallelism declared equal",
        edit(
            "models.specs:_replicated",
            ('"partial" if config.parallel.sequence_parallel else "equal"', '"equal"'),
        ),
        SEQUENCE,
        r"final_norm\.weight.*tp",
        "GPT-NeoX: the loss stalls, since norms see their own tokens only",
    ),
    Fault(
        "norms without sequence parallelism declared partial",
        edit(
            "models.specs:_replicated",
            ('"partial" if config.parallel.sequence_parallel else "equal"', '"partial"'),
        ),
        TP,
        r"final_norm\.weight.*2 times too large.*tp",
        "the opposite mistake",
    ),
    Fault(
        "position table under sequence parallelism declared equal",
        edit("models.specs:embedding_specs", ("grad=_replicated(config)", 'grad={"tp": "equal"}')),
        SEQUENCE,
        r"embed\.positions.*tp",
        "each rank adds positions to its own tokens only",
    ),
    Fault(
        "q and k norms declared equal",
        edit("models.specs:_attention", ('"grad": {"tp": "partial"}', '"grad": {"tp": "equal"}')),
        GROUPED,
        r"attn\.q_norm.*tp",
        "they act on this rank's heads, with or without sequence parallelism",
    ),
    Fault(
        "row bias under sequence parallelism declared equal",
        edit("models.specs:_attention", ("P(), _replicated(config)", 'P(), {"tp": "equal"}')),
        SEQUENCE,
        r"attn\.out_bias.*tp",
        "a bias added to this rank's tokens",
    ),
    Fault(
        "second row bias under sequence parallelism declared equal",
        edit("models.specs:_mlp", ("P(), _replicated(config)", 'P(), {"tp": "equal"}')),
        SEQUENCE,
        r"mlp\.down_bias.*tp",
        "the same in the feed-forward layer",
    ),
    Fault(
        "an undeclared gradient counts as equal",
        edit(
            "grads.table:_declared",
            ("    raise ValueError(", '    return "equal"\n    raise ValueError('),
        ),
        holds.undeclared,
        "not refused",
        "a new layer's forgotten declaration would train wrongly",
    ),
    Fault(
        "finalize's weights are applied twice",
        edit(
            "grads.buffers:GradBuffers.close", ("view.mul_(weight)", "view.mul_(weight * weight)")
        ),
        TP,
        r"norm1\.weight.*2 times too small.*tp",
        "once before and once after the sum",
    ),
    Fault(
        "finalize's weights are forgotten",
        edit("grads.buffers:GradBuffers.close", ("if weight != 1.0:", "if False:")),
        TP,
        r"norm1\.weight.*2 times too large.*tp",
        "equal gradients are summed",
    ),
    Fault(
        "the first bucket is not reduced",
        edit(
            "grads.finalize:finalize_steps",
            ("if not grads.reduced(i)]", "if i and not grads.reduced(i)]"),
        ),
        DATA,
        "sum over dp is missing",
        "a bucket skipped by an overlap that thought it done",
    ),
    Fault(
        "the reduced bucket is thrown away",
        edit("grads.finalize:finalize_steps", ("if whole is not grads.buffers[i]:", "if False:")),
        DATA,
        "sum over dp is missing",
        "the sum went to a temporary",
    ),
    Fault(
        "the tree form of finalize forgets weights",
        edit("grads.finalize:finalize", ("grad if weight == 1.0 else grad * weight", "grad")),
        derivatives.finalized,
        "gradient of mean",
        "research code under simulate",
    ),
    Fault(
        "the tree form of finalize forgets the sum",
        edit("grads.finalize:finalize", ("if summed or row.joined:", "if False:")),
        holds.finalized_tree,
        "gradient of",
        "the same",
    ),
    Fault(
        "leaves of different groups share a bucket",
        edit(
            "grads.buffers:lay_out",
            ("*table[path].group,", ""),
        ),
        SEQUENCE,
        r"mlp\.up: gradient off",
        "matrices are summed over tp along with norms",
    ),
    Fault(
        "what does not decay is one bucket of all layers",
        edit(
            "grads.buffers:lay_out",
            ("own = [(path, x, layers.get(path))", "own = [(path, x, apart.get(path))"),
        ),
        shards.kinds_close_together,
        "waits for layer",
        "its reduction is exposed after the backward",
    ),
    Fault(
        "leaves of layers whose memory comes and goes share a turn",
        edit(
            "grads.buffers:lay_out",
            ("own = [(path, x, layers.get(path))", "own = [(path, x, None)"),
        ),
        shards.layers_share_no_bucket,
        "is of the layers",
        "a gradient buffer of all layers is held until the last",
    ),
    Fault(
        "bucket order differs by stage",
        edit(
            "grads.buffers:GradBuffers.order",
            ("sorted(range(len(self.buckets)), key=rank)", "list(range(len(self.buckets)))"),
        ),
        holds.tied_in_any_order,
        "gradient of",
        "stages reduce one tied tensor into another, or hang",
    ),
    Fault(
        "buffer views overlap",
        edit(
            "flat:_Filling.add",
            ("start = round_up(self.used, self.align)", "start = max(0, self.used - 1)"),
        ),
        ONE,
        "gradient off",
        "a span off by one",
    ),
    Fault(
        "microbatch gradients are overwritten",
        edit("grads.buffers:GradBuffers.add", ("view.add_(grad)", "view.copy_(grad)")),
        ONE,
        "gradient off",
        "only the last microbatch counts",
    ),
    Fault(
        "the window does not start",
        edit("grads.buffers:GradBuffers.start", ("self._fresh = set(self.views)", "pass")),
        ONE,
        "gradient norm off",
        "gradients of the previous step are added to",
    ),
    Fault(
        "the window is not closed",
        edit("grads.buffers:GradBuffers.close", ("view.zero_()", "pass")),
        holds.unused_leaves,
        "gradient of z",
        "a leaf that was not used keeps a stale gradient",
    ),
    Fault(
        "the norm counts replicas per rank",
        edit("grads.finalize:owns", ("float(first and stage", "float(stage")),
        TP,
        "gradient norm off",
        "norms 1.4 times too large with tp, and clipping with them",
    ),
    Fault(
        "the norm counts tied leaves per stage",
        edit("grads.finalize:owns", (" and stage == row.stages[0]", "")),
        STAGES,
        "gradient norm off",
        "tied tables counted twice",
    ),
    Fault(
        "the norm drops what is left of its pieces",
        edit("grads.finalize:sum_of_squares", ("return total + ", "return total + 0.0 * ")),
        holds.norm_of_long_buffers,
        "sum over 2053 elements",
        "up to 1023 elements of a bucket do not count",
    ),
    Fault(
        "the norm is not summed over tp",
        edit("grads.finalize:global_norm", ('else ("tp",)', "else ()")),
        TP,
        "gradient norm off",
        "each rank clips by its own norm",
    ),
    Fault(
        "the norm is not summed over stages",
        edit("grads.finalize:global_norm", ("axes, everywhere)", "axes, None)")),
        CLIP,
        "gradient norm off",
        "each stage clips by its own norm, replicas drift apart",
    ),
)

NORMALISATION = (
    Fault(
        "token count of this rank",
        edit("grads.normalise:seeds", ('("dp", "cp")', '("cp",)')),
        DATA,
        "loss off",
        "a sample's weight depends on its neighbours' lengths",
    ),
    Fault(
        "token count divided again by dp",
        edit(
            "grads.normalise:seeds",
            ("1.0 / total.clamp(min=1.0)", "1.0 / total.clamp(min=1.0) / world.mesh.dp"),
        ),
        DATA,
        "2 times too small.*dp",
        "torchtune and fairseq after moving to global counts",
    ),
    Fault(
        "microbatch means where tokens are asked for",
        edit("grads.normalise:seeds", ("match norm:", 'match "microbatch":')),
        ONE,
        "loss off",
        "the published accumulation bug of the Hugging Face trainer",
    ),
    Fault(
        "token mean where microbatch means are asked for",
        edit("grads.normalise:seeds", ("match norm:", 'match "tokens":')),
        MICROBATCH,
        "loss off",
        "the option does nothing",
    ),
    Fault(
        "microbatch means are not divided by data ranks",
        edit("grads.normalise:seeds", (" * len(counts) * ranks", " * len(counts)")),
        MICROBATCH,
        "2 times too large.*dp",
        "the learning rate grows with dp",
    ),
    Fault(
        "microbatch means are not divided by their number",
        edit("grads.normalise:seeds", (" * len(counts) * ranks", " * ranks")),
        MICROBATCH,
        "loss off",
        "the learning rate grows with accumulation",
    ),
    Fault(
        "a batch without a valid token divides by 0",
        edit("grads.normalise:seeds", ("1.0 / total.clamp(min=1.0)", "1.0 / total")),
        holds.no_tokens,
        "nan",
        "one empty batch turns all weights into NaN",
    ),
    Fault(
        "a lone token counts half",
        edit("grads.normalise:seeds", ("total.clamp(min=1.0)", "total.clamp(min=2.0)")),
        holds.no_tokens,
        "lone token",
        "a guard against 0 that changes other counts",
    ),
    Fault(
        "a microbatch without a valid token divides by 0",
        edit("grads.normalise:seeds", ("count.clamp(min=1.0)", "count")),
        holds.no_tokens,
        "nan",
        "the same with microbatch means",
    ),
    Fault(
        "masked tokens are counted",
        edit(
            "train.step:count_tokens",
            ('batch["mask"].double()', 'torch.ones_like(batch["mask"]).double()'),
        ),
        ONE,
        "loss off",
        "padding dilutes the loss",
    ),
    Fault(
        "masked tokens are learned from",
        edit("models.gpt:apply_loss", ('ctx.batch["mask"]', 'ctx.batch["mask"] * 0 + 1')),
        ONE,
        "loss off",
        "padding is trained on",
    ),
    Fault(
        "the reported loss is this data rank's",
        edit("train.step:Trainer._total", ('("dp", "cp"), everywhere', "(), everywhere")),
        DATA,
        "loss off",
        "training is right, its curve is not",
    ),
    Fault(
        "the reported loss stays on the last stage",
        edit("train.step:Trainer._total", ('("dp", "cp"), everywhere', '("dp", "cp"), None')),
        UNTIED,
        "loss off",
        "rank 0 logs 0",
    ),
    Fault(
        "evaluation averages microbatch means",
        edit("train.step:Trainer.evaluate", ('"tokens")', '"microbatch")')),
        holds.evaluation,
        "validation loss",
        "torchtitan: the training wrapper reused for validation",
    ),
    Fault(
        "evaluation with dropout",
        edit(
            "pipeline.executor:evaluate",
            (
                "program.layer(layers[i], batches[mb], None)",
                'program.layer(layers[i], batches[mb], Key(0, ("dropout", 0)))',
            ),
        ),
        holds.evaluation,
        "validation loss",
        "a model left in training mode",
    ),
)

PIPELINE = (
    Fault(
        "backward starts without the seed",
        edit(
            "pipeline.executor:train_step",
            ("seeds[mb].to(losses[mb].dtype)", "torch.ones_like(seeds[mb])"),
        ),
        UNTIED,
        "gradient off",
        "gradients of the sum, not of the mean: too large by the token count",
    ),
    Fault(
        "every microbatch has the first one's seed",
        edit("pipeline.executor:train_step", ("seeds[mb].to", "seeds[0].to")),
        MICROBATCH,
        "gradient off",
        "seen only where microbatches differ in length",
    ),
    Fault(
        "a stage reads another microbatch's labels",
        edit(
            "pipeline.executor:train_step",
            ("layers[i], batches[mb]", "layers[i], batches[0]"),
        ),
        STAGES,
        "loss off",
        "activations and labels of different samples",
    ),
    Fault(
        "two activations are swapped",
        swap_messages("act", 1),
        STAGES,
        "loss off",
        "messages without tags arrive in another order",
    ),
    Fault(
        "two gradients are swapped",
        swap_messages("grad", 0),
        STAGES,
        r"blocks\.0.*gradient off",
        "the same on the way back: the loss is right",
    ),
    Fault(
        "a stage cut drops a block",
        edit("pipeline.stage:cut", ("for b in part] for part", "for b in part[:1]] for part")),
        STAGES,
        r"no stage holds blocks\.",
        "uneven stages",
    ),
    Fault(
        "a stage cut repeats a block",
        edit(
            "pipeline.stage:cut",
            ("for b in part] for part", "for b in [*part, part[-1]]] for part"),
        ),
        UNTIED,
        "loss off",
        "the model is deeper than it says",
    ),
    Fault(
        "a stage runs its blocks backwards",
        edit(
            "pipeline.stage:cut", ("for b in part] for part", "for b in reversed(part)] for part")
        ),
        STAGES,
        "loss off",
        "all parameters are there, in another order",
    ),
    Fault(
        "a window's first product adds to the last window's",
        edit("grads.buffers:GradBuffers.claim", ("int(path not in self._fresh)", "1")),
        PLAIN,
        "off by",
        "main_grad not zeroed",
    ),
    Fault(
        "every product replaces the one before",
        edit("grads.buffers:GradBuffers.claim", ("int(path not in self._fresh)", "0")),
        PLAIN,
        "gradient off",
        "fused accumulation with beta = 0: right with one microbatch",
    ),
    Fault(
        "the head's gradient is not scaled",
        edit(
            "nn.weight_grads:_add_scaled",
            ("torch.mul(dw, by, out=view)", "view.copy_(dw)"),
        ),
        WIDE,
        "gradient off",
        "a gradient computed along with the loss, before the loss has its factor",
    ),
    Fault(
        "the head's late product is not scaled",
        edit("nn.weight_grads:_add_product", ("by * x_ni", "x_ni")),
        PLAIN,
        "gradient off",
        "the same where the product waits",
    ),
    Fault(
        "a table's rows are added to the step before's",
        edit("nn.weight_grads:_add_rows", ("view.zero_()", "None")),
        train("pp=2 layers=2 tied=false steps=2", "plain"),
        "off",
        "a gradient buffer that is not zeroed",
    ),
    Fault(
        "a row looked up twice gets one gradient",
        edit("nn.weight_grads:_add_rows", ("view.index_add_", "view.index_copy_")),
        PLAIN,
        "gradient off",
        "indexed assignment in place of accumulation",
    ),
    Fault(
        "W runs nothing",
        edit("pipeline.flight:Flight.weights", ("layer.sink.run()", "None")),
        SPLIT,
        "gradient off",
        "the products left for W are dropped",
    ),
    Fault(
        "only the last product left for W is run",
        edit("nn.weight_grads:WeightGrads.run", ("while self._kept", "if self._kept")),
        SPLIT,
        "gradient off",
        "a global queue that is popped once too rarely",
    ),
    Fault(
        "the first chunk runs in every chunk's place",
        edit(
            "pipeline.executor:train_step",
            ("virtual(chunk), stage.chunks[chunk]", "virtual(chunk), stage.chunks[0]"),
        ),
        CHUNKS,
        "KeyError|loss off|got an unexpected|h",
        "interleaved: the wrong model chunk",
    ),
    Fault(
        "an activation is handed to the wrong place of its own stage",
        edit(
            "pipeline.executor:_Mail.incoming", ("self._made.pop(tag)", "self._made.popitem()[1]")
        ),
        WAVE,
        "loss off|gradient off|KeyError",
        "a wave's turning point under several microbatches",
    ),
    Fault(
        "key and value weights get one another's product",
        edit(
            "nn.weight_grads:WeightGrads.product",
            ("zip(parts, columns", "zip(parts[::-1], columns"),
        ),
        train("vocab=17 heads=2 kv_heads=1 tied=false microbatches=2", "plain"),
        "size|shape|gradient off",
        "two weights multiplied as one",
    ),
    Fault(
        "recompute with another dropout key",
        edit(
            "pipeline.program:Program.layer",
            (
                "batch, key, self",
                'batch, key.fold("again") if key and __import__("torch").is_grad_enabled() '
                "else key, self",
            ),
        ),
        RECOMPUTE,
        "gradient off",
        "a generator's state was not put back",
    ),
    Fault(
        "recompute ignored",
        edit("train.extras:recomputed", ('config.parallel.recompute == "full"', "False")),
        holds.recompute_runs_twice,
        "calls",
        "the numbers are right, the memory is not",
    ),
    Fault(
        "an unused message has no gradient",
        edit("pipeline.pullback:autograd_layer", ("torch.zeros_like(v) if g is None else g", "g")),
        holds.unused_message,
        "None",
        "a stage that passes a tensor by",
    ),
    Fault(
        "the mailbox sums over the wrong ranks",
        edit(
            "pipeline.mailbox:MailboxWorld._within", ("stage_groups(*axes)", 'stage_groups("tp")')
        ),
        MESH,
        "dp",
        "a data-parallel sum over tensor-parallel ranks",
    ),
    Fault(
        "a sum over stages keeps one stage's",
        edit("pipeline.mailbox:MailboxWorld.all_reduce", ("parts.sum(0)", "parts[0]")),
        STAGES,
        r"embed\.tokens",
        "the tied table's gradient is the embedding's alone",
    ),
    Fault(
        "1f1b warms up by one microbatch too many",
        edit(
            "schedule.generators:one_f_one_b",
            ("min(sizes.stages - stage - 1,", "min(sizes.stages - stage,"),
        ),
        holds.schedules,
        "in flight",
        "a stage keeps one more microbatch than planned",
    ),
    Fault(
        "1f1b warms up by one microbatch too few",
        edit(
            "schedule.generators:one_f_one_b",
            ("min(sizes.stages - stage - 1,", "min(max(0, sizes.stages - stage - 2),"),
        ),
        holds.schedules,
        "end at",
        "right numbers, at the price of a bubble",
    ),
    Fault(
        "1f1b forgets the last backwards",
        edit(
            "schedule.generators:one_f_one_b",
            ("range(microbatches - warmup, microbatches)", "range(0)"),
        ),
        holds.schedules,
        "never runs",
        "the gradients of the first microbatches are lost",
    ),
    Fault(
        "gradients are sent forward",
        edit("schedule.streams:gives", ('("grad", mb, virtual - 1)', '("grad", mb, virtual)')),
        holds.schedules,
        "grad",
        "a message nobody waits for",
    ),
    Fault(
        "the checker sees no deadlock",
        edit("schedule.check:check", ("if stuck := rendezvous(plain):", "if stuck := ():")),
        holds.bad_schedules,
        "a deadlock was not refused",
        "a bad schedule would hang on a cluster instead",
    ),
    Fault(
        "the checker accepts streams that end early",
        edit("schedule.check:_check_stage", ("if wrong := walk.ending():", "if False:")),
        holds.bad_schedules,
        "not refused",
        "a microbatch without backward",
    ),
    Fault(
        "the checker lets an op run twice",
        edit("schedule.walk:Walk.compute", ("if ran !=", "if ran & _BEFORE[kind] !=")),
        holds.bad_schedules,
        "a backward twice was not refused",
        "a gradient is added twice",
    ),
    Fault(
        "interleaved warms up by one chunk too few",
        edit("schedule.looped:warmup", ("(sizes.chunks - 1) * size", "(sizes.chunks - 2) * size")),
        holds.schedules,
        "runs before F",
        "the first backward is of the last chunk, which has not run",
    ),
    Fault(
        "a rest of a group of microbatches is a group",
        edit("schedule.looped:groups", ("rest >= sizes.stages", "rest > 0")),
        holds.schedules,
        "end at|deadlock",
        "Megatron's order of few microbatches, which it refuses",
    ),
    Fault(
        "looped backwards begin at the first chunk",
        edit("schedule.looped:interleaved", ("sizes.chunks - 1 - chunk", "chunk")),
        holds.schedules,
        "runs before|deadlock",
        "the loss is on the last chunk",
    ),
    Fault(
        "DualPipe's second half is not mirrored",
        edit("schedule.dual:dualpipe", ("(kind, 1 - way)", "(kind, way)")),
        holds.schedules,
        "deadlock|end at|in flight",
        "both ends must feed what is near to them",
    ),
    Fault(
        "DualPipe drops the last weights",
        edit("schedule.dual:_steps", ("yield from [(W, 0)] * upto", "yield from []")),
        holds.schedules,
        "never runs W",
        "gradients of the last microbatches are lost",
    ),
    Fault(
        "nobody gives way when all stages wait in a send",
        edit("schedule.messages:_Writer.unblock", ("while self.overdue:", "while False:")),
        holds.schedules,
        "runs before its input",
        "both neighbours wait in a send",
    ),
    Fault(
        "evaluation runs a wave chunk by chunk, the last first",
        edit(
            "schedule.generators:forward_only", ("place.slice(virtual), -op.chunk", "-op.chunk, 0")
        ),
        holds.schedules,
        "deadlock",
        "the second chunk needs what the first makes",
    ),
    Fault(
        "weights are delayed by one backward too many",
        edit("schedule.split:split", ("len(later) > delay", "len(later) > delay + 1")),
        holds.split_backwards,
        "split by one",
        "one more microbatch is kept",
    ),
    Fault(
        "a gradient leaves only after the weights' products",
        edit("schedule.split:sends_first", ("!= stage}", "== stage}")),
        holds.split_backwards,
        "that is sent the backward is",
        "the stage that waits for it begins later",
    ),
    Fault(
        "merging loses a lonely backward",
        edit(
            "schedule.split:merge",
            ("if held:\n            yield held", "if 0: yield"),
        ),
        holds.split_backwards,
        "merged it is",
        "the last gradient to the inputs",
    ),
)

MODEL = (
    Fault(
        "column layers do not enter the region",
        edit(
            "nn.linear:ColumnLinear.forward",
            ("enter(x, _at(axis, index), sequence_parallel)", "x"),
        ),
        TP,
        "tp",
        "without f: only gradients are wrong",
    ),
    Fault(
        "row layers do not leave the region",
        edit("nn.linear:leave", ("comm.reduce(x, axis)", "x")),
        TP,
        "axis 'tp'",
        "each rank goes on with its own summand",
    ),
    Fault(
        "row bias added before the sum",
        edit(
            "nn.linear:RowLinear.forward",
            (
                "_summed_product(x, w, _at(axis, index), sequence_parallel)",
                "leave_fresh(F.linear(x, w, b), _at(axis, index), sequence_parallel)",
            ),
            ("y if b is None else y + b", "y"),
        ),
        BIAS,
        "loss|_bias",
        "outputs off by (tp - 1) times the bias",
    ),
    Fault(
        "row bias missing",
        edit("nn.linear:RowLinear.forward", ("y if b is None else y + b", "y")),
        BIAS,
        r"(out|down)_bias",
        "a parameter that never learns",
    ),
    Fault(
        "column bias missing",
        edit("nn.mlp:mlp", ("None if bias is None else bias.flatten()", "None")),
        BIAS,
        r"up_bias",
        "the same in a column layer",
    ),
    Fault(
        "gate and value are exchanged",
        edit("nn.mlp:activate", ("gate, value = h", "value, gate = h")),
        QUERIES,
        "loss off",
        "a checkpoint of another system would be read wrongly",
    ),
    Fault(
        "embedding without the mask",
        edit(
            "nn.embedding:vocab_embedding",
            ("rows_bsd.masked_fill(foreign_bs.unsqueeze(-1), 0.0)", "rows_bsd"),
        ),
        TP,
        "loss off",
        "tokens of other ranks add row 0",
    ),
    Fault(
        "embedding shard starts one row late",
        edit(
            "nn.embedding:vocab_embedding",
            ("axis.index * w_vd.shape[0]", "axis.index * (w_vd.shape[0] + 1)"),
        ),
        TP,
        "loss off",
        "off by one at the cut of the vocabulary",
    ),
    Fault(
        "positions of a shard start at 0",
        edit(
            "nn.embedding:position_embedding",
            (
                "coordinates(length // axis.size, axis)",
                "coordinates(length // axis.size, axis) - axis.index * (length // axis.size)",
            ),
        ),
        SEQUENCE,
        "loss off",
        "sequence parallelism: every rank thinks it is first",
    ),
    Fault(
        "learned positions do not restart with documents",
        edit("models.gpt:apply_embedding", ('ctx.batch.get("positions")', "None")),
        PACKED,
        "loss off",
        "packed documents",
    ),
    Fault(
        "learned positions of a shard do not restart with documents",
        edit(
            "nn.embedding:position_embedding", ("    if positions_bs is not None:", "    if False:")
        ),
        PACKED_SEQUENCE,
        "loss off",
        "packed documents, cut along the sequence",
    ),
    Fault(
        "documents see each other",
        edit("models.gpt:_self_attention", ('ctx.batch.get("documents")', "None")),
        PACKED,
        "loss off",
        "packed documents",
    ),
    Fault(
        "documents see each other, fused",
        edit("models.gpt:_self_attention", ('ctx.batch.get("documents")', "None")),
        RANKS_LOSS,
        "loss off",
        "the same on processes",
    ),
    Fault(
        "causal mask off by one",
        edit("nn.attention:_plain", (".tril()", ".tril(1)")),
        TP,
        "loss off",
        "a token sees the next one",
    ),
    Fault(
        "causal mask off by one, fused",
        edit("nn.attention:attention", ("is_causal=mask is None", "is_causal=False")),
        RANKS,
        "loss off",
        "a token sees all",
    ),
    Fault(
        "causal mask off by one, with documents",
        edit("nn.attention:attention_mask", ("back_st >= 0", "back_st >= -1")),
        PACKED,
        "loss off",
        "a token sees the next one",
    ),
    Fault(
        "sliding window ignored",
        edit("nn.attention:attention_mask", ("if window > 0:", "if False:")),
        WINDOW,
        "loss off",
        "a setting that does nothing",
    ),
    Fault(
        "sliding window off by one",
        edit("nn.attention:attention_mask", ("back_st < window", "back_st <= window")),
        WINDOW,
        "loss off",
        "the window does not count the query itself",
    ),
    Fault(
        "sliding window off by one, fused",
        edit("nn.attention:attention_mask", ("back_st < window", "back_st <= window")),
        RANKS_WINDOW,
        "loss off",
        "the same on processes",
    ),
    Fault(
        "keys and values are exchanged",
        edit(
            "nn.attention:project_qkv", ("key, value = rearrange(kv", "value, key = rearrange(kv")
        ),
        QUERIES,
        "loss off",
        "grouped heads have their own path",
    ),
    Fault(
        "query heads use another group's keys",
        edit(
            "nn.attention:_plain",
            ("h // g * s, q_bhsk.shape[-1])", "h // g * s, q_bhsk.shape[-1]).flip(-3)"),
        ),
        QUERIES,
        r"attn\.q: gradient off",
        "head i uses key head i g / h",
    ),
    Fault(
        "keys are not normalised",
        edit(
            "models.gpt:_self_attention",
            ('k = rms_norm(k, params["k_norm"], config.model.norm_eps)', "pass"),
        ),
        QUERIES,
        "k_norm|loss off",
        "a parameter that never learns",
    ),
    Fault(
        "rope scaling ignored",
        edit("nn.rotary:frequencies", ("match model.rope_scaling:", 'match "none":')),
        SCALED,
        "loss off",
        "a setting that does nothing",
    ),
    Fault(
        "llama3 scaling stretches all waves",
        edit(
            "nn.rotary:frequencies",
            ("torch.lerp(stretched, plain, _llama3_keep(plain, model))", "stretched"),
        ),
        SCALED,
        "loss off",
        "the ramp is not applied",
    ),
    Fault(
        "yarn's factor is dropped",
        edit("nn.rotary:frequencies", ("_yarn_keep(model)), factor", "_yarn_keep(model)), 1.0")),
        YARN,
        "loss off",
        "cosines and sines are not scaled",
    ),
    Fault(
        "the tied head gives no gradient",
        edit(
            "models.gpt:_head_weight",
            ('params["embed"]["tokens"]', 'params["embed"]["tokens"].detach()'),
        ),
        STAGES,
        r"embed\.tokens",
        "the table learns as an embedding only",
    ),
    Fault(
        "logits keep the padding",
        edit("models.gpt:apply_logits", ("[..., : config.model.vocab]", "")),
        holds.whole_logits,
        "logits",
        "sampling can draw a token that does not exist",
    ),
)

LOSS = (
    Fault(
        "loss without the global maximum",
        edit("nn.loss:statistics", ("comm.max(z.detach().amax(-1), axis)", "z.detach().amax(-1)")),
        TP,
        "loss off",
        "ranks sum exponentials of different scales",
    ),
    Fault(
        "loss takes a label's logit from every shard",
        edit("nn.loss:statistics", (".squeeze(-1).where(columns.owned, 0.0)", ".squeeze(-1)")),
        TP,
        "loss off",
        "labels of other ranks pick column 0",
    ),
    Fault(
        "label ownership off by one",
        edit("nn.loss:columns_of", ("local < width", "local <= width")),
        TP,
        "out of bounds",
        "the first label of the next shard is counted twice, or read out of bounds",
    ),
    Fault(
        "padded columns are summed",
        edit("nn.loss:columns_of", ("if width * axis.size != rule.vocab:", "if False:")),
        TP,
        "loss off",
        "padding is a class of its own",
    ),
    Fault(
        "label smoothing over the local vocabulary",
        edit("nn.loss:TokenLoss.__call__", ("self.vocab * total", "-(-self.vocab // 2) * total")),
        SMOOTH,
        "loss off",
        "Megatron-LM: the size was taken from the local shard",
    ),
    Fault(
        "label smoothing ignored",
        edit("nn.loss:TokenLoss.__call__", ("if self.label_smoothing:", "if False:")),
        SMOOTH,
        "loss off",
        "a setting that does nothing",
    ),
    Fault(
        "label smoothing counts padding",
        edit(
            "nn.loss:statistics",
            ("on_real(z, columns, 0.0).sum(-1)", "z.nan_to_num(neginf=1.0).sum(-1)"),
        ),
        SMOOTH,
        "loss off",
        "padded columns enter the mean",
    ),
    Fault(
        "z-loss dropped",
        edit("nn.loss:TokenLoss.__call__", ("if self.z_loss else loss", "if False else loss")),
        SMOOTH,
        "loss off",
        "a setting that does nothing",
    ),
    Fault(
        "chunked head without the global maximum",
        edit("nn.head:_differentiate_", ("comm.max(z.amax(-1), axis)", "z.amax(-1)")),
        RANKS_LOSS,
        "loss off",
        "the code that processes run",
    ),
    Fault(
        "chunked head picks labels of every shard",
        edit("nn.head:_differentiate_", ("squeeze(-1).where(columns.owned, 0.0)", "squeeze(-1)")),
        RANKS_LOSS,
        "loss off",
        "the same",
    ),
    Fault(
        "chunked head drops the label's gradient elsewhere too",
        edit("nn.head:_differentiate_", (" * weights).where(columns.owned, 0.0)", " * weights)")),
        RANKS_LOSS,
        "gradient off",
        "the loss is right, its gradient is not",
    ),
    Fault(
        "chunked head forgets z-loss in the gradient",
        edit("nn.head:_differentiate_", ("(1.0 + 2.0 * rule.z_loss * lse) / ", "1.0 / ")),
        RANKS_LOSS,
        "gradient off",
        "the loss is right, its gradient is not",
    ),
    Fault(
        "chunked head smooths over padding",
        edit(
            "nn.head:_differentiate_",
            ("on_real(uniform.expand_as(z), columns, 0.0)", "uniform.expand_as(z)"),
        ),
        RANKS_LOSS,
        "off",
        "padded rows of the table learn, and the norm counts them",
    ),
    Fault(
        "chunked head keeps the last chunk's weight gradient",
        edit("nn.head:HeadLoss.forward", ("1 if rows.start else 0", "0")),
        holds.head_in_chunks,
        "gradient of w",
        "right as long as a microbatch is one chunk",
    ),
    Fault(
        "chunked head keeps the last chunk's loss",
        edit("nn.head:HeadLoss.forward", ("torch.stack(losses).sum()", "losses[-1]")),
        holds.head_in_chunks,
        "loss",
        "the same",
    ),
    Fault(
        "chunked head does not sum its input's gradient",
        edit(
            "nn.head:HeadLoss.forward",
            ("leave_fresh(dx_nd.view_as(x), axis, sequence_parallel)", "dx_nd.view_as(x)"),
        ),
        RANKS,
        "tp",
        "each rank sends back its part of the vocabulary's",
    ),
)

RANDOM = (
    Fault(
        "dropout by local sample number",
        edit(
            "models.gpt:_drop_tokens",
            ('ctx.batch["sample"]', 'ctx.batch["sample"] - ctx.batch["sample"][:1]'),
        ),
        DROPOUT,
        "loss off",
        "all data ranks drop alike",
    ),
    Fault(
        "attention dropout by local sample number",
        edit("models.gpt:_drop_scores", ('ctx.batch["sample"]', 'ctx.batch["sample"] % 2')),
        DROPOUT,
        "loss off",
        "all microbatches drop alike",
    ),
    Fault(
        "dropout not shifted by the sequence shard",
        edit(
            "nn.dropout:token_grid",
            ("coordinates(s, axis) if sequence_parallel else range(s)", "range(s)"),
        ),
        SEQUENCE,
        "loss off",
        "all ranks drop the first one's tokens",
    ),
    Fault(
        "attention dropout by local head number",
        edit("nn.dropout:score_grid", ("coordinates(h, axis)", "range(h)")),
        DROPOUT,
        "loss off",
        "all ranks drop the first one's heads",
    ),
    Fault(
        "dropout keeps what it should drop",
        edit(
            "nn.dropout:dropout",
            (
                "bernoulli(key, grid, 1.0 - rate, device=x.device)",
                "bernoulli(key, grid, rate, device=x.device)",
            ),
        ),
        DROPOUT,
        "loss off",
        "the rate and its complement",
    ),
    Fault(
        "dropout does not rescale",
        edit("nn.dropout:dropout", ("x / (1.0 - rate)", "x")),
        DROPOUT,
        "loss off",
        "evaluation sees larger activations than training",
    ),
    Fault(
        "every step has the same masks",
        edit("train.step:Trainer.gradients", ('"dropout", state.step', '"dropout", 0')),
        DROPOUT,
        "off",
        "the first step is right",
    ),
    Fault(
        "attention and feed-forward share a mask",
        edit("models.gpt:apply_attention", ('"blocks", i, "attn")', '"blocks", i, "mlp")')),
        DROPOUT,
        "loss off",
        "two places of one name",
    ),
    Fault(
        "initial weights by shard",
        edit(
            "spec:init_leaf",
            (
                "rng.Grid(tuple(range(a, b) for a, b in window(spec, mesh, coords)), spec.shape)",
                "rng.Grid.whole(tuple(b - a for a, b in window(spec, mesh, coords)))",
            ),
        ),
        TP,
        "loss off",
        "all ranks start with the first one's piece",
    ),
    Fault(
        "initial weights not zero in padding",
        edit("spec:pad_to", ("F.pad(x, pads[::-1])", "F.pad(x, pads[::-1], value=1.0)")),
        holds.padding_is_zero,
        "the piece",
        "decayed and saved as if it meant something",
    ),
    Fault(
        "residual matrices start as large as others",
        edit(
            "models.specs:_matrix",
            ("model.init_std / math.sqrt(2 * model.layers)", "model.init_std"),
        ),
        ONE,
        "loss off",
        "deep models start unstable",
    ),
    Fault(
        "Philox in nine rounds",
        edit("rng:philox", ("range(10)", "range(9)")),
        ONE,
        "loss off",
        "another stream than everyone else's",
    ),
)

OPTIMIZER = (
    Fault(
        "weight decay on norms",
        edit("models.specs:_norm", ('"decay": False', '"decay": True')),
        ADAM,
        r"norm1\.weight.*parameter off",
        "norm weights shrink",
    ),
    Fault(
        "weight decay on biases",
        edit("models.specs:_bias", ("decay=False", "decay=True")),
        ADAM,
        r"_bias.*parameter off",
        "biases shrink",
    ),
    Fault(
        "no weight decay on matrices",
        edit("optim.adam:adamw", ("weight_decay=weight_decay * decay", "weight_decay=0.0")),
        ADAM,
        r"mlp\.up: parameter off",
        "a setting that does nothing",
    ),
    Fault(
        "bias correction off by one",
        edit("optim.adam:adamw", ("float(n)", "float(n + 1)")),
        ADAM,
        "parameter off",
        "the first steps are too small",
    ),
    Fault(
        "Adam's decays are exchanged",
        edit("optim.adam:adamw", ("beta1=b1", "beta1=b2"), ("beta2=b2", "beta2=b1")),
        ADAM,
        "parameter off",
        "seen from the second update on",
    ),
    Fault(
        "Adam's moments are swapped after a step",
        edit(
            "optim.adam:adamw",
            (
                '"mu": mu, "nu": nu}\n\n    return Transform',
                '"mu": nu, "nu": mu}\n\n    return Transform',
            ),
        ),
        ADAM,
        "parameter off",
        "the first step is right",
    ),
    Fault(
        "Adam forgets its moments",
        edit(
            "optim.adam:adamw",
            (
                'writable(t, donate) for t in (params, state["mu"], state["nu"])',
                "writable(t, donate) for t in (params, zeros_like(params), zeros_like(params))",
            ),
        ),
        ADAM,
        "parameter off",
        "the first step is right",
    ),
    Fault(
        "AdamW writes to the state it was lent",
        edit("optim.adam:writable", ("x if donate and", "x if")),
        holds.old_state_stays,
        "old state",
        "donate=False promises that the old state stays valid",
    ),
    Fault(
        "the learning rate is one update behind",
        edit("optim.adam:adamw", ("lr = schedule(n)", "lr = schedule(n - 1)")),
        FALLS,
        "parameter off",
        "warm-up from 0: the first update does nothing",
    ),
    Fault(
        "sgd's learning rate is one update behind",
        edit("optim.sgd:sgd", ("lr = schedule(n)", "lr = schedule(n - 1)")),
        train("name=sgd steps=2 warmup=3"),
        "parameter off",
        "the same",
    ),
    Fault(
        "falling schedules are one update early",
        edit("optim.schedule:_falling", ("(n - warmup) /", "(n - warmup + 1) /")),
        FALLS,
        "parameter off",
        "min_lr is reached before the end",
    ),
    Fault(
        "min_lr ignored",
        edit("optim.schedule:_falling", ("min_lr + (lr - min_lr) * shape", "lr * shape")),
        FALLS,
        "parameter off",
        "a setting that does nothing",
    ),
    Fault(
        "decay_steps ignored",
        edit("optim.build:build_schedule", ("config.decay_steps or steps", "steps")),
        FALLS,
        "parameter off",
        "a setting that does nothing",
    ),
    Fault(
        "wsd falls one update late",
        edit(
            "optim.schedule:wsd",
            ("(n - (decay_steps - fall_steps))", "(n - 1 - (decay_steps - fall_steps))"),
        ),
        train("steps=3 lr=0.1 optim.schedule=wsd wsd_decay=0.6"),
        "parameter off",
        "off by one at the end of the plateau",
    ),
    Fault(
        "inverse_sqrt forgets the warm-up",
        edit("optim.schedule:inverse_sqrt", ("max(warmup, 1)", "1")),
        train("steps=3 lr=0.1 warmup=2 optim.schedule=inverse_sqrt"),
        "parameter off",
        "the rate drops at the end of the warm-up",
    ),
    Fault(
        "clip ignored",
        edit(
            "optim.clip:clip_by_global_norm",
            ("torch.where(ratio < 1, ratio, torch.ones_like(ratio))", "torch.ones_like(ratio)"),
        ),
        CLIP,
        "parameter off",
        "a setting that does nothing",
    ),
    Fault(
        "clip scales up",
        edit(
            "optim.clip:clip_by_global_norm",
            ("torch.where(ratio < 1, ratio, torch.ones_like(ratio))", "ratio"),
        ),
        train("clip=100 name=sgd"),
        "parameter off",
        "small gradients are blown up to the limit",
    ),
    Fault(
        "momentum is an average",
        edit("optim.sgd:sgd", ("dampening=0.0", "dampening=momentum")),
        SGD,
        "parameter off",
        "another definition than torch's",
    ),
    Fault(
        "sgd does not decay",
        edit("optim.sgd:sgd", ("weight_decay=weight_decay * decay", "weight_decay=0.0")),
        SGD,
        "parameter off",
        "a setting that does nothing",
    ),
    Fault(
        "Lion's two means are exchanged",
        edit("optim.lion:lion", ("p, u, m, b1, b2, lr", "p, u, m, b2, b1, lr")),
        LION,
        "parameter off",
        "another optimizer, which trains as well as none",
    ),
    Fault(
        "Lion's decay takes the whole rate",
        edit("optim.lion:_lists", ("1 - lr * decay", "1 - decay")),
        LION,
        "parameter off",
        "weights vanish",
    ),
    Fault(
        "Lion's mean is updated before its sign is taken",
        edit(
            "optim.lion:_lists",
            (
                "signs = torch._foreach_lerp(m, u, 1 - b1)",
                "torch._foreach_lerp_(m, u, 1 - b2)\n    signs = torch._foreach_lerp(m, u, 1 - b1)",
            ),
        ),
        LION,
        "parameter off",
        "the new gradient counts twice",
    ),
    Fault(
        "Muon takes a piece for a matrix",
        edit("optim.layout:matrices_of", ("lifted(whole_leaf), lifted(cut_leaf)", "dict, dict")),
        MUON,
        "parameter off",
        "another update for every tp, as Megatron's blockwise mode",
    ),
    Fault(
        "Muon takes q, k and v for one matrix",
        edit("models.specs:_attention", ("(3, h, k, d), (2, 1)", "(3, h, k, d), (3, 1)")),
        MUON,
        r"attn\.qkv: parameter off",
        "v's large gradient decides how far q moves",
    ),
    Fault(
        "Muon takes a copy of a head for the next head",
        edit("optim.layout:_gather", ('dim + int(axis.part == "outer")', "dim")),
        MUON_HEADS,
        "attn.kv: parameter off",
        "half of the heads are there twice, half not at all",
    ),
    Fault(
        "copies of a head get different heads' updates",
        edit(
            "optim.layout:_split",
            ('at = dim + int(axis.part == "outer")', "at = dim"),
        ),
        MUON_HEADS,
        "attn.kv: (replicas|parameter)",
        "replicas drift apart",
    ),
    Fault(
        "Muon's momentum does not look ahead",
        edit("optim.muon:scale_by_muon", ("u.lerp(mu[path], momentum)", "mu[path]")),
        MUON,
        "parameter off",
        "Polyak's momentum instead of Nesterov's",
    ),
    Fault(
        "Newton-Schulz takes a step too few",
        edit("optim.muon:orthogonalise", ("range(steps)", "range(steps - 1)")),
        MUON,
        "parameter off",
        "singular values far from 1",
    ),
    Fault(
        "Newton-Schulz on the taller side",
        edit("optim.muon:orthogonalise", ("(y if wide else y.mT).reshape", "y.reshape")),
        train("name=muon ffn=12 steps=1"),
        "parameter off",
        "the update of a tall matrix is its transpose's",
    ),
    Fault(
        "Muon moves the embedding",
        edit("models.specs:_vocabulary", ("pads=(0,),", "pads=(0,), matrix=(1, 1),")),
        MUON,
        r"embed\.tokens: parameter off",
        "rows that had no token move",
    ),
    Fault(
        "a bucket mixes hidden matrices with the rest",
        edit("train.plan:Plan.buckets", ("bool(self.specs[path].matrix)", "True")),
        train("name=muon dp=2 sharding=optim steps=1"),
        r"KeyError: 'embed|parameter off",
        "norms would be orthogonalised, or matrices not",
    ),
    Fault(
        "padding counts as zeros",
        edit("grads.zeros:num_zeros", ("(buffer == 0) & real", "buffer == 0")),
        holds.zeros_counted,
        "num_zeros of",
        "the number depends on tp",
    ),
    Fault(
        "every replica's zeros count",
        edit("grads.zeros:num_zeros", ("found * own", "found")),
        holds.zeros_counted,
        "num_zeros of",
        "the number depends on tp and pp",
    ),
    Fault(
        "while the batch grows the data position is that of the full batch",
        edit("train.feed:Feed.rows", ("rampup.consumed(train, step)", "step * train.global_batch")),
        holds.growing_batches,
        "the samples is",
        "samples are skipped",
    ),
    Fault(
        "the last step of a size is forgotten",
        edit("config.rampup:consumed", ("-(-(end - total) // size)", "(end - total) // size + 1")),
        holds.growing_batches,
        "the s(izes|amples) is",
        "another run after a resume than before",
    ),
    Fault(
        "clip_value ignored",
        edit("optim.build:build", ("if config.clip_value:", "if False:")),
        train("name=sgd clip_value=0.01"),
        "parameter off",
        "a setting that does nothing",
    ),
    Fault(
        "clip_value cuts before the norm clips",
        edit(
            "optim.build:build",
            (
                "named_chain(**blocks)",
                "named_chain(**dict(sorted("
                'blocks.items(), key=lambda block: block[0] != "clip_value")))',
            ),
        ),
        train("name=sgd clip=0.1 clip_value=0.01 lr=1"),
        "parameter off",
        "the norm is of another gradient than is scaled",
    ),
    Fault(
        "an override's learning rate is lost",
        edit("optim.adam:adamw", ("lr=lr * rate", "lr=lr")),
        GROUPS,
        r"embed\.tokens: parameter off",
        "a setting that does nothing",
    ),
    Fault(
        "buckets ignore the groups",
        edit("train.plan:Plan.buckets", ("{**self.groups}", "{}")),
        GROUPS_SHARDED,
        "parameter off",
        "leaves of a bucket take its first leaf's learning rate",
    ),
    Fault(
        "an earlier override wins",
        edit(
            "optim.groups:groups_of",
            ("config.overrides.items()", "reversed(config.overrides.items())"),
        ),
        GROUPS,
        "parameter off",
        "a general pattern after a special one, or none at all",
    ),
)

PROCESSES = (
    Fault(
        "an overlapped sum is used before it is there",
        edit("comm.overlap:Pending.wait", ("wait(self.works)", "pass")),
        RANKS,
        "tp|gradient off",
        "a missing wait: wrong only when the network is slow",
    ),
    Fault(
        "an overlapped reduce-scatter keeps one summand",
        edit(
            "comm.exchange:start_sum_pieces",
            ("sum_exchanged(own, parts, axis, over=over, wide=wide)", "own"),
        ),
        RANKS_SEQUENCE,
        "gradient off",
        "the fast path of column layers",
    ),
    Fault(
        "an overlapped gather is in another order",
        edit(
            "comm.overlap:start_gather", ("parts.movedim(0, dim)", "parts.flip(0).movedim(0, dim)")
        ),
        RANKS_SEQUENCE,
        "gradient off",
        "the weight gradient pairs tokens with others' inputs",
    ),
    Fault(
        "a process all-reduces a temporary",
        edit("comm.kernels:_all_reduce", ("return out", "return x")),
        RANKS,
        "tp|loss off",
        "a published fault: the reduced copy is thrown away",
    ),
    Fault(
        "a process gathers its own piece only",
        edit(
            "comm.kernels:on_group",
            (
                "_glue(_all_gather(x, axis), 0, dim)",
                "_glue(_all_gather(x, axis)[:1].expand(axis.size, *x.shape), 0, dim)",
            ),
        ),
        RANKS_SEQUENCE,
        "loss off",
        "every shard is the first one's",
    ),
    Fault(
        "a process scatters one rank's summand",
        edit(
            "comm.kernels:_reduce_scatter",
            ("return total()", "return x[axis.position]"),
        ),
        RANKS_SEQUENCE,
        "loss off",
        "row layers without their sum",
    ),
    Fault(
        "processes of tied stages do not meet",
        edit(
            "comm.process:ProcessWorld.all_reduce",
            ("stages=tuple(stages) if stages is not None else None", "stages=None"),
        ),
        RANKS,
        r"embed\.tokens.*pp",
        "the two copies of a tied table drift apart",
    ),
    Fault(
        "a receive buffer has the first microbatch's size",
        all_of(
            edit("comm.p2p:Transport.post", ("op.to, sizes[op.mb])", "op.to, 0)")),
            edit("comm.p2p:Transport._outgoing", ("op.to, sizes[op.mb])", "op.to, 0)")),
        ),
        RANKS_STAGES,
        "sizes must differ where shapes do",
        "unequal microbatches",
    ),
    Fault(
        "a stage waits for shapes before it sends",
        edit(
            "comm.p2p:Transport.post",
            ("self._wait([*posts, (op, parts)])", "self._wait([(op, parts)])"),
        ),
        RANKS_GPIPE,
        "deadlock: rank 0 waits for .* rank 1",
        "the peer needs what is not sent to get that far",
    ),
    Fault(
        "messages are sent in another order",
        SECOND_FIRST,
        RANKS_GPIPE,
        "different schedules",
        "two stages with different schedules must not train on",
    ),
    Fault(
        "a message's tag is not looked at",
        all_of(
            edit("comm.p2p:Transport.take", ("if came.tag != _tag(op):", "if False:")),
            edit("comm.p2p:Header.slot", ("return _TENSORS + number", "return _TENSORS + 0")),
        ),
        holds.foreign_message,
        "not refused",
        "a swapped microbatch would be a wrong number, not an error",
    ),
)

GUARDS = (
    Fault(
        "inputs declared equal are not compared",
        edit("comm.kernels:check_equal", ("if worst is not None:", "if False:")),
        holds.unequal_values,
        "input was not refused",
        "simulate's check of types",
    ),
    Fault(
        "results declared equal are not compared",
        edit("comm.door:_check_copies", ("is None:", "is None or True:")),
        holds.unequal_values,
        "result was not refused",
        "simulate's check of types",
    ),
    Fault(
        "ranks count in another order than groups",
        edit(
            "mesh:Mesh._coords",
            ("self.digits(*view)", "attrs.evolve(self, order='tp-cp-ep-dp-pp').digits(*view)"),
        ),
        MESH,
        "axis 'tp'",
        "an order of the mesh that coordinates ignore",
    ),
    Fault(
        "data ranks read the same rows",
        edit("data.samples:rank_samples", ("dp_index * count, (dp_index + 1) * count", "0, count")),
        holds.rows_of_ranks,
        "hold the samples",
        "data parallelism without more data",
    ),
    Fault(
        "a step reads the previous one's rows",
        edit("data.samples:rank_samples", ("consumed + np", "np")),
        holds.rows_of_ranks,
        "hold the samples",
        "the same batch for ever",
    ),
    Fault(
        "labels are the tokens",
        edit("data.samples:rows", ("token_bw[:, 1:]", "token_bw[:, :-1]")),
        holds.rows_of_ranks,
        "labels",
        "the loss falls to 0 in no time",
    ),
)

STREAMS = (
    Fault(
        "backwards of layers ascend",
        edit(
            "schedule.layers:expand",
            ("order if kind is F or kind is Recompute else reversed(order)", "order"),
        ),
        inserted.transformed,
        "layers: ",
        "the last layer's gradient is not there yet",
    ),
    Fault(
        "a bucket is reduced before its weights' gradients",
        edit(
            "schedule.transforms:_complete", ("isinstance(op, BACKWARD)", "isinstance(op, (B, I))")
        ),
        inserted.transformed,
        "split: ",
        "all that W adds is on one rank only",
    ),
    Fault(
        "a window of a microbatch is the whole step",
        edit("schedule.transforms:_complete", ('None if window == "step" else op.mb', "None")),
        inserted.transformed,
        "windows: ",
        "sharded gradients are never freed",
    ),
    Fault(
        "joined buckets are reduced as they complete",
        edit(
            "schedule.transforms:_complete",
            ("at = max(at, last.get((bucket, None), end))", "at = last.get((bucket, None), end)"),
        ),
        inserted.transformed,
        "joined: ",
        "stages wait for each other in different reductions",
    ),
    Fault(
        "a bucket without gradients is not reduced",
        edit(
            "schedule.transforms:_complete",
            ("for bucket in own}", "for bucket in own if (bucket, None) in last}"),
        ),
        inserted.transformed,
        "unused: ",
        "the mirrored stage waits for ever",
    ),
    Fault(
        "what is used last is gathered first",
        edit(
            "schedule.gather:_wanted",
            ("islice(reversed(soon), prefetch)", "islice(soon, prefetch)"),
        ),
        inserted.transformed,
        "prefetch: ",
        "memory for nothing",
    ),
    Fault(
        "parameters stay gathered after the step",
        edit("schedule.gather:with_gather", ("if now:", "if False:")),
        inserted.transformed,
        "gathers: ",
        "stale parameters in the next step",
    ),
    Fault(
        "an I does not recompute",
        edit("schedule.transforms:with_recompute", ("isinstance(op, (B, I))", "isinstance(op, B)")),
        inserted.transformed,
        "recomputing: ",
        "no pullback to call",
    ),
    Fault(
        "the checker accepts an early reduction",
        edit("schedule.collective_walk:Reduces.reduce", ("if self.last[key] > at:", "if False:")),
        inserted.bad_extras,
        "an early reduction",
        "the last gradients are on one rank only",
    ),
    Fault(
        "the checker accepts a second reduction",
        edit("schedule.collective_walk:Reduces.reduce", ("if key in self.done:", "if False:")),
        inserted.bad_extras,
        "a reduction twice",
        "gradients are summed twice",
    ),
    Fault(
        "the checker accepts parameters that are not there",
        edit("schedule.collective_walk:Gathers.use", ("if bucket not in self.now:", "if False:")),
        inserted.bad_extras,
        "a use of what is released",
        "a backward through freed memory",
    ),
    Fault(
        "the checker accepts a second gather",
        edit("schedule.collective_walk:Gathers.gather", ("if op.bucket in self.now:", "if False:")),
        inserted.bad_extras,
        "a gather twice",
        "communication for nothing",
    ),
    Fault(
        "the checker does not miss a recomputation",
        edit("schedule.layer_walk:Recomputes.use", ("if not again and", "if False and")),
        inserted.bad_extras,
        "a missing recomputation",
        "no pullback to call",
    ),
    Fault(
        "the checker accepts activations that are away",
        edit("schedule.layer_walk:Offloads.use", ("if item in self.away:", "if False:")),
        inserted.bad_extras,
        "a use of what is away",
        "a backward through freed memory",
    ),
    Fault(
        "the checker does not count the device's activations",
        edit("schedule.layer_walk:Offloads.full", ("or not self.trains", "or True")),
        inserted.bad_extras,
        "too much on the device",
        "out of memory",
    ),
    Fault(
        "the checker accepts layers in any order",
        edit(
            "schedule.layer_walk:Layers.layer", ("if (kind, mb, chunk, layer) != due:", "if False:")
        ),
        inserted.bad_extras,
        "layers out of order",
        "a layer on another layer's input",
    ),
    Fault(
        "the checker accepts a parted batch of messages",
        edit("schedule.layer_walk:Layers.extra", ("if isinstance(after, ENDS):", "if False:")),
        inserted.bad_extras,
        "a batch of messages that is parted",
        "both neighbours wait in a send",
    ),
    Fault(
        "the checker does not look at a stream's end",
        edit(
            "schedule.collective_check:_check_stage", ("if wrong := concern.ending():", "if False:")
        ),
        inserted.bad_extras,
        "a missing reduction",
        "a bucket is never reduced",
    ),
    Fault(
        "the checker does not compare members",
        edit(
            "schedule.collective_check:check_order", ("if wrong := meetings.wrong():", "if False:")
        ),
        inserted.bad_extras,
        "another order on one member",
        "a bad order would hang on a cluster instead",
    ),
    Fault(
        "a bucket is complete with its first leaf",
        edit(
            "train.extras:bucket_layers",
            ("{span.path for span in bucket.spans}", "{bucket.spans[0].path}"),
        ),
        OVERLAP,
        "Reduce is early",
        "the last gradients of a bucket are on one rank only",
    ),
    Fault(
        "tied buckets are reduced when each stage has them",
        edit("train.extras:extras", ("joined=() if grads.release else", "joined=() and")),
        inserted.tied_are_named,
        "joined",
        "stages wait for each other's embedding for ever",
    ),
    Fault(
        "the embedding counts among the first blocks",
        edit("train.extras:recomputed", ('if layer.name.startswith("blocks.")', "")),
        inserted.first_blocks,
        "blocks.0",
        "the numbers are right, the memory is not",
    ),
    Fault(
        "another half runs again",
        edit("train.extras:recomputed", ('endswith(".attn")', 'endswith(".mlp")')),
        inserted.attention_halves,
        "blocks.0.attn",
        "the scores are kept",
    ),
    Fault(
        "views come back from the host at the start of their memory",
        edit("pipeline.offload:Shelf.get", ("place.stride, place.offset", "place.stride, 0")),
        OFFLOAD,
        "gradient off",
        "queries for keys and values",
    ),
    Fault(
        "a second offload finds the first one's memory",
        edit("pipeline.offload:Shelf.reload", ("to_device(x, device)", "torch.zeros_like(x)")),
        OFFLOAD,
        "gradient off|loss off",
        "activations of nobody",
    ),
    Fault(
        "parameters go to the host",
        edit("pipeline.offload:Shelf.saving", ("for x in stay}", "for x in ()}")),
        inserted.parameters_stay,
        "moved",
        "every microbatch has a copy of the weights",
    ),
    Fault(
        "the graph's leaf holds the input",
        edit(
            "pipeline.flight:Flight.forward",
            ("apply, x = without_input(apply, x)", "pass"),
        ),
        inserted.inputs_leave,
        "the input",
        "offloading frees less than it says",
    ),
)

# 16 bits against plain torch, to the bit.
BF16 = sixteen.as_plain_torch("policy=bf16")
BF16_EARLY = sixteen.as_plain_torch("policy=bf16 global_batch=6", 1)  # tokens > hidden
FP16 = sixteen.as_plain_torch(
    "policy=fp16 dp=2 initial_scale=1048576 growth_every=2 hysteresis=2", 7
)

PRECISION = (
    Fault(
        "gradients of weights are rounded to 16 bits",
        edit(
            "nn.weight_grads:add_product_",
            (
                "dw_oi.addmm_(dy_no.to(dw_oi.dtype).T, x_ni.to(dw_oi.dtype), beta=keep)",
                "dw_oi.mul_(keep).add_(dy_no.T.to(x_ni.dtype) @ x_ni)",
            ),
        ),
        BF16,
        "another weight",
        "an error of 2e-3 in place of 1e-7",
    ),
    Fault(
        "the head's gradient is rounded before the loss's own",
        edit(
            "nn.head:HeadLoss.forward",
            ("torch.empty_like(w, dtype=at_least_fp32(w[:0]).dtype)", "torch.empty_like(w)"),
        ),
        BF16_EARLY,
        "another weight",
        "the largest matrix has the worst gradient",
    ),
    Fault(
        "norms compute in 16 bits",
        edit("nn.norm:_wide", ("wide = at_least_fp32(x)", "wide = x")),
        BF16,
        "another weight",
        "a mean of 8 bits",
    ),
    Fault(
        "no headroom in fp16",
        row("nn.head:HEADROOM", torch.float16, 1.0),
        sixteen.rare_tokens,
        "the gradient of a rare token",
        "rows of rare tokens learn nothing",
    ),
    Fault(
        "masters are made again from the parameters",
        edit(
            "optim.masters:with_masters",
            (
                'state["inner"], state["master"], **extra',
                'state["inner"], {p: _wide(x, dtype) for p, x in params.items()}, **extra',
            ),
        ),
        sixteen.resumes,
        "the master is",
        "small updates are lost",
    ),
    Fault(
        "the loss is not scaled",
        edit(
            "train.step:Trainer.gradients", ("factor = optim.loss_scale(state.opt)", "factor = 1.0")
        ),
        FP16,
        "skipped|another weight",
        "gradients underflow, and those that do not are too small",
    ),
    Fault(
        "gradients keep the loss scale",
        edit(
            "train.step:Trainer._unscaled",
            ("finished().values()], scale)", "finished().values()], 1.0)"),
        ),
        sixteen.one_decision,
        "not divided",
        "clipping cuts everything",
    ),
    Fault(
        "an overflow is told to tp ranks only",
        edit("train.step:Trainer._unscaled", ('(("tp",), ("dp", "cp"))', '(("tp",),)')),
        sixteen.one_decision,
        "the ranks decide",
        "some ranks skip, others update",
    ),
    Fault(
        "an overflow is told to dp ranks only",
        edit("train.step:Trainer._unscaled", ('(("tp",), ("dp", "cp"))', '(("dp", "cp"),)')),
        sixteen.one_decision,
        "the ranks decide",
        "some ranks skip, others update",
    ),
    Fault(
        "a skipped step updates",
        edit("optim.scaler:with_loss_scale", ("if overflow:", "if False:")),
        FP16,
        "skipped|another weight",
        "NaN in all weights",
    ),
    Fault(
        "no overflow is forgiven",
        edit("optim.scaler:dynamic_scale", ("scale if left else", "")),
        FP16,
        "loss scales|skipped",
        "one bad batch costs a factor of two for a thousand steps",
    ),
    Fault(
        "the scale grows a step late",
        edit(
            "optim.scaler:dynamic_scale",
            ("state.clean + 1 < growth_every", "state.clean < growth_every"),
        ),
        FP16,
        "loss scales|skipped",
        "another path than Megatron's",
    ),
    Fault(
        "the count of clean steps is not restored",
        edit("optim.scaler:dynamic_scale", ("state._replace(clean=state.clean + 1)", "state")),
        FP16,
        "loss scales|skipped",
        "the scale never grows again",
    ),
    Fault(
        "rounding by chance is by truncation",
        edit("optim.masters:round_by_chance", (" + (word >> 16).to(torch.int32)", "")),
        sixteen.unbiased,
        "mean rounding",
        "weights shrink",
    ),
    Fault(
        "words of a bucket go by its number",
        edit(
            "train.rounding:words_by_shard",
            ('key.fold("bucket", path)', 'key.fold("bucket", name)'),
        ),
        sixteen.tied_alike,
        "on another stage",
        "the copies of a tied table drift apart",
    ),
)

SHARDING = (
    Fault(
        "the optimizer's shards are not gathered",
        edit(
            "train.params:StageParams.updated", ("yield from self.flat.fill(new)", "yield from ()")
        ),
        SHARDED,
        "param",
        "each rank trains its piece of the model and keeps the others as they were",
    ),
    Fault(
        "a microbatch's shard replaces the one before",
        edit("grads.buffers:GradBuffers.settle", ("have.add_(part)", "part")),
        SHARDED_GRADS,
        "gradient off",
        "ZeRO-2 accumulating nothing: right with one microbatch",
    ),
    Fault(
        "the buffer of a microbatch keeps the one before",
        edit(
            "grads.buffers:GradBuffers.reopen",
            ("self._fresh |= {span.path for span in self.buckets[bucket].spans}", "pass"),
        ),
        SHARDED_GRADS,
        "gradient off",
        "every microbatch reduced again with the next",
    ),
    Fault(
        "a tied leaf's shards are not added over stages",
        edit("grads.finalize:finalize_steps", ("row.copy_axes or row.joined", "row.copy_axes")),
        SHARDED,
        "gradient off|replicas",
        "the embedding group forgotten by the sharded path",
    ),
    Fault(
        "copies of shards are not added",
        edit("grads.finalize:finalize_steps", ("row.copy_axes or row.joined", "row.joined")),
        SHARD_COPIES,
        "gradient off|replicas",
        "HSDP whose outer ranks train apart",
    ),
    Fault(
        "the norm counts every copy of a shard",
        edit("grads.finalize:owns", ("row.copy_axes if sharded", "() if sharded")),
        SHARD_COPIES,
        "norm off",
        "clipping that depends on the layout",
    ),
    Fault(
        "the norm is that of this rank's shards",
        edit("grads.finalize:global_norm", ('("tp", "dp", "cp") if grads.sharded', "() if False")),
        SHARDED,
        "norm off",
        "each rank clips by another number",
    ),
    Fault(
        "a shard of the parameters is gathered to another's place",
        edit("pipeline.mailbox:MailboxWorld.gather", ("shard[members]", "shard[members[::-1]]")),
        SHARDED_PARAMS,
        "loss off",
        "a group in another order than its shards",
    ),
    Fault(
        "parameters are released where they are in use",
        edit("schedule.gather:with_gather", ("if bucket not in wanted", "")),
        SHARDED_PARAMS,
        "gave up",
        "a weight whose memory is another's by the time of its product",
    ),
    Fault(
        "reductions wait for the end of the backward",
        edit(
            "pipeline.executor:train_step",
            ("start_reduce(program.world, grads, bucket)", "pass"),
        ),
        shards.reduces_beside_backward,
        "starts after",
        "right numbers, and nothing is hidden",
    ),
    Fault(
        "layers do not wait for updated parameters",
        edit("pipeline.program:Program.ready", ("self.shards or self.flat.going", "self.shards")),
        AHEAD,
        "loss off",
        "a forward on weights of which some are a step old",
    ),
    Fault(
        "updated parameters are gathered when the next step begins",
        edit(
            "train.params:StageParams.updated",
            ("return self._ahead(new, self.flat if donate else None)", "return new"),
        ),
        shards.gathers_beside_forward,
        "not on its way",
        "right numbers, and less time to hide them in",
    ),
    Fault(
        "all parameters are waited for by the first layer",
        edit(
            "grads.params:ParamBuffers.ready", ("for path in paths", "for path in self.bucket_of")
        ),
        shards.gathers_beside_forward,
        "is waited for before",
        "the same",
    ),
    Fault(
        "a forward uses the parameters of another state",
        edit(
            "train.params:StageParams.program",
            ("params is not self._whole_of", "self._whole_of is None"),
        ),
        shards.states_are_values,
        "another state",
        "validation of a state that is not the one it is said to be of",
    ),
    Fault(
        "buffers of a state that stays valid are filled again",
        edit("train.params:StageParams.updated", ("self.flat if donate else None", "self.flat")),
        shards.states_are_values,
        "old state",
        "a step without donation that changes what it was given",
    ),
    Fault(
        "the last step leaves parameters on their way",
        edit("train.step:Trainer.step", ("yield from self.params.settle()", "pass")),
        shards.nothing_is_left_on_its_way,
        "on their way",
        "a rank that is gone before its messages are",
    ),
    Fault(
        "a gather resizes what others have seen",
        edit("grads.params:ParamBuffers.start", ("if not buffer.untyped_storage().size()", "if 1")),
        shards.read_as_arrays,
        "not resizable",
        "a run that ends at its first checkpoint",
    ),
    Fault(
        "memory that comes back is not cleared",
        edit("grads.buffers:GradBuffers._allocate", ("buffer[..., end:].zero_()", "pass")),
        shards.padding_is_zero,
        "the norm",
        "a norm with other tensors' rests in it",
    ),
    Fault(
        "16-bit sums are rounded after each rank",
        edit("comm.exchange:sum_exchanged", ("if wide and own.itemsize < 4:", "if False:")),
        shards.wide_sums_round_once,
        "the sum of",
        "small gradients vanish beside large ones, the more ranks the more",
    ),
    Fault(
        "buckets have their usual padding",
        edit("train.plan:Plan.buckets", ("self.config.parallel.bucket_pad", "128")),
        shards.buckets_have_the_asked_padding,
        "no multiples",
        "an option that does nothing",
    ),
)

MEMORY = (
    Fault(
        "reductions pile up",
        edit("grads.finalize:start_reduce", ("list(grads.sums)", "list(grads.sums)[:0]")),
        memory.said("optim_grads"),
        "at the worst moment",
        "ZeRO-2 that holds all gradients at the end of the backward",
    ),
    Fault(
        "a shard keeps what was exchanged for it",
        edit("grads.buffers:GradBuffers.settle", ("part.clone()", "part")),
        memory.said("optim_grads"),
        "grads: ",
        "ZeRO-2 that saves nothing: a view keeps the whole buffer alive",
    ),
    Fault(
        "a shard is kept beside its buffer",
        edit("grads.finalize:finalize_steps", ("place.copy_(whole)", "whole")),
        memory.said("optim"),
        "grads: ",
        "ZeRO-1 with twice the gradients",
    ),
    Fault(
        "released parameters keep their memory",
        edit(
            "grads.params:ParamBuffers.release",
            ("self.buffers[bucket].untyped_storage().resize_(0)", "pass"),
        ),
        memory.said("optim_grads_params"),
        "params: ",
        "ZeRO-3 that is ZeRO-2",
    ),
    Fault(
        "the account forgets the masters",
        edit("plan.memory:element", ("BYTES[formats.masters]", "0 * BYTES[formats.masters]")),
        memory.said("optim", "precision.policy=bf16"),
        "opt: ",
        "a plan that does not fit when it runs",
    ),
    Fault(
        "the account forgets copies in the update",
        edit("plan.memory:_converted", ("return widened + rounded", "return 0")),
        memory.said("no_shard", "precision.policy=bf16", "precision.grads=bf16"),
        "at the worst moment",
        "the same",
    ),
    Fault(
        "the account takes buckets without their padding",
        edit("plan.memory:parts", ("elements=bucket.size", "elements=bucket.used")),
        memory.said("optim", "model.hidden=40"),
        "params: ",
        "off by little, in every layout",
    ),
    Fault(
        "the account forgets the states that travel",
        edit("plan.memory:_update", ("+ own + coming", "")),
        memory.said("no_shard", "parallel.offload_optimizer=true"),
        "at the worst moment",
        "out of memory in the update",
    ),
    Fault(
        "moments do not come back from the device",
        edit("optim.offload:_stored", ("to_host(x, old[path], BACK)", "old[path]")),
        AWAY,
        "parameter off",
        "an optimizer without a memory",
    ),
    Fault(
        "a leaf brings the moments of all",
        edit("optim.offload:_only", ("{path: all_[path]} if path in all_ else {}", "dict(all_)")),
        AWAY,
        "parameter off",
        "moments of a step ago put over new ones",
    ),
    Fault(
        "Megatron's names are unknown",
        edit("config.options:find", ("OPTIONS.get(plain) or", "None and")),
        memory.options_are_told,
        "is not told",
        "a refusal without its reason",
    ),
)

TRANSFORMS = (
    Fault(
        "equal gradients are summed with weights where they are differentiated",
        edit(
            "grads.finalize:finalize",
            ('if how.kind == "equal"]', "if False]"),
            ('pairs if how.kind != "equal"]', "pairs]"),
            ('row.rows if how.kind != "equal")', "row.rows)"),
        ),
        derivatives.COPIES,
        "hessian, reverse over reverse",
        "a gradient of gradients in which each rank gets the n-th part",
    ),
    Fault(
        "an inner product counts copies",
        edit("func.space:_owner", ("groups.mesh, coords) == 0", "groups.mesh, coords) >= 0")),
        derivatives.SEQUENCE,
        "curvature|reverse over reverse",
        "eigenvalues that grow with the number of ranks",
    ),
    Fault(
        "per-sample gradients are summed over data ranks",
        edit("func.space:within_a_model", ("if a not in DATA_AXES", "")),
        derivatives.SEQUENCE,
        "per sample",
        "a noise scale of pairs of samples",
    ),
    Fault(
        "a Hessian product is left as summands",
        edit("func.products:hessian_vector", ("gradient(loss, p, space)", "gradient(loss, p)")),
        derivatives.SEQUENCE,
        "hessian|curvature",
        "a direction that differs on every rank",
    ),
    Fault(
        "the Gauss-Newton product without the loss",
        edit("func.products:gauss_newton_vector", ("params, curved, space", "params, dz, space")),
        derivatives.SEQUENCE,
        "gauss newton",
        "J^T J in place of J^T H J",
    ),
    Fault(
        "the Fisher product is doubled",
        edit("func.products:fisher_vector", ("0.5 *", "1.0 *")),
        derivatives.SEQUENCE,
        "fisher",
        "a damping of half of what is meant",
    ),
    Fault(
        "a stage receives a cotangent without its tangent",
        edit(
            "func.pipeline:stage_backward",
            (
                "zip(params, x, ct,",
                "zip(params, x, Dual(ct.value, tree.map(lambda t: 0 * t, ct[1])),",
            ),
        ),
        derivatives.pipelined,
        "hessian",
        "curvature that ends at the border of a stage",
    ),
    Fault(
        "products of a tied leaf are not added",
        edit("func.pipeline:_sum", ("total[path] + x if path in total else x", "x")),
        derivatives.pipelined,
        "of embed.tokens",
        "half of the derivative of a tied table",
    ),
    Fault(
        "Lanczos forgets its basis",
        edit("func.estimates:lanczos", ("basis * 2", "basis[-2:]")),
        derivatives.spectrum,
        "times|bound",
        "copies of one eigenvalue taken for several",
    ),
    Fault(
        "conjugate gradients forget the damping",
        edit("func.estimates:conjugate_gradients", ("direction, damping)", "direction, 0.0)")),
        derivatives.solution,
        "solution",
        "influences blown up along flat directions",
    ),
    Fault(
        "probes are drawn by local index",
        edit("func.estimates:probe", ("range(a, b) for", "range(b - a) for")),
        derivatives.probes,
        "signs of",
        "an estimate that depends on the layout",
    ),
    Fault(
        "a stack of leaves pads the dim before",
        edit("func.bases:stacked", ("dim + 1 for dim", "dim for dim")),
        derivatives.directions,
        "does not divide|directions",
        "a basis for whole vocabularies only",
    ),
)

CONVERSION = (
    Fault(
        "keys and values change places",
        row(
            "convert.families:_LLAMA_ROWS",
            "blocks.{i}.attn.kv",
            Row(
                (
                    "model.layers.{i}.self_attn.v_proj.weight",
                    "model.layers.{i}.self_attn.k_proj.weight",
                ),
                "(g k) d -> g k d",
            ),
        ),
        convert.llama_is_read,
        "k is another",
        "a converted model that runs and is another",
    ),
    Fault(
        "gate and up change places",
        edit(
            "convert.families:Row.join",
            ("rearrange([*tensors]", "rearrange([*tensors][::-1]"),
        ),
        convert.llama_is_read,
        "(k|gate) is another",
        "the same",
    ),
    Fault(
        "c_attn by head first",
        row(
            "convert.families:_GPT2_ROWS",
            "blocks.{i}.attn.qkv",
            Row(("transformer.h.{i}.attn.c_attn.weight",), "d (h n k) -> n h k d"),
        ),
        convert.gpt2_is_read,
        "q is another",
        "the same, by the order of another checkpoint's version",
    ),
    Fault(
        "an export in another order",
        edit("convert.families:Row.split", ("stacked.unbind(0)]", "stacked.unbind(0)][::-1]")),
        convert.bits_come_back,
        "tensors differ",
        "an export that loads and is another model",
    ),
    Fault(
        "the older way of writing rope scaling is passed over",
        edit("convert.read_config:_rope", ("dict(old or new or {})", "dict(new or {})")),
        convert.options_are_read,
        "rope_scaling is 'none'",
        "right on short prompts, wrong on long ones",
    ),
    Fault(
        "epsilon is the default",
        edit(
            "convert.read_config:_dense",
            ("fields = {", 'options.config = {**options.config, "rms_norm_eps": 1e-6}; fields = {'),
        ),
        convert.options_are_read,
        "norm_eps is 1e-06",
        "a small constant difference of the logits",
    ),
    Fault(
        "unknown options are passed over",
        edit("convert.read_config:_Options.finish", ("if key not in self.taken", "if False")),
        convert.strange_folders_are_refused,
        "softcap is accepted",
        "a model whose values no other tool has",
    ),
    Fault(
        "tensors too many are passed over",
        edit(
            "convert.matching:match",
            ("[_unexpected(family, name) for name in left]", "[]"),
        ),
        convert.strange_folders_are_refused,
        "adapter is accepted",
        "an adapter that is silently left out",
    ),
    Fault(
        "a second table is not compared",
        edit(
            "convert.matching:_second_table", ("same = (head.dtype", "same = True or (head.dtype")
        ),
        convert.strange_folders_are_refused,
        "lm_head.weight is accepted",
        "a head that is silently dropped",
    ),
    Fault(
        "masters are what was there before the weights",
        edit(
            "train.starting:start",
            ("trainer.fresh(state.params)", "trainer.init()._replace(params=state.params)"),
        ),
        convert.masters_are_of_the_weights,
        "the head's master is another",
        "the first update throws the loaded weights away",
    ),
    Fault(
        "weights start another model",
        edit("train.starting:_check_model", ("if apart:", "if False:")),
        convert.masters_are_of_the_weights,
        "another model is started from",
        "weights that mean nothing where the shapes agree",
    ),
    Fault(
        "deviations of chunks are added up only",
        edit("inspect.statistics:_Sums._join", ("deviations + apart * apart", "deviations + 0")),
        convert.numbers_are_right,
        "std is",
        "an inspection that lies about large tensors",
    ),
    Fault(
        "a row that is zero in its last piece counts as dead",
        edit("inspect.statistics:statistics", ("alive[at] |=", "alive[at] =")),
        convert.numbers_are_right,
        "dead is",
        "the same, by layout",
    ),
    Fault(
        "small differences are not seen",
        edit("inspect.compare:_values", ("same = _same(u, v)", "same = (u - v).abs() < 1e-2")),
        convert.numbers_are_right,
        "other is values in 0 elements",
        "two checkpoints that differ are told to be one",
    ),
)

ZERO1_OF_TWO = (  # shards that cut leaves
    "parallel.dp=2 parallel.sharding=optim train.microbatches=1 parallel.overlap=true "
    "parallel.bucket_size=300"
)
ZERO1_OF_THREE = ZERO1_OF_TWO.replace("dp=2", "dp=3")

CHECKPOINTS = (
    Fault(
        "a run is read from its box's beginning",
        edit("checkpoint.pieces:_flat", ("low - source.first, low", "low, low")),
        saved.moved(ZERO1_OF_THREE, ZERO1_OF_TWO),
        "params|opt|range|size|shape",
        "moments of other elements after a change of ranks",
    ),
    Fault(
        "blocks of a run are one row off",
        edit("checkpoint.pieces:_runs", ("i += 1", "i += 0")),
        saved.moved(ZERO1_OF_THREE, "parallel.tp=4 train.microbatches=2"),
        "params|opt|range|size|shape",
        "the same between tensor and data parallel ranks",
    ),
    Fault(
        "loading does not compare hashes",
        edit("checkpoint.source:Source.check", ("one.text != entry.hash", "False")),
        saved.damage_is_found,
        "a flipped bit was not refused",
        "a bad disk's bits in the weights",
    ),
    Fault(
        "slices begin at the box's first column only",
        edit("checkpoint.source:_slices", ("low = copy.source_at +", "low = copy.source_at + 0 *")),
        saved.columns,
        "are others",
        "every tensor rank has rank 0's columns",
    ),
    Fault(
        "slices that are joined are taken for dense",
        edit("checkpoint.source:_slices", ("None if dense else", "None if True else")),
        saved.columns,
        "are others|invalid|size|shape",
        "columns of other ranks in narrow matrices",
    ),
    Fault(
        "rows of a slice are in another order",
        edit(
            "checkpoint.source:_slices",
            ("at in places for i in range(size)]", "i in range(size) for at in places]"),
        ),
        saved.columns,
        "are others",
        "rows exchanged between heads",
    ),
    Fault(
        "a block is filled while it is written",
        edit("checkpoint.disk:Disk._write", ("[*blocks[1:], blocks[0]], 0", "blocks, 0")),
        saved.large_files,
        "something else than was written",
        "a checkpoint whose hashes are wrong",
    ),
    Fault(
        "the last bytes are not written",
        edit("checkpoint.disk:Disk._write", ("if used:", "if used > 1e9:")),
        saved.large_files,
        "something else than was written",
        "the same",
    ),
    Fault(
        "the last block's error is nobody's",
        edit("checkpoint.disk:Disk._write", ("        one.result()", "        pass")),
        saved.full_disks,
        "nobody was told",
        "a checkpoint that is cut short and called whole",
    ),
    Fault(
        "unexpected tensors are passed over",
        edit("checkpoint.reader:open_checkpoint", ("not rules.may_have(n)", "False")),
        saved.extra_tensors_are_told,
        "was not refused",
        "a layer that is silently left out",
    ),
    Fault(
        "pieces are not seen to be whole tensors",
        edit("checkpoint.pieces:problem_of", ("if held != full else None", "if False else None")),
        saved.whole_tensors,
        "half a tensor was not refused",
        "parameters that stay at zero",
    ),
    Fault(
        "the old checkpoint is gone before the new one is there",
        edit(
            "checkpoint.folder:put",
            ("disk.rename(folder, replaced(folder))", "disk.remove(folder)"),
        ),
        saved.stopped_saves,
        "no whole checkpoint is left",
        "a kill at the wrong moment loses the run",
    ),
    Fault(
        "what broken-off saves left stays",
        edit("checkpoint.folder:clean", ('startswith(".tmp-")', 'startswith(".never-")')),
        saved.stopped_saves,
        "never cleared away|File exists",
        "a save of the same step never works again",
    ),
    Fault(
        "a rank's failure is its own",
        edit(
            "checkpoint.writer:together",
            ("if agree(failure is not None)", "if agree(0) or failure"),
        ),
        saved.one_failure_fails_all,
        "not every rank failed",
        "seven ranks go on, and hang, without the eighth",
    ),
    Fault(
        "a save beside training writes live buffers",
        edit("checkpoint.background:Background.start", ("order.snapshot()", "order")),
        saved.snapshots,
        "values of a later step",
        "weights of two steps in one file",
    ),
    Fault(
        "one checkpoint too few is kept",
        edit("checkpoint.folder:retain", ("[:-keep]", "[: 1 - keep or None]")),
        saved.retention,
        "kept are",
        "the one to go back to is gone",
    ),
)

DATASETS = (
    Fault(
        "a sample begins one token early at a document's start",
        edit("data.megatron:sample_index", ('side="right"', 'side="left"')),
        datasets.order_of_samples,
        "the sample index",
        "samples that are not Megatron's, or an offset outside a document",
    ),
    Fault(
        "a hardly used last epoch is shuffled with the others",
        edit("data.megatron:separate_last", ("return before if", "return None if")),
        datasets.order_of_samples,
        "the document index",
        "documents of the last epoch come early, others late or never",
    ),
    Fault(
        "samples are shuffled before documents",
        edit(
            "data.megatron:build_index",
            ("random = np", "shuffle_index(4, 4, random := np"),
            ("RandomState(seed)", "RandomState(seed))"),
        ),
        datasets.order_of_samples,
        "the document index",
        "another order than Megatron's from the same seed",
    ),
    Fault(
        "blocks of a blend keep their guesses",
        edit("data.blend:_greedy", ("while len(todo):", "for _ in range(1):")),
        datasets.blends,
        "the blend",
        "a dataset's sample twice, another never",
    ),
    Fault(
        "lengths of an index are taken as they are",
        edit("data.indexed:_check_sequences", ("bad.any()", "what == 0")),
        datasets.hostile_index,
        "is opened",
        "a damaged file is read outside its tokens",
    ),
    Fault(
        "places of sequences are summed in 32 bits",
        edit("data.writer:index_bytes", ("lengths, dtype=np.int64", "lengths, dtype=np.int32")),
        datasets.places_of_large_files,
        "the last place",
        "tokens from elsewhere in files above 2 GiB",
    ),
    Fault(
        "every round has the same order",
        edit("data.built:Built._pieces", ("seed + round_", "seed")),
        datasets.rounds_and_resets,
        "rounds repeat each other",
        "a long run sees the same samples side by side again and again",
    ),
    Fault(
        "documents restart at their end, not behind it",
        edit("data.built:Built.draw", ("cumsum(1) - ends_bw", "cumsum(1)")),
        datasets.rounds_and_resets,
        "positions|the loss mask",
        "the end of a document is learned as the start of another",
    ),
    Fault(
        "a cache is named by settings alone",
        edit("data.cache:key_of", ("sorted(arrays.items())", "()")),
        datasets.other_lengths_other_cache,
        "the order",
        "the order of a dataset that is no longer there",
    ),
    Fault(
        "what was read ahead is taken for any step",
        edit("train.feed:Ahead.__call__", ("ready and ready[0] == step", "ready")),
        datasets.batches_read_ahead,
        "the step of a batch",
        "a resumed run trains on the rows of another step",
    ),
)

AREAS: dict[str, tuple[Fault, ...]] = {
    "collectives": COLLECTIVES,
    "reductions": REDUCTIONS,
    "normalisation": NORMALISATION,
    "pipeline": PIPELINE,
    "what is inserted into streams": STREAMS,
    "model": MODEL,
    "loss": LOSS,
    "randomness": RANDOM,
    "optimizer": OPTIMIZER,
    "precision": PRECISION,
    "sharding": SHARDING,
    "memory": MEMORY,
    "processes": PROCESSES,
    "data and guards": GUARDS,
    "datasets": DATASETS,
    "conversion and inspection": CONVERSION,
    "transforms": TRANSFORMS,
    "checkpoints": CHECKPOINTS,
}
FAULTS: tuple[Fault, ...] = tuple(fault for area in AREAS.values() for fault in area)

"""The sections of a configuration: frozen values, each field checked when it is made.

A 0 that stands for "work it out" says so in its line. What spans fields is in ``checks``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from mfun.config.data import DataConfig
from mfun.config.fields import choice, flag, real, tables, text, whole, wholes
from mfun.config.precision import PrecisionConfig

Position = Literal["learned", "rotary", "none"]
RopeScaling = Literal["none", "linear", "llama3", "yarn"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]
Bias = Literal["none", "qkv", "all"]
Schedule = Literal[
    "auto",
    "none",
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-interleaved",
    "zbv",
    "v-half",
    "v-min",
    "dualpipe",
    "dualpipev",
]
Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
Recompute = Literal["none", "full", "first", "selective"]
Optimizer = Literal["adamw", "sgd", "lion", "muon"]
MuonScale = Literal["match_rms", "original"]
LearningRate = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
LossNorm = Literal["tokens", "microbatch"]


@attrs.frozen(kw_only=True)
class ModelConfig:
    """A GPT.

    Args:
      layers: transformer blocks.
      hidden: width d of the residual stream.
      heads: query heads.
      kv_heads: key and value heads; 0 means as many as ``heads``.
      head_dim: width of a head; 0 means ``hidden / heads``.
      ffn: width of the feed-forward layer; 0 means ``4 * hidden``.
      vocab: token kinds, without padding.
      seq_len: tokens of a training sequence.
      dropout: probability that an element is dropped.
      tied: the output head is the embedding's weight.
      position: how a token knows its place.
      rope_theta: base of the rotary angles.
      rope_scaling: how rotary angles are stretched for longer sequences.
      rope_factor: by how much.
      rope_low: llama3 scaling: wavelengths above ``rope_original / rope_low`` stretch in full.
      rope_high: llama3 scaling: wavelengths below ``rope_original / rope_high`` do not stretch.
      rope_original: sequence length before stretching; 0 means ``seq_len``.
      rope_beta_fast: yarn scaling: turns over ``rope_original`` above which nothing stretches.
      rope_beta_slow: yarn scaling: turns below which all stretches.
      norm: kind of normalisation.
      norm_eps: added to the variance.
      activation: of the feed-forward layer; swiglu has a gate.
      bias: which linear layers have one.
      qk_norm: normalise each query and key head.
      sliding_window: keys a query sees, itself included; 0 means all before it.
      init_std: standard deviation of the initial matrices.
    """

    section: ClassVar[str] = "model"

    layers: int = whole(4, least=1)
    hidden: int = whole(128, least=1)
    heads: int = whole(4, least=1)
    kv_heads: int = whole(0)
    head_dim: int = whole(0)
    ffn: int = whole(0)
    vocab: int = whole(256, least=1)
    seq_len: int = whole(128, least=1)
    dropout: float = real(0.0, below=1.0)
    tied: bool = flag(True)
    position: Position = choice("learned", Position)
    rope_theta: float = real(10000.0, open_=True)
    rope_scaling: RopeScaling = choice("none", RopeScaling)
    rope_factor: float = real(1.0, least=1.0)
    rope_low: float = real(1.0, open_=True)
    rope_high: float = real(4.0, open_=True)
    rope_original: int = whole(0)
    rope_beta_fast: float = real(32.0, open_=True)
    rope_beta_slow: float = real(1.0, open_=True)
    norm: Norm = choice("layernorm", Norm)
    norm_eps: float = real(1e-5, open_=True)
    activation: Activation = choice("gelu", Activation)
    bias: Bias = choice("none", Bias)
    qk_norm: bool = flag(False)
    sliding_window: int = whole(0)
    init_std: float = real(0.02, open_=True)

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn or 4 * self.hidden

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate."""
        return self.activation == "swiglu"


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """How the model and the batch are laid out over ranks.

    Args:
      tp: tensor parallel ranks.
      cp: context parallel ranks.
      ep: expert parallel ranks.
      etp: tensor parallel ranks inside an expert; 0 means ``tp``.
      dp: data parallel ranks; 0 fills the world.
      pp: pipeline stages.
      order: numbering of the ranks, fastest axis first.
      chunks: model chunks a stage holds; 0 is the schedule's own number, 2 if it has none.
      schedule: pipeline schedule; auto is none for one stage and 1f1b for more.
      microbatch_group: microbatches that go through one chunk before the next (interleaved); 0 is
        ``pp``.
      in_flight: most chunks whose activations a stage keeps (zero-bubble); 0 is the schedule's own.
      split_backward: weights' gradients apart from inputs', which first leave for the stage that
        waits for them; false computes both together, and keeps fewer outputs' gradients.
      layers_per_stage: blocks of each slice of the model; empty spreads them evenly.
      count_embedding: the embedding counts as a block where they are spread.
      count_loss: the head and loss likewise.
      sequence_parallel: cut norms, dropout and residuals along the sequence over ``tp``.
      sharding: what is cut over the data parallel ranks.
      overlap: communicate gradients and parameters beside computation.
      shard_copies: of every shard over ``dp``, each within its own part of the ranks; 1 is none.
      mean_gradients: gradients of data ranks are averaged by the collectives, not summed.
      prefetch: buckets of sharded parameters that are gathered before they are needed.
      gather_ahead: with ``sharding`` optim or optim_grads, updated parameters are gathered beside
        the next forward, whose layers wait for theirs, instead of at the end of the step.
      bucket_size: elements at which a gradient bucket closes; 0 means the default.
      bucket_pad: elements of which a sharded bucket is a multiple; 65536 keeps messages of hundreds
        of ranks a multiple of what networks like best.
      wide_sums: sharded 16-bit gradients are added up over ranks in fp32 and rounded once; as many
        bytes travel, and whole buffers are received.
      recompute: which layers run again for their backward and keep only their input: full is all
        of them; first the first ``recompute_layers`` blocks of each chunk; selective the attention
        half of each block.
      recompute_layers: how many, with ``recompute=first``.
      offload: most microbatches, counted by chunks, whose activations a stage keeps on its device;
        others wait in the host's memory. 0 keeps all.
      offload_optimizer: masters and moments live in the host's memory; each bucket's travel to its
        update and back, beside the updates of its neighbours.
    """

    section: ClassVar[str] = "parallel"

    tp: int = whole(1, least=1)
    cp: int = whole(1, least=1)
    ep: int = whole(1, least=1)
    etp: int = whole(0)
    dp: int = whole(0)
    pp: int = whole(1, least=1)
    order: str = text("tp-cp-ep-dp-pp")
    chunks: int = whole(0)
    schedule: Schedule = choice("auto", Schedule)
    microbatch_group: int = whole(0)
    in_flight: int = whole(0)
    split_backward: bool = flag(True)
    layers_per_stage: tuple[int, ...] = wholes()
    count_embedding: bool = flag(False)
    count_loss: bool = flag(False)
    sequence_parallel: bool = flag(False)
    sharding: Sharding = choice("no_shard", Sharding)
    overlap: bool = flag(False)
    shard_copies: int = whole(1, least=1)
    mean_gradients: bool = flag(False)
    prefetch: int = whole(1)
    gather_ahead: bool = flag(False)
    bucket_size: int = whole(0)
    bucket_pad: int = whole(128, least=1)
    wide_sums: bool = flag(False)
    recompute: Recompute = choice("none", Recompute)
    recompute_layers: int = whole(0)
    offload: int = whole(0)
    offload_optimizer: bool = flag(False)


@attrs.frozen(kw_only=True)
class OptimConfig:
    """How parameters move.

    Args:
      name: the optimizer.
      lr: highest learning rate.
      min_lr: lowest learning rate that a falling schedule reaches.
      schedule: shape of the learning rate after the warm-up.
      warmup: steps over which the learning rate rises from 0.
      decay_steps: step at which a falling schedule ends; 0 means ``train.steps``.
      wsd_decay: part of the steps over which the wsd schedule falls.
      b1: AdamW's decay of the mean gradient; Lion's, of the mean whose sign it takes.
      b2: AdamW's decay of the mean square; Lion's, of the mean it keeps (0.99 in its paper).
      eps: AdamW's addition to the root of the mean square.
      momentum: of sgd, and of Muon (0.95 in its paper).
      ns_steps: Muon's Newton-Schulz steps.
      muon_scale: Muon's matrices move as far as AdamW would move them, or as first published.
      weight_decay: decay of matrices and embeddings.
      clip: largest global gradient norm; 0 does not clip.
      clip_value: largest element of a gradient, after ``clip``; 0 does not clip.
      count_zeros: count the zeros of the gradient, as the metric ``num_zeros``.
      overrides: multipliers of ``lr`` and ``weight_decay`` by a pattern of parameter paths:
        ``[optim.overrides."embed.*"]`` with ``lr``, ``decay`` or both; the last one that says
        something counts.
    """

    section: ClassVar[str] = "optim"

    name: Optimizer = choice("adamw", Optimizer)
    lr: float = real(1e-3)
    min_lr: float = real(0.0)
    schedule: LearningRate = choice("constant", LearningRate)
    warmup: int = whole(0)
    decay_steps: int = whole(0)
    wsd_decay: float = real(0.1, below=1.0, open_=True)
    b1: float = real(0.9, below=1.0)
    b2: float = real(0.95, below=1.0)
    eps: float = real(1e-8, open_=True)
    momentum: float = real(0.9, below=1.0)
    ns_steps: int = whole(5, least=1)
    muon_scale: MuonScale = choice("match_rms", MuonScale)
    weight_decay: float = real(0.1)
    clip: float = real(1.0)
    clip_value: float = real(0.0)
    count_zeros: bool = flag(False)
    overrides: dict[str, dict[str, float]] = tables("lr", "decay")


@attrs.frozen(kw_only=True)
class TrainConfig:
    """How long, how much at a time, and what is kept.

    Args:
      steps: optimizer steps.
      seed: of initial weights, dropout and sample order.
      init_from: folder of a run, of a checkpoint, or made by `mfun convert`, whose weights are the
        initial ones, for a fresh optimizer; empty draws them.
      global_batch: sequences of a step over all ranks.
      microbatches: pieces in which each data parallel rank takes its part of a step.
      rampup: start, increment, samples: the batch grows from ``start`` in steps of ``increment``
        to ``global_batch``, evenly over so many samples; empty does not.
      loss_norm: a step's loss is the mean over its tokens, or the mean of microbatch means.
      label_smoothing: probability spread over the whole vocabulary.
      z_loss: weight of the squared log-partition.
      check_gradients: look at each rank's gradients before they are reduced, and end the run at one
        that is not finite, naming rank and parameter.
      large_gradient: likewise at one of this absolute value or more; 0 is none.
      eval_every: steps between validation losses; 0 means never.
      eval_batches: global batches of a validation loss.
      checkpoint_every: steps between checkpoints; 0 means only at the end.
      keep: newest checkpoints that are kept; 0 means all.
      async_save: checkpoints are written beside the next steps, from a copy in the host's memory.
      log_every: steps between lines of progress.
      malloc_tuning: ask the allocator of the C library to keep big blocks.
      timeout_s: seconds after which a collective that does not finish is an error.
    """

    section: ClassVar[str] = "train"

    steps: int = whole(200, least=1)
    seed: int = whole(0)
    init_from: str = text("")
    global_batch: int = whole(16, least=1)
    microbatches: int = whole(4, least=1)
    rampup: tuple[int, ...] = wholes(least=1)
    loss_norm: LossNorm = choice("tokens", LossNorm)
    label_smoothing: float = real(0.0, below=1.0)
    z_loss: float = real(0.0)
    check_gradients: bool = flag(False)
    large_gradient: float = real(0.0)
    eval_every: int = whole(50)
    eval_batches: int = whole(4, least=1)
    checkpoint_every: int = whole(100)
    keep: int = whole(0)
    async_save: bool = flag(False)
    log_every: int = whole(1, least=1)
    malloc_tuning: bool = flag(True)
    timeout_s: int = whole(120, least=1)


@attrs.frozen(kw_only=True)
class Config:
    """Everything that decides a run, and nothing else does.

    Args:
      model: the network.
      parallel: its layout over ranks.
      precision: number formats.
      optim: how parameters move.
      data: what is learned from.
      train: how long, and what is kept.

    Example:
      >>> Config(model=ModelConfig(layers=2)).model.ffn_size
      512
    """

    model: ModelConfig = attrs.field(factory=ModelConfig)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    precision: PrecisionConfig = attrs.field(factory=PrecisionConfig)
    optim: OptimConfig = attrs.field(factory=OptimConfig)
    data: DataConfig = attrs.field(factory=DataConfig)
    train: TrainConfig = attrs.field(factory=TrainConfig)


SECTIONS: dict[str, type] = {
    kind.section: kind
    for kind in (ModelConfig, ParallelConfig, PrecisionConfig, OptimConfig, DataConfig, TrainConfig)
}
"""Section name to class, in the order they are written."""

"""Transforms of every order through parallel layers: short pure functions on `torch.func`.

Three places to take a derivative, one formula:

    outside   `mesh_loss(config)` is a function of whole tensors, computed on a simulated mesh;
    inside    a rank-local program under `simulate` or `map_ranks`, with `rank_space`;
    apart     the same program on processes, after `distribute`.

A pipeline is a composition of stages (`mesh_stages`, `pipeline_products`, `stage_products`).
"""

from mfun.func.bases import basis, hessian, jacobian, stacked
from mfun.func.estimates import (
    Estimate,
    Spectrum,
    add,
    conjugate_gradients,
    diagonal_estimate,
    lanczos,
    probe,
    trace_estimate,
)
from mfun.func.model import (
    logits_loss,
    mesh_loss,
    mesh_stages,
    rank_logits,
    rank_loss,
    rank_sample_losses,
    rank_stages,
    run_layers,
    specs_of,
)
from mfun.func.pipeline import (
    Dual,
    pipeline_products,
    seed,
    stage_backward,
    stage_forward,
    stage_products,
)
from mfun.func.products import (
    fisher_vector,
    gauss_newton_vector,
    gradient,
    hessian_vector,
    jacobian_vector,
    per_sample_gradients,
    value_and_gradient,
    vector_jacobian,
)
from mfun.func.space import WHOLE, Space, rank_space, tree_dot

__all__ = [
    "WHOLE",
    "Dual",
    "Estimate",
    "Space",
    "Spectrum",
    "add",
    "basis",
    "conjugate_gradients",
    "diagonal_estimate",
    "fisher_vector",
    "gauss_newton_vector",
    "gradient",
    "hessian",
    "hessian_vector",
    "jacobian",
    "jacobian_vector",
    "lanczos",
    "logits_loss",
    "mesh_loss",
    "mesh_stages",
    "per_sample_gradients",
    "pipeline_products",
    "probe",
    "rank_logits",
    "rank_loss",
    "rank_sample_losses",
    "rank_space",
    "rank_stages",
    "run_layers",
    "seed",
    "specs_of",
    "stacked",
    "stage_backward",
    "stage_forward",
    "stage_products",
    "trace_estimate",
    "tree_dot",
    "value_and_gradient",
    "vector_jacobian",
]

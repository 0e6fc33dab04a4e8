"""What a configuration means in integers: the mesh and each microbatch's size."""

from __future__ import annotations

import attrs

from mfun.config.checks import check
from mfun.config.fields import ConfigError
from mfun.config.sections import Config
from mfun.mesh import Mesh


def mesh(config: Config) -> Mesh:
    """The mesh of a configuration; a ``parallel.dp`` that is still 0 counts as 1.

    Example:
      >>> from mfun.config import load
      >>> mesh(load("tiny", ["parallel.dp=2"])).world
      8
    """
    parallel = config.parallel
    try:
        return Mesh(
            tp=parallel.tp,
            cp=parallel.cp,
            ep=parallel.ep,
            dp=parallel.dp or 1,
            pp=parallel.pp,
            etp=parallel.etp or None,
            order=parallel.order,
        )
    except ValueError as error:
        raise ConfigError(f"section parallel gives no mesh: {error}") from error


def resolve(config: Config, world: int | None) -> Config:
    """Fill ``parallel.dp`` from the number of ranks, then check the whole.

    dp = world / (tp * cp * pp) where it was 0; without a world it is 1.

    Args:
      config: what was asked for.
      world: ranks that there are, or None where nothing runs yet.

    Raises:
      ConfigError: the sizes do not multiply to the world, or a cross-field check fails.

    Example:
      >>> from mfun.config import load
      >>> resolve(load("tiny", []), 8).parallel.dp
      2
    """
    parallel = config.parallel
    model_ranks = parallel.tp * parallel.cp * parallel.pp
    sizes = f"tp * cp * pp = {parallel.tp} * {parallel.cp} * {parallel.pp} = {model_ranks}"
    if world is not None and (world < 1 or world % model_ranks):
        raise ConfigError(
            f"{world} ranks cannot hold parallel.{sizes} ranks of a model replica; "
            f"start a multiple of {model_ranks} ranks or change parallel.tp, parallel.cp or "
            "parallel.pp."
        )
    dp = parallel.dp or (1 if world is None else world // model_ranks)
    if world is not None and dp * model_ranks != world:
        raise ConfigError(
            f"parallel.{sizes} times parallel.dp = {dp} is {dp * model_ranks}, but there are "
            f"{world} ranks; set parallel.dp={world // model_ranks} (or 0) or start "
            f"{dp * model_ranks} ranks."
        )
    resolved = attrs.evolve(config, parallel=attrs.evolve(parallel, dp=dp))
    check(resolved)
    mesh(resolved)
    return resolved

"""JAX functions within a memory budget: what `jax.checkpoint` saves is chosen by our planner (docs/jax.md)."""

from ..errors import need_extra

try:
    import jax as _jax  # noqa: F401
except ImportError:
    raise need_extra("jax", "jax", "recompute.jax") from None

from .search import Plans, Policy, policy

__all__ = ["Plans", "Policy", "policy"]

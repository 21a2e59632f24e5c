"""Activations times a kernel, with a backward pass that suits CPUs in bfloat16."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint


@jax.custom_vjp
def multiply_plainly(x_ND: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """x_ND @ kernel_DF; gradients multiply transposed copies.

    XLA:CPU gives its matrix unit only products of operands as they lie in memory, which d kernel^T and x^T d are not. For
    N, D, F = 1536, 256, 1024 on one core they take 5.1 and 6.2 ms, with copies 1.4 and 1.7; in float32, which has no such unit, the same
    either way. Operands must be whole: over a split one the compiler would not split the copy.
    """
    return x_ND @ kernel_DF


def _forward(x_ND: jax.Array, kernel_DF: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x_ND @ kernel_DF, (x_ND, kernel_DF)


def _backward(saved: tuple[jax.Array, jax.Array], d_NF: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, kernel_DF = saved
    return d_NF @ transposed_copy(kernel_DF), transposed_copy(x_ND) @ d_NF


multiply_plainly.defvjp(_forward, _backward)


def transposed_copy(x: jax.Array) -> jax.Array:
    """A copy of x with its last two axes exchanged; left to itself, the compiler makes it another view of x, or x one of it."""
    in_order = Layout(major_to_minor=tuple(range(x.ndim)))
    turned = with_layout_constraint(x, in_order).swapaxes(-1, -2)
    return jax.lax.optimization_barrier(with_layout_constraint(turned, in_order))

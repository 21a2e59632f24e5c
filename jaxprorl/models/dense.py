"""Activations times a kernel, with a backward pass that suits XLA on CPUs."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint


@jax.custom_vjp
def multiply_plainly(x_ND: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """x_ND @ kernel_DF; gradients multiply transposed copies.

    XLA:CPU gives the fast paths (bfloat16: the matrix unit) only to products of operands as they lie in memory, which d kernel^T and
    x^T d are not. For N, D, F = 1536, 256, 1024 on one core: bfloat16 10.3 and 11.2 ms, with copies 2.0 and 2.7; float32 9.1 and 9.6,
    with copies 6.8 and 8.1. Operands must be whole: over a split one the compiler would not split the copy.
    """
    return x_ND @ kernel_DF


def _forward(x_ND: jax.Array, kernel_DF: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x_ND @ kernel_DF, (x_ND, kernel_DF)


def _backward(saved: tuple[jax.Array, jax.Array], d_NF: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, kernel_DF = saved
    return d_NF @ transposed_copy(kernel_DF), transposed_copy(x_ND) @ d_NF


multiply_plainly.defvjp(_forward, _backward)


def transposed_copy(x: jax.Array) -> jax.Array:
    """x^T in memory; left to itself, the compiler makes it another view of x."""
    return jax.lax.optimization_barrier(with_layout_constraint(x.T, Layout(major_to_minor=(0, 1))))

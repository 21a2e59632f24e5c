"""What a layer keeps for its backward pass and what it computes again, by name."""

from collections.abc import Callable
from typing import Any

import jax

ATTENTION_NAME = "attention"  # checkpoint_name of what attention's backward pass would have to compute again
# Primitives that hold it, with their name. Two have no such name in them: mha of Triton, whose forward rule calls it whole, and cuDNN.
ATTENTION_SAVED = {("name", ATTENTION_NAME), ("custom_vjp_call", "mha"), ("dot_product_attention_fwd_wrapper", None)}


def _attention_saved(primitive: Any, *_: Any, **parameters: Any) -> bool:
    name = parameters.get("name")
    if primitive.name == "custom_vjp_call":
        name = parameters["call_jaxpr"].jaxpr.debug_info.func_name
    return (primitive.name, name) in ATTENTION_SAVED


POLICIES: dict[str, Callable[..., bool]] = {
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input
    "attention": _attention_saved,  # and the context, with one number per token and head where the backward pass needs it
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # every product with a weight matrix, no attention scores
}


def remat(body: Callable[..., Any], name: str, unrolled: bool) -> Callable[..., Any]:
    """The body of a scan over layers under a policy; "none" keeps everything."""
    if name == "none":
        return body
    # In a loop, forward and backward pass are apart anyway; side by side, XLA would merge the two computations again.
    return jax.checkpoint(body, policy=POLICIES[name], prevent_cse=unrolled)

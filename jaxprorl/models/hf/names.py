"""Which Hugging Face tensors a parameter is made of: all of it follows from the parameter's declaration."""

from jaxprorl.models.qwen2 import Declaration

HEAD_KEY = "lm_head.weight"


def is_stacked(declaration: Declaration) -> bool:
    """True when the parameter stacks one Hugging Face tensor per layer."""
    return declaration.axes[0] == "layers"


def hf_keys(declaration: Declaration) -> list[str]:
    """Hugging Face keys of a parameter, in layer order."""
    layers = declaration.shape[0] if is_stacked(declaration) else 1
    return [declaration.hf_name.format(layer=layer) for layer in range(layers)]


def hf_shape(declaration: Declaration) -> tuple[int, ...]:
    """Shape of each of these tensors."""
    shape = declaration.shape[1:] if is_stacked(declaration) else declaration.shape
    return shape[::-1] if declaration.transposed else shape

"""Packaging. The pins live in requirements.txt and requirements-test.txt; this file only reads them."""

from pathlib import Path

from setuptools import find_packages, setup


def requirements(name: str) -> list[str]:
    """The requirement lines of a file beside this one, without comments."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def jax_with(extra: str) -> list[str]:
    """The pins of jax itself, asking for one of its accelerator extras."""
    return [line.replace("jax==", f"jax[{extra}]==", 1) for line in requirements("requirements.txt") if line.startswith("jax==")]


def gpu_compiler() -> list[str]:
    """The packages that compile for GPUs without having one, at the pins of jax itself."""
    names = ("jax-cuda12-plugin", "jax-cuda12-pjrt")
    return [line.replace("jax", name, 1) for name in names for line in requirements("requirements.txt") if line.startswith("jax==")]


setup(
    name="jaxprorl",
    version="0.1.0",
    description="Prolonged reinforcement learning of language models in JAX",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["jaxprorl", "jaxprorl.*", "configs", "configs.*"]),
    install_requires=requirements("requirements.txt"),
    extras_require={
        "gpu": jax_with("cuda12"),
        "gpu-compiler": gpu_compiler(),
        "tpu": jax_with("tpu"),
        "test": requirements("requirements-test.txt"),
    },
)

"""Hugging Face folders in and out: config.json and safetensors, mapped through the declaration table (docs/models.md)."""

from jaxprorl.models.hf.config import read_config
from jaxprorl.models.hf.names import hf_keys
from jaxprorl.models.hf.reader import check_headers, check_tensors, read_params
from jaxprorl.models.hf.writer import write_files, write_folder

__all__ = ["check_headers", "check_tensors", "hf_keys", "read_config", "read_params", "write_files", "write_folder"]

"""A small tokenizer, folders with the real Qwen2 vocabulary and the quickstart's questions, made once."""

from pathlib import Path

import pytest
from qwen_folders import Vocabulary, read_vocabulary, write_deepseek, write_qwen

from configs.quickstart import get_config
from jaxprorl.data.prompts import Item
from jaxprorl.data.splits import Items, load_items
from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer
from jaxprorl.warmstart.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    items = [Item("d", "t", ({"role": "user", "content": f"What is {n} + 1 ?"},), str(n + 1), "here") for n in range(20)]
    return build_tokenizer(items, Path(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return read_vocabulary()


@pytest.fixture(scope="session")
def qwen(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Like Qwen2.5-1.5B-Instruct: ChatML, no BOS."""
    return load_tokenizer(write_qwen(tmp_path_factory.mktemp("qwen"), vocabulary))


@pytest.fixture(scope="session")
def deepseek(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Like DeepSeek-R1-Distill-Qwen-1.5B: its template writes a BOS, and its tokenizer would add another."""
    return load_tokenizer(write_deepseek(tmp_path_factory.mktemp("deepseek"), vocabulary))


@pytest.fixture(scope="session")
def quickstart_items() -> Items:
    return load_items(get_config())

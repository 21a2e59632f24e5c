"""A small tokenizer and the quickstart's questions, made once."""

from pathlib import Path

import pytest

from configs.quickstart import get_config
from jaxprorl.data.prompts import Item
from jaxprorl.data.splits import Items, load_items
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.warmstart.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    items = [Item("d", "t", ({"role": "user", "content": f"What is {n} + 1 ?"},), str(n + 1), "here") for n in range(20)]
    return build_tokenizer(items, Path(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def quickstart_items() -> Items:
    return load_items(get_config())

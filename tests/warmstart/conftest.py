"""The quickstart's questions and the tokenizer made from them."""

import pytest

from configs.quickstart import get_config
from jaxprorl.data.splits import Items, load_items
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.warmstart.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def items() -> Items:
    return load_items(get_config())


@pytest.fixture(scope="session")
def tokenizer(items: Items, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(items.train, tmp_path_factory.mktemp("tokenizer"))

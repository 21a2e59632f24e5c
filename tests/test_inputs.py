import pytest
from factories import tiny_config

from jaxprorl.data.prompts import Item
from jaxprorl.data.splits import Items
from jaxprorl.errors import ConfigError
from jaxprorl.inputs import check_items


def test_a_mix_must_suffice_for_a_batch() -> None:
    train = tuple(Item("d", task, ({"role": "user", "content": str(i)},), "", "here") for i, task in enumerate("aaab"))
    items = Items(train, (), (), {})
    check_items(tiny_config(), items)
    check_items(tiny_config(data__mix=("a", "b")), items)
    with pytest.raises(ConfigError, match=r"batch\.prompts = 4: the train split holds 3 prompts of a only; lower it, or add data"):
        check_items(tiny_config(data__mix=("a",)), items)
    with pytest.raises(ConfigError, match=r"data\.mix: c: the data has no such domain or task"):
        check_items(tiny_config(data__mix=("c",)), items)

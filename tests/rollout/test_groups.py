import pytest
from factories import make_group, make_prompt, tiny_config

from jaxprorl.errors import RewardError
from jaxprorl.rollout.groups import has_signal


def test_the_accuracy_rule_refuses_rewards_that_are_not_binary_by_field_and_value() -> None:
    config = tiny_config(filtering__rule="accuracy")
    group = make_group(make_prompt(3), [[1], [2]], [1.0, 0.5])
    with pytest.raises(RewardError, match=r"filtering\.rule = 'accuracy', prompt 3 of domain domain.*0\.5"):
        has_signal(config, group)
    config.filtering.rules.domain = "spread"
    assert has_signal(config, group)

from factories import make_group, make_prompt, tiny_config

from jaxprorl.rollout.groups import has_signal


def test_the_accuracy_rule_reads_what_is_solved_and_the_rule_of_a_domain_goes_first() -> None:
    config = tiny_config(filtering__rule="accuracy")
    mixed = make_group(make_prompt(3), [[1], [2]], [1.0, -0.5])
    all_right = make_group(make_prompt(3), [[1], [2]], [1.0, 1.5])
    assert has_signal(config, mixed)
    assert not has_signal(config, all_right)
    config.filtering.rules.domain = "spread"
    assert has_signal(config, all_right)

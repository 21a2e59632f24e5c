import json

from factories import tiny_config

from jaxprorl import watch
from jaxprorl.watch import Watch

KL = "kl.k3_median"


def rules() -> watch.Rules:
    config = tiny_config()
    config.resets.update({"at_steps": (3,), "kl_spike": {"on": True}})
    config.alarms.update({"kl_spike": {"action": "log"}, "entropy_collapse": {"action": "pause"}})
    return watch.make_rules(config)[0]


def test_resets_and_alarms_look_at_the_same_step_and_a_reset_empties_both_baselines_of_kl() -> None:
    state, seen = Watch(), []
    for step in range(1, 5):
        state, acted = watch.observe(rules(), state, step, {KL: 0.1 * step, "entropy": 0.01 if step == 2 else 1.0})
        seen.append((state.control.due(step) is not None, [firing.trigger for firing in acted], state.alarms.memories["kl_spike"]))
    assert seen == [
        (False, [], (0.1,)),
        (False, ["entropy_collapse"], (0.1, 0.2)),
        (True, [], ()),
        (False, [], (0.4,)),
    ]
    assert state.control.memories["kl_spike"] == (0.0, 0.4)


def test_a_reset_that_leaves_the_reference_empties_neither_baseline_of_kl() -> None:
    config = tiny_config(resets__reference=False, resets__at_steps=(2,))
    config.resets.kl_spike.on, config.alarms.kl_spike.action = True, "log"
    state = Watch()
    for step in (1, 2):
        state, _ = watch.observe(watch.make_rules(config)[0], state, step, {KL: 0.1})
    assert state.control.due(2)
    assert (state.control.memories["kl_spike"], state.alarms.memories["kl_spike"]) == ((0.0, 0.1, 0.1), (0.1, 0.1))


def test_a_person_may_always_ask() -> None:
    state, _ = watch.observe(rules(), Watch(), 1, {}, command="to see")
    decision = state.control.due(1)
    assert decision and decision.firing.trigger == "manual"


def test_through_json_and_back() -> None:
    state = Watch()
    assert watch.from_json(json.loads(json.dumps(watch.to_json(state)))) == state
    for step in range(1, 4):
        state, _ = watch.observe(rules(), state, step, {KL: 0.1 / step, "entropy": 0.01})
    back = watch.from_json(json.loads(json.dumps(watch.to_json(state))))
    assert back.alarms == state.alarms and back.control == state.control
    assert back.control.due(3)


def test_rules_say_whether_they_are_blind() -> None:
    config = tiny_config(resets__blind=False)
    assert watch.make_rules(config)[0].blind
    config.resets.validation.on = True
    assert not watch.make_rules(config)[0].blind
    config.resets.blind = True
    assert watch.make_rules(config)[0].blind

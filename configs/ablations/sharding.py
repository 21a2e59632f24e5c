"""What each sharding strategy costs on the devices that there are, and whether it computes the same.

    python launch/ablate.py --config configs/ablations/sharding.py                                # on CPU: eight devices made of the host
    python launch/ablate.py --config configs/ablations/sharding.py:2                              # on CPU: two
    python launch/ablate.py --config configs/ablations/sharding.py --config.experiment=FILE       # another model than this small one

Six arms on two devices take about a quarter of an hour of two cores. Devices that share cores tell nothing of the speed of as many
machines, nor does the host's peak memory tell strategies apart: there, only the compiler's estimate of memory and agreement mean something.
On two devices fsdp_tp is tp, and fsdp_cp splits nothing over fsdp. Strategies that the devices or the model do not allow are refused by
themselves and listed; the others go on.
"""

from ml_collections import ConfigDict

from configs.ablations import base


def get_config(cpu_devices: str = "8") -> ConfigDict:
    """`cpu_devices`: how many devices the host is split into where JAX runs on CPU."""
    c = base.get_config()
    c.name = f"sharding_{cpu_devices}"
    c.experiment = "configs/quickstart.py"
    c.fields = (
        f"mesh.cpu_devices={cpu_devices}",
        # Eight heads, so that tensor strategies can split them over eight devices.
        "model.hidden_size=256",
        "model.intermediate_size=768",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=8",
        "model.num_hidden_layers=2",
        # The start model's skill does not matter, only that its answers end.
        "warmstart.skill_updates=100",
        "warmstart.max_skill_updates=100",
        "warmstart.gate_every_updates=100",
        "warmstart.gate_items_per_task=8",
        "warmstart.careless_updates=1",
        "warmstart.max_corrections=0",
        "data.held_out_per_task=16",
        "validation.every_steps=0",
        "resets.every_steps=0",
    )
    c.arms.dp = ()
    c.arms.zero1 = ("mesh.strategy=zero1",)
    c.arms.fsdp = ("mesh.strategy=fsdp",)
    c.arms.tp = ("mesh.strategy=tp",)
    c.arms.fsdp_tp = ("mesh.strategy=fsdp_tp", "mesh.tensor=2")
    c.arms.fsdp_cp = ("mesh.strategy=fsdp_cp", "mesh.context=2")
    c.control = "dp"
    c.seeds = (0,)
    c.question = "speed"
    c.budget.kind = "steps"
    c.budget.size = 8
    return c

"""Sharding is a table: logical axis of a parameter -> mesh axis. A new strategy is a new table."""

# Every table names all logical axes; None = replicated.
STRATEGIES: dict[str, dict[str, str | None]] = {
    "dp": {"layers": None, "vocab": None, "embed": None, "heads": None, "kv_heads": None, "mlp": None},
    "fsdp": {"layers": None, "vocab": None, "embed": "fsdp", "heads": None, "kv_heads": None, "mlp": None},
}
BATCH_AXES = ("data", "fsdp")  # rows of a batch are split over both

"""jaxprorl: prolonged reinforcement learning (ProRL, arXiv 2507.12507) in JAX.

Array names end in their axes: B packed rows, S tokens of a row, P prompts, N samples per prompt, T response tokens,
L layers, V vocabulary, D embed, H query heads, G key-value heads, K head width, F feed-forward, U updates, M micro-batches.
"""

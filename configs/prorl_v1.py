"""ProRL v1 (arXiv 2505.24864, "P1" below; 2507.12507, "P2") as far as the papers tell: one run at 1.5B, on its logic-puzzle domain.

    python launch/train.py --config=configs/prorl_v1.py --config.model.path=FOLDER     # DeepSeek-R1-Distill-Qwen-1.5B

P1 trained on 4 x 8 H100-80GB for about 16,000 GPU-hours. Every number is followed by where it comes from; "choice" marks what no paper
tells. P1's math, code, STEM and instruction-following domains need graders that jaxprorl does not have yet.
"""

from ml_collections import ConfigDict

from configs import base

# The tasks of reasoning-gym without the three that P1 held out (acre, boxnet, game_of_life_halting), without those whose scorer runs the
# answer as a program or pays for anything, and without those whose items change with Python's hash seed. P1 used 96 of them.
TASKS = (
    "ab", "advanced_geometry", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "bf", "binary_alternation", "bitwise_arithmetic",
    "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic", "codeio", "color_cube_rotation", "complex_arithmetic",
    "count_bits", "count_primes", "course_schedule", "cryptarithm", "decimal_arithmetic", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "figlet_font", "fraction_simplification", "futoshiki", "game_of_life", "gcd", "graph_color",
    "group_anagrams", "gsm_symbolic", "jugs", "kakurasu", "knights_knaves", "largest_island", "lcm", "leg_counting", "letter_counting",
    "letter_jumble", "list_functions", "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid", "needle_haystack",
    "number_filtering", "number_format", "number_sequence", "number_sorting", "palindrome_generation", "palindrome_partitioning",
    "path_star", "polynomial_equations", "pool_matrix", "power_function", "prime_factorization", "products", "propositional_logic",
    "quantum_lock", "rectangle_count", "rotate_matrix", "rotten_oranges", "rubiks_cube", "rush_hour", "self_reference",
    "sentence_reordering", "shortest_path", "simple_equations", "simple_geometry", "sokoban", "spell_backward", "string_manipulation",
    "string_splitting", "string_synthesis", "sudoku", "survo", "syllogism", "time_intervals", "tower_of_hanoi", "tsumego",
    "word_sequence_reversal", "word_sorting", "zebra_puzzles",
)  # fmt: skip


def get_config() -> ConfigDict:
    """ProRL v1: base.py with these fields changed."""
    c = base.get_config()
    c.run_name = "prorl_v1"
    c.steps = 2000  # P1, abstract: "more than 2k" RL steps over eight runs
    c.model.path = "models/DeepSeek-R1-Distill-Qwen-1.5B"  # P1 section 2.3.1; put the Hugging Face folder there, or name another
    c.model.dtype = "bfloat16"  # choice
    c.model.reference_dtype = "bfloat16"  # choice

    for task in TASKS:
        c.data.tasks[task] = ConfigDict()  # the library's own difficulty (P1, appendix D)
    c.data.train_per_task = 385  # P1, table 4: 37k logic items over 96 tasks
    c.data.validation_per_task = 100  # P1, appendix D: 9,600 = 96 x 100
    c.data.held_out_per_task = 100  # choice
    c.reward = "jaxprorl.rewards.puzzles:continuous"  # P1, table 4: the task's own score

    c.rollout.samples_per_prompt = 16  # P1, appendix F (32 in runs 6 and 7)
    c.rollout.temperature = 1.2  # P1 section 3.2
    c.rollout.max_prompt_tokens = 1056  # choice
    c.rollout.max_response_tokens = 7040  # P1 section 3.2: 8,096 tokens of context, less the prompt
    c.rollout.slots = 512  # choice; a slot's cache at 1.5B in bfloat16 takes 232 MB
    c.rollout.decode_chunk_tokens = 64  # choice

    c.batch.prompts = 256  # P1 section 3.2
    c.batch.updates = 4  # P1 section 3.2: mini-batches of 64 of the 256 prompts
    c.batch.row_tokens = 8096  # a row holds the longest sequence
    c.batch.micro_batch_rows = 32  # choice
    c.batch.refill_prompts = 64  # choice: no paper gives oversampling or cap
    c.batch.max_drawn_factor = 4.0  # choice

    c.algorithm.advantage = "grpo"  # P1 section 2.1
    c.algorithm.clip_low, c.algorithm.clip_high = 0.2, 0.4  # P1 section 3.2
    c.algorithm.aggregation = "token_mean"  # choice: P1 quotes GRPO's formula; DAPO, whose parts it takes, means over tokens
    c.algorithm.kl_coefficient = 1e-4  # P2's ablation labels
    c.algorithm.kl_estimator = "k3"  # choice: P1 gives no estimator, P2's formula is unusual; this is GRPO's own
    c.filtering.rule = "spread"  # P1 section 2.3 drops accuracy 0 and 1; for continuous rewards that means no spread (choice)

    c.optimizer.learning_rate = 2e-6  # P1 section 3.2, constant
    c.optimizer.b2 = 0.999  # choice: AdamW's own, like eps, weight decay 0 and gradient clip 1
    c.resets.every_steps = 250  # choice: P1 resets at a person's judgement, 2,000 steps over eight runs
    c.resets.optimizer = "all"  # P1 section 2.3: reference and optimizer state

    c.checkpoint.every_steps = 25  # choice
    c.mesh.strategy = "fsdp"  # choice
    return c

"""Records what TRL's own GRPO loss gives for fixed inputs, in trl_values.json beside this file; test_trl_agreement.py compares with it.

    python -m venv trl-env && trl-env/bin/pip install torch==2.13.0 trl==1.16.0
    trl-env/bin/python tests/algorithms/make_trl_values.py

The trainer is TRL's, made with a tiny model that is never run: its log-probs are replaced by the fixed inputs, so that the gradient with
respect to them can be recorded too. Everything after them, `_compute_loss`, is TRL's.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LENGTHS = [7, 1, 4, 6, 3, 7]  # response tokens of six answers
MAX_RESPONSE_TOKENS = 8
CASES = [
    {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta, "epsilon": low, "epsilon_high": high}
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo")
    for level in ("token", "sequence")
    for beta, low, high in ((0.0, 0.2, 0.4), (0.04, 0.2, 0.28))
]


def inputs() -> dict[str, torch.Tensor]:
    """Log-probs far enough apart that every branch of the clip is taken."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    old = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return {
        "logp": old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "old_logp": old,
        "reference_logp": old + 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "advantage": torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64),
    }


def make_trainer(case: dict[str, Any], folder: str) -> trl.GRPOTrainer:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
    )
    shape = Qwen2Config(vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    Qwen2ForCausalLM(shape).save_pretrained(folder)  # TRL loads its reference from where the model came from
    args = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=len(LENGTHS),
        num_generations=2,
        max_completion_length=MAX_RESPONSE_TOKENS,
        use_bias_correction_kl=False,  # GRPO's own KL term; TRL's default multiplies it with the ratio
        report_to=[],
        use_cpu=True,
        bf16=False,
        **case,
    )
    dataset = Dataset.from_list([{"prompt": "a"}] * len(LENGTHS))
    return trl.GRPOTrainer(folder, reward_funcs=no_reward, args=args, train_dataset=dataset, processing_class=tokenizer)


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def record(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Loss, its gradient by the log-probs, and the clipped shares that TRL logs."""
    trainer = make_trainer(case, folder)
    given = inputs()
    logp = given["logp"].requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, torch.zeros_like(logp), None)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).to(torch.float64)
    ids = torch.full_like(mask, 2, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": mask,
            "old_per_token_logps": given["old_logp"],
            "ref_per_token_logps": given["reference_logp"],
            "advantages": given["advantage"],
            "num_items_in_batch": mask.sum(),
        },
    )
    loss.backward()
    metrics = trainer._metrics["train"]
    return case | {
        "loss": loss.item(),
        "gradient": logp.grad.tolist(),
        "clipped_low": metrics["clip_ratio/low_mean"][0],
        "clipped_high": metrics["clip_ratio/high_mean"][0],
        "kl": metrics["kl"][0] if case["beta"] else None,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "lengths": LENGTHS,
            "max_response_tokens": MAX_RESPONSE_TOKENS,
            "inputs": {name: value.tolist() for name, value in inputs().items()},
            "cases": [record(case, folder) for case in CASES],
        }
    cases = ",\n".join(json.dumps(case) for case in values.pop("cases"))
    text = json.dumps(values)[:-1] + ',\n"cases": [\n' + cases + "\n]}\n"
    Path(__file__).with_name("trl_values.json").write_text(text)


if __name__ == "__main__":
    main()

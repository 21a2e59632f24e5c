"""Checks a Hugging Face folder as a start model (`--config.model.path=FOLDER`): config, every tensor, tokenizer, chat template.

python launch/import_hf.py --source FOLDER
"""

import argparse
import os
import sys
from pathlib import Path
from shlex import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import streams

if __name__ == "__main__":
    streams.protect()  # before any file is opened
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # looking at files takes no accelerator from a run

from jaxprorl.errors import UserError
from jaxprorl.model_folder import ModelFolder, check_folder, doubtful_stops
from jaxprorl.models.hf.config import ARCHITECTURE
from jaxprorl.models.qwen2 import parameter_bytes, parameter_count
from jaxprorl.units import size_text


def summary(found: ModelFolder) -> str:
    """What the folder holds, one fact per line."""
    c, tokenizer = found.config, found.tokenizer
    stops = ", ".join(f"{stop} {tokenizer.decode([stop])!r}" for stop in tokenizer.stop_ids)
    bos = "none" if tokenizer.bos_id is None else f"{tokenizer.bos_id} {tokenizer.decode([tokenizer.bos_id])!r}"
    facts = {
        "architecture": f"{ARCHITECTURE}, {c.num_hidden_layers} layers, {c.hidden_size} wide, {c.num_attention_heads} heads "
        f"({c.num_key_value_heads} key-value) of {c.head_dim}",
        "parameters": f"{parameter_count(c):,}, {size_text(parameter_bytes(c))} in memory",
        "stored as": ", ".join(f"{dtype} ({count:,})" for dtype, count in sorted(found.scalars.items())),
        "output matrix": "the embedding (tied)" if c.tie_word_embeddings else "its own",
        "rope theta": f"{c.rope_theta:g}",
        "context": f"{c.max_position_embeddings:,} tokens",
        "vocabulary": f"{tokenizer.vocab_size:,} tokens of {c.vocab_size:,} rows",
        "stop tokens": stops,
        "BOS token": bos,
        "padding": f"{tokenizer.pad_id} {tokenizer.decode([tokenizer.pad_id])!r}",
        "a prompt": repr(tokenizer.decode(found.prompt_ids)),
    }
    return "\n".join(f"{name:14} {value}" for name, value in facts.items())


def main() -> int:
    """Parses the command line, checks, prints; 2 on bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="the model's folder")
    arguments = parser.parse_args()
    try:
        found = check_folder(arguments.source)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(found))
    for line in doubtful_stops(found.tokenizer):
        print(f"WARNING: {line}")
    print(f"\nsound; train on it with {quote(f'--config.model.path={arguments.source}')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

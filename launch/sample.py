"""Shows what a run's policy answers: prompts, completions and scores of its newest checkpoint.

python launch/sample.py --run runs/quickstart [--prompts 4 --samples 2 --temperature 1.0 --task chain_sum --split held_out --seed 0]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import streams

if __name__ == "__main__":
    streams.protect()  # before any file is opened

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxprorl.data.jsonl import SPLITS
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import UserError
from jaxprorl.types import Group


def panel(group: Group, tokenizer: Tokenizer) -> Panel:
    """One prompt with its completions. All text is shown as it is, special tokens included."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_column(overflow="fold")
    for completion, score in zip(group.completions, group.scores, strict=True):
        text = Text(tokenizer.decode(completion.token_ids))
        if completion.finish_reason == "length":
            text.append(" … (cut at the longest length)", style="dim")
        if score.outcome == "scored":
            value = Text(f"{score.value:.2f}", style="green" if score.solved else "red")
        else:
            value = Text("error", style="bold red")
            text.append(f"\n{score.detail}", style="red")
        table.add_row(value, f"{len(completion.token_ids)} tokens", text)
    content = Table.grid()
    content.add_row(Text(tokenizer.decode(group.prompt.token_ids).strip(), style="bold"))
    content.add_row(Text(f"reference answer: {group.prompt.answer}\n", style="dim"))
    content.add_row(table)
    return Panel(content, title=Text(group.prompt.task), title_align="left")


def main() -> int:
    """Parses the command line, samples, prints; 2 on bad input (one line on stderr)."""
    parser = argparse.ArgumentParser(description="Print prompts, completions and scores of a run's newest checkpoint.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, e.g. runs/quickstart")
    parser.add_argument("--prompts", type=int, default=4, help="how many prompts (default 4)")
    parser.add_argument("--samples", type=int, default=2, help="completions of each (default 2)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 = greedy (default 1.0)")
    parser.add_argument("--task", help="only prompts of this task (default: the tasks in turn)")
    parser.add_argument("--split", choices=SPLITS, default="held_out", help="default held_out")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    args = parser.parse_args()

    from jaxprorl.preemption import Preemption
    from jaxprorl.sampling import sample

    try:
        with Preemption():
            sampled = sample(args.run, args.split, args.task, args.prompts, args.samples, args.temperature, args.seed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    for group in sampled.groups:
        console.print(panel(group, sampled.tokenizer))
    scores = [score for group in sampled.groups for score in group.scores]
    values = [score.value for score in scores if score.outcome == "scored"]
    solved = sum(score.solved for score in scores)
    mean = f", mean {sum(values) / len(values):.3f}" if values else ""
    if len(scores) > len(values):
        mean += f", {len(scores) - len(values)} ungraded"
    console.print(
        Text(f"{args.run}, step {sampled.step}, {args.split}, temperature {args.temperature:g}, seed {args.seed}, {sampled.reward}: "
             f"{solved} of {len(values)} solved{mean}")
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws the curves of learning runs: `python plot.py FIGURES.jsonl … PICTURE.png`."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from boxes import WORDS

SMOOTHED = 10
"""Steps that the line is a mean of."""


def main(*figures, picture):
    """For each run one dot a step, a line through their running mean; and what guessing is worth."""
    fig, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for number, path in enumerate(figures):
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        minutes = [row["seconds"] / 60 for row in rows]
        rewards = [row["reward"] for row in rows]
        means = [
            sum(part) / len(part) for end in range(1, len(rows) + 1) if (part := rewards[max(0, end - SMOOTHED) : end])
        ]
        dots, line = f"mean reward of a batch ({rows[0]['rollouts']} rollouts)", f"mean of {SMOOTHED} batches"
        axes.plot(minutes, rewards, ".", color="0.7", markersize=3, label=None if number else dots)
        axes.plot(minutes, means, color=f"C{number}", label=f"{line}, run {number}" if figures[1:] else line)
    axes.axhline(1 / len(WORDS), color="C3", linestyle=":", label=f"guessing (1/{len(WORDS)})")
    axes.axhline(0.8, color="0.5", linestyle="--", linewidth=0.8)
    axes.set(xlabel="minutes", ylabel="reward", ylim=(0, 1.02), xlim=(0, None))
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    fig.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:-1], picture=sys.argv[-1])

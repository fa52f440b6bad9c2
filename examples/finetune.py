"""Demonstration of fine-tuning: LoRA on questions and answers about Python's standard library, dp 2 x tp 2.

    make finetune

It runs the commands that you would run, and prints each of them: a base where there is none, chat data, the audit, an
answer before, training, the same answer after, and two exports. A base is a small Llama that has read the library and
knows no questions; after training it answers in one short sentence. (It has two million parameters: whether the
sentence is true is another matter.) Nothing is downloaded.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from python_questions import HELD_OUT

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "plain"
PROMPT = f"Question:\n{HELD_OUT}\n\nAnswer:\n"  # as the template writes it
BARS = 12


@dataclass(frozen=True)
class Demonstration:
    """Folders of a demonstration, and flags that make its two runs shorter."""

    folder: Path
    base: Path
    tokenizer: Path
    base_flags: Sequence[str] = ()
    tuning_flags: Sequence[str] = ()

    @property
    def questions(self) -> Path:
        """The chat data."""
        return self.folder / "questions.jsonl"

    @property
    def tuned(self) -> Path:
        """The run that tunes the base."""
        return self.folder / "lora"

    def run(self) -> None:
        """All steps, each with the reason for it."""
        tell("1. A base: a model that has read Python's standard library, and was never asked a question")
        if not (self.base / "checkpoints").exists():
            python("pretrain_gpt.py", "--config", "examples/finetune.toml", "--run-dir", self.base, *self.base_flags)
        else:
            print(f"there is one: {self.base}")
        tell("2. Chat data: questions and answers from the documentation, a JSON line each")
        python("examples/python_questions.py", "--output", self.questions)
        tell("3. The audit: what of the data is trained on. Look at it before every run")
        python("tools/audit_chats.py", "--seq-length", "256", *self.data)
        tell(f"4. An answer before, to a question that is not in the data: {HELD_OUT}")
        self.ask()
        tell("5. LoRA on four ranks: each layer is split in two (tp), each batch too (dp); the base is frozen")
        python("finetune_gpt.py", *self.tuning)
        tell("6. The loss")
        print(loss_bars(self.tuned / "metrics.jsonl"))
        print(f"as a picture: {self.tuned / 'loss.png'}")
        tell("7. The same question to the tuned model")
        self.ask("--adapter", self.tuned)
        tell("8. For others: the adapter as PEFT writes it, and the model with the adapter merged into its weights")
        for kind in ("peft", "hf"):  # of an earlier demonstration: nothing is written over a folder that is there
            shutil.rmtree(self.folder / kind, ignore_errors=True)
        python("tools/convert_checkpoint.py", *self.export("peft", "--load", self.tuned))
        python("tools/convert_checkpoint.py", *self.export("hf", "--load", self.base, "--adapter", self.tuned))

    @property
    def data(self) -> list[str | Path]:
        """Flags of the chat data."""
        named: list[str | Path] = [
            "--data-path",
            self.questions,
            "--tokenizer-model",
            self.tokenizer,
            "--chat-template",
            TEMPLATE,
        ]
        return ["--tokenizer-type", "sentencepiece", *named]

    @property
    def tuning(self) -> list[str | Path]:
        """Flags of the run that tunes."""
        adapter = ["--adapter-type", "lora", "--lora-rank", "16", "--lora-alpha", "32"]
        batch = ["--seq-length", "256", "--micro-batch-size", "4", "--global-batch-size", "16"]
        rate = ["--lr", "4e-3", "--lr-decay-style", "cosine", "--lr-warmup-iters", "5", "--weight-decay", "0"]
        length = ["--train-iters", "60", "--eval-interval", "30", "--eval-iters", "1", "--log-interval", "2"]
        start: list[str | Path] = ["--load", self.base, *adapter, "--dp", "2", "--tp", "2", "--dataset-type", "chat"]
        return [*start, *self.data, *batch, *rate, *length, "--run-dir", self.tuned, *self.tuning_flags]

    def ask(self, *flags: str | Path) -> None:
        """Have the base, or the base with an adapter, answer."""
        python("tools/generate.py", "--load", self.base, *flags, *("--prompt", PROMPT), *("--num-tokens", "60"))

    def export(self, kind: str, *flags: str | Path) -> list[str | Path]:
        """Flags of a conversion."""
        return ["--from", "megatronish", "--to", kind, *flags, "--save", self.folder / kind]


def tell(title: str) -> None:
    """Print the title of a step."""
    print(f"\n=== {title}", flush=True)


def python(*words: str | Path) -> None:
    """Print a command and run it; if it fails, its exit status is that of the demonstration."""
    said = [str(word) for word in words]
    print(f"$ python {shlex.join(said)}", flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *said], env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def loss_bars(metrics: Path) -> str:
    """Losses of a run as bars: of about as many of its log lines, evenly spaced, the last one included."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    chosen = [*lines[: -1 : max(1, len(lines) // BARS)], lines[-1]]
    most = max(line["loss"] for line in chosen)
    bars = ((line["step"], line["loss"], "#" * round(50 * line["loss"] / most)) for line in chosen)
    return "\n".join(f"step {step:>4}  {loss:6.3f}  {bar}" for step, loss, bar in bars)


def main(argv: Sequence[str]) -> int:
    """Run the demonstration from its first step; the exit status."""
    parser = argparse.ArgumentParser(description="Fine-tuning with LoRA, from a base to exports.")
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune"), help="where all of it is written")
    parser.add_argument("--base", type=Path, help="run of a Llama-like base (default: FOLDER/base, trained if missing)")
    parser.add_argument("--tokenizer", type=Path, default=Path("demo/tokenizer.model"), help="tokenizer of the base")
    parser.add_argument("--base-flags", default="", help="more flags of the base's run, in one word")
    parser.add_argument("--tuning-flags", default="", help="more flags of the run that tunes it, in one word")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    Demonstration(
        arguments.folder,
        arguments.base or arguments.folder / "base",
        arguments.tokenizer,
        shlex.split(arguments.base_flags),
        shlex.split(arguments.tuning_flags),
    ).run()
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"\nall of it took {minutes} min {seconds} s. Your own model and data: docs/FINETUNING.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

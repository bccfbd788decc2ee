"""Where networks are cut: found from their graphs, refused in words, and balanced as well as can be."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

from mxdist.errors import SpecError
from mxdist.runtime import models
from mxdist.runtime.parallel import partition
from mxdist.runtime.parallel.orders import order
from mxdist.spec.parallelism import Parallelism, PipelineSchedule

LENET = ["features.0", "features.1", "features.2", "features.3", "features.4", "output"]


class Residual(nn.HybridBlock):
    """Its children are called in order, and yet it is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(4), nn.Dense(4)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return x + self.second(self.first(x))


class Reversed(nn.HybridBlock):
    """Calls its children in another order than it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.later, self.sooner = nn.Dense(4), nn.Dense(4)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return self.later(self.sooner(x))


def lenet() -> list[partition.Layer]:
    return partition.layers_of(models.build("lenet", {"classes": 3}))


def layout(**fields: Any) -> Parallelism:
    return Parallelism.parse({"strategy": "model", **fields})


def test_layers_of_a_chain_have_standard_names() -> None:
    assert [layer.name for layer in lenet()] == LENET


@pytest.mark.parametrize(
    ("name", "count", "last_unit"), [("resnet18_v1", 14, "features.7.1"), ("alexnet", 14, "features.12")]
)
def test_networks_of_the_zoo_are_chains(name: str, count: int, last_unit: str) -> None:
    names = [layer.name for layer in partition.layers_of(vision.get_model(name))]
    assert (len(names), names[-1]) == (count, "output")
    assert last_unit in names


@pytest.mark.parametrize("block", [Residual, Reversed])
def test_what_is_no_chain_is_one_layer(block: type[nn.HybridBlock]) -> None:
    net = nn.HybridSequential()
    net.add(nn.Dense(4), block(), nn.Dense(2))
    assert [layer.name for layer in partition.chain(net)] == ["0", "1", "2"]
    assert [layer.name for layer in partition.chain(block())] == [""]


def test_a_chain_stands_for_its_first_layer() -> None:
    layers = partition.layers_of(vision.resnet18_v1())
    names = [layer.name for layer in layers]
    cuts = ["features.5", "features.6.1", "output"]
    assert partition.begin(layers, layout(cuts=cuts), None) == [
        0, names.index("features.5.0"), names.index("features.6.1"), names.index("output"),
    ]  # fmt: skip


def test_wrong_cuts_are_all_told_at_once_with_the_names_that_exist() -> None:
    cuts = ["features.0", "features.3", "features.1", "nowhere", "output"]
    with pytest.raises(SpecError) as caught:
        partition.begin(lenet(), layout(cuts=cuts), None)
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert set(found) == {f"parallelism.cuts.{index}" for index in (0, 2, 3)}
    assert "nothing would be before the cut" in found["parallelism.cuts.0"]
    assert "features.1 does not come after features.3" in found["parallelism.cuts.2"]
    assert "no layer 'nowhere'" in found["parallelism.cuts.3"]
    assert all(", ".join(LENET) in message for message in found.values())


def test_more_stages_than_layers() -> None:
    with pytest.raises(SpecError, match=r"6 layers for 7 stages; the layers are features.0"):
        partition.begin(lenet(), layout(stages=7), None)


def test_a_network_that_cannot_be_cut_says_so() -> None:
    with pytest.raises(SpecError, match="does not call its layers one after the other"):
        partition.begin(partition.layers_of(Residual()), layout(stages=2), None)


def test_a_parameter_of_two_stages_is_refused() -> None:
    first = nn.Dense(4, in_units=4)
    net = nn.HybridSequential()
    net.add(first, nn.Dense(4, in_units=4), nn.Dense(4, in_units=4, params=first.params))
    layers = partition.chain(net)
    with pytest.raises(SpecError, match="0 and 2 share a parameter, but are in stages 0 and 1"):
        partition.check_separate(layers, [0, 2])
    assert partition.check_separate(layers[:2], [0, 1]) is None


def test_layers_that_share_a_parameter_stay_in_one_stage() -> None:
    net = nn.HybridSequential()
    twice = nn.Dense(4, in_units=4)
    net.add(nn.Dense(4, in_units=4), twice, nn.Activation("relu"), twice, nn.Dense(4, in_units=4))
    layers = partition.layers_of(net)
    assert partition.begin(layers, layout(stages=2), [1, 9, 1, 9, 30]) == [0, 4]
    assert partition.begin(layers, layout(stages=3), None) == [0, 1, 4]
    with pytest.raises(SpecError, match="1 and 3 share a parameter, so they belong to one stage: 3 can be made, not 4"):
        partition.begin(layers, layout(stages=4), None)


def test_a_shared_layer_is_told_once() -> None:
    net = nn.HybridSequential()
    twice = nn.Dense(4, in_units=4)
    net.add(twice, twice)
    with pytest.raises(SpecError) as caught:
        partition.check_separate(partition.layers_of(net), [0, 1])
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("seed", range(30))
def test_balance_is_the_best_of_all_partitions(seed: int) -> None:
    generator = random.Random(seed)
    costs = [float(generator.choice([0, 1, generator.randint(0, 1000)])) for _ in range(generator.randint(2, 9))]
    for parts in range(1, len(costs) + 1):

        def largest(begins: Any) -> float:
            return max(sum(costs[a:b]) for a, b in itertools.pairwise([*begins, len(costs)]))

        every = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), parts - 1)]
        found = partition.balanced(costs, parts)
        assert tuple(found) in every
        assert largest(found) == min(map(largest, every))


def test_parameters_count_in_bytes() -> None:
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3), nn.Activation("relu"), nn.Dense(2, in_units=4, use_bias=False))
    net.cast("float64")
    net.initialize()
    assert partition.parameter_bytes(partition.chain(net)) == [8.0 * (12 + 4), 0.0, 8.0 * 8]


def simulate(schedule: PipelineSchedule, stages: int, parts: int) -> tuple[list[int], int]:
    """Let stages work turn by turn, each as soon as its neighbour is done; return peaks and turns."""
    todo = [order(schedule, stage=stage, stages=stages, parts=parts) for stage in range(stages)]
    done: set[tuple[int, bool, int]] = set()
    live, peaks, turns = [0] * stages, [0] * stages, 0
    while any(todo):
        ready = []
        for stage, actions in enumerate(todo):
            if actions:
                forward, part = actions[0]
                first = stage == 0 if forward else stage == stages - 1
                needs = (stage - 1 if forward else stage + 1, forward, part)
                if first or needs in done:
                    ready.append(stage)
        assert ready, "the stages wait for each other"
        turns += 1
        for stage in ready:
            forward, part = todo[stage].pop(0)
            assert forward or (stage, True, part) in done
            done.add((stage, forward, part))
            live[stage] += 1 if forward else -1
            peaks[stage] = max(peaks[stage], live[stage])
    assert len(done) == 2 * stages * parts
    return peaks, turns


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("parts", range(1, 9))
def test_what_each_schedule_promises(stages: int, parts: int) -> None:
    gpipe, turns = simulate(PipelineSchedule.GPIPE, stages, parts)
    assert gpipe == [parts] * stages
    one_by_one, same = simulate(PipelineSchedule.ONE_F_ONE_B, stages, parts)
    assert one_by_one == [min(parts, stages - stage) for stage in range(stages)]
    assert turns == same == 2 * (parts + stages - 1)


def test_layers_that_a_transformer_says_it_has() -> None:
    size = {"layers": 2, "units": 8, "heads": 2, "hidden": 12, "vocabulary": 20, "positions": 9, "classes": 3}
    for pad_id in ({}, {"pad_id": 0}):
        layers = partition.layers_of(models.build("transformer_encoder", {**size, **pad_id}))
        names = ["embeddings", "encoder.layer.0", "encoder.layer.1", "pooler", "classifier"]
        assert [layer.name for layer in layers] == names
        assert [layer.takes_inputs for layer in layers] == [
            name.startswith("encoder") and bool(pad_id) for name in names
        ]


@pytest.mark.parametrize("pad_id", [{}, {"pad_id": 0}])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_of_a_decoder(tied: bool, pad_id: dict[str, int]) -> None:
    size = {"layers": 2, "units": 8, "heads": 2, "hidden": 12, "vocabulary": 20, "positions": 9}
    layers = partition.layers_of(models.build("transformer_decoder", {**size, **pad_id, "tied": tied}))
    assert [layer.name for layer in layers] == ["wte", "h.0", "h.1", "ln_f", "lm_head"]
    assert [layer.takes_inputs for layer in layers] == [False, True, True, False, False]
    if not tied:
        assert partition.begin(layers, layout(stages=5), None) == [0, 1, 2, 3, 4]


def test_layers_that_are_not_what_the_network_computes_are_not_believed() -> None:
    class Wrong(Residual):
        def chain(self) -> list[tuple[str, Any]]:
            return [("first", self.first), ("second", self.second)]

    class Right(Reversed):
        def chain(self) -> list[tuple[str, Any]]:
            return [("sooner", self.sooner), ("later", self.later)]

    assert [layer.name for layer in partition.layers_of(Wrong())] == [""]
    assert [layer.name for layer in partition.layers_of(Right())] == ["sooner", "later"]

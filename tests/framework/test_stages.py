"""Where a model is cut into stages: its layers, what they cost, and whose a parameter is."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.adapters.partition import balanced_cuts
from hvdtrain.errors import UsageError

torch = pytest.importorskip("torch")
stages = pytest.importorskip("hvdtrain.adapters.pytorch.pipeline")


def resnet(name: str) -> Any:
    from hvdtrain.workloads.resnet import pytorch

    pytest.importorskip("torchvision")
    model = pytorch.torchvision().models.get_model(name, weights=None, num_classes=5)
    return model, pytorch.pipeline_layers(model)


@pytest.mark.parametrize(("name", "cut"), [("tutorial", 7), ("small", 3)])
def test_a_sequential_is_its_layers(name: str, cut: int) -> None:
    from hvdtrain.workloads.mnist.pytorch import network

    model = network(name)
    assert stages.layers_of(model) == list(model)
    nested = torch.nn.Sequential(torch.nn.Sequential(*list(model)[:3]), *list(model)[3:])
    assert stages.layers_of(nested) == list(model)
    # Linear layers are large and cheap, convolutions small and dear.
    costs = stages.costs_of(list(model))
    weights = [layer for layer, cost in zip(model, costs, strict=True) if cost]
    assert [type(layer).__name__ for layer in weights] == ["Conv2d", "Conv2d", "Linear", "Linear"]
    # Behind a pooling: before the first Linear, or before the convolution that is dearest.
    assert balanced_cuts(costs, 2) == [range(cut), range(cut, len(model))]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_is_its_stem_blocks_and_head(name: str) -> None:
    model, layers = resnet(name)
    x = torch.randn(2, 3, 64, 64)
    model.eval()
    with torch.no_grad():
        output = x
        for layer in layers:
            output = layer(output)
        assert torch.equal(output, model(x))
    # Where maps are halved, channels are doubled: two blocks of one kind cost the same.
    costs = stages.costs_of(layers)
    assert costs[2] == costs[4] or name == "resnet50"
    whole = sum(costs)
    for number in (2, 3, 4):
        shares = [sum(costs[index] for index in stage) for stage in balanced_cuts(costs, number)]
        assert max(shares) < 1.4 * whole / number
    owners = stages.owners_of(model, [layers[:4], layers[4:]])
    assert owners.keys() == model.state_dict().keys()
    assert (owners["conv1.weight"], owners["fc.bias"]) == (0, 1)
    assert set(owners.values()) == {0, 1}


class Custom(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def pipeline_layers(self) -> list[Any]:
        return [self.first, self.second]


def test_a_model_can_define_its_layers() -> None:
    model = Custom()
    layers = stages.layers_of(model)
    assert layers == [model.first, model.second]
    owners = stages.owners_of(model, [layers[:1], layers[1:]])
    assert (owners["unused"], owners["first.bias"], owners["second.bias"]) == (0, 0, 1)


def test_what_cannot_be_cut() -> None:
    with pytest.raises(UsageError, match=r"those of Linear are unknown: use"):
        stages.layers_of(torch.nn.Linear(2, 2))

    class Residual(torch.nn.Sequential):  # its forward may be another one
        pass

    with pytest.raises(UsageError, match="those of Residual"):
        stages.layers_of(Residual(torch.nn.ReLU()))
    with pytest.raises(UsageError, match=r"^--stages 3: the model has only 2 layers"):
        stages.check_number([torch.nn.ReLU(), torch.nn.ReLU()], 3)
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    with pytest.raises(UsageError, match=r"0\.weight is in stage 0 and in stage 1, and cannot"):
        stages.owners_of(model, [model[:1], model[1:]])


@pytest.mark.parametrize("last", [False, True])
def test_what_is_handed_over_keeps_its_layout(last: bool) -> None:
    batches = pytest.importorskip("hvdtrain.adapters.pytorch.pipeline_schedule")
    kind = torch.channels_last if last else torch.contiguous_format
    for shape in ((3, 4, 5, 6), (1, 4, 1, 1), (0, 4, 5, 6)):
        value = torch.rand(*shape).contiguous(memory_format=kind)
        layout = batches.Layout.of(value)
        received = layout.empty(len(value), torch.device("cpu"))
        message = layout.message(received)  # into which a rank receives
        assert message.is_contiguous()
        message.copy_(layout.message(value))
        assert torch.equal(received, value)
        assert received.is_contiguous(memory_format=kind) or not len(value)
    assert batches.Layout.of(torch.rand(3, 7)) == batches.Layout((7,), torch.float32, False)


def test_the_bubble_by_formula_and_by_the_mean_step() -> None:
    from hvdtrain.adapters.pytorch.pipeline import PipelineAdapter
    from hvdtrain.steps.summary import Bubble, StepSplit
    from hvdtrain.steps.world import World

    adapter = PipelineAdapter()
    adapter.world = World(0, 4, 0, 4, "h", 1, stages=4)
    split = StepSplit(steps=3, data=0.25, compute=2.0, communication=1.0, waiting=0.75)
    assert adapter.bubble(split) is None  # nothing was trained
    pipeline = type("Pipeline", (), {"most": 7})()
    adapter.add_sums(pipeline)
    assert adapter.bubble(split) == Bubble(4, 7, 0.3, 1.75 / 4)
    assert adapter.bubble(StepSplit(data=0.25, undivided=3.0)) == Bubble(4, 7, 0.3, None)
    assert adapter.bubble(None) == Bubble(4, 7, 0.3, None)

"""Which layers ``--sync-batchnorm`` converts, in one process."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.steps.world import World

torch = pytest.importorskip("torch")

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, host="host", hosts=1)


def converted(*layers: Any) -> tuple[int, Any]:
    from hvdtrain.adapters.pytorch.batchnorm import convert

    model = torch.nn.Sequential(*layers)
    return convert(model, lambda values, name: values, lambda: 1.0, ALONE), model


@pytest.mark.parametrize("number", [1, 2, 3])
def test_layers_of_any_dimension(number: int) -> None:
    kind = getattr(torch.nn, f"BatchNorm{number}d")
    x = torch.randn(7, 3, *range(2, 2 + number))
    plain = kind(3)
    count, model = converted(torch.nn.Identity(), torch.nn.Sequential(kind(3)))
    assert count == 1
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model.state_dict()["1.0.running_var"], plain.running_var)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}]
)
def test_layers_with_options(options: dict[str, Any]) -> None:
    plain = torch.nn.BatchNorm1d(3, **options)
    model = converted(torch.nn.BatchNorm1d(3, **options))[1]
    for _ in range(2):
        inputs = torch.randn(7, 3)
        x, y = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
        outputs = model(x), plain(y)
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.square().mul(torch.arange(3.0)).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(dict(model[0].state_dict()), dict(plain.state_dict()))
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


def test_a_model_without_any_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert converted(torch.nn.Linear(3, 3), torch.nn.InstanceNorm1d(3))[0] == 0
    assert caplog.messages == [
        "--sync-batchnorm has no effect: the model has no BatchNorm layer of PyTorch"
    ]

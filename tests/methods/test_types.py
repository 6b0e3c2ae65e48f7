"""Types and devices: torch's defaults, parts kept in the wide type, parameters that must not be touched."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import intbmoe
from intbmoe.export.export import cast_model
from small_intbmoe import make as make_intbmoe
from small_methods import METHODS, SAME_PARTS, dtypes, make, random_mask, tokens
from thinned import thinned


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("gradients", [False, True])
@dtypes
def test_the_default_device_says_nothing_about_the_tensors(name, gradients, dtype):
    """Intermediate tensors are on the input's device; otherwise the compiled library would write to a wrong address."""
    layer, x, mask = make(name, dtype).eval(), tokens(2, 4, dtype=dtype), random_mask(2, 4)
    with torch.set_grad_enabled(gradients):
        expected = layer(x, mask)
        with torch.device("meta"):
            assert torch.equal(layer(x, mask), expected)


@pytest.mark.parametrize("name", METHODS)
def test_what_decides_where_tokens_go_may_be_kept_in_float32(name):
    layer = make(name, torch.bfloat16).eval()
    for tensor in layer.kept_wide():
        tensor.data = tensor.data.float()
    assert layer(tokens(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for tensor in layer.kept_wide())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_layer_can_be_made_and_filled_under_any_default_type(name, dtype):
    torch.set_default_dtype(dtype)
    try:
        layer = make(name, dtype)
        with torch.device("meta"):
            empty = make(name, dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    x = tokens(2, 4, dtype=dtype)
    assert torch.equal(empty.eval()(x), layer.eval()(x))
    for name, buffer in layer.named_buffers():
        assert not buffer.is_floating_point() or buffer.dtype.itemsize >= 4, name


class _Untouched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} ran")


@pytest.mark.parametrize("layer", [*METHODS, "composed"])
def test_parameters_are_counted_without_touching_them(layer, monkeypatch):
    """Under FSDP2 an operation on a sharded parameter waits for all ranks, so a single rank would wait forever."""
    layer = make_intbmoe().precompose() if layer == "composed" else make(layer)
    if "mean_choices" in dict(layer.named_buffers()):  # a number that is not sharded
        monkeypatch.setattr(type(layer), "executed", 2.0)
    with _Untouched():
        assert layer.active_parameters() > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_half_precision_copy_for_serving_keeps_what_decides(name):
    layer = make(name, torch.float32).eval()
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.001)  # as steps do; bfloat16 would lose it
    served = cast_model(copy.deepcopy(layer), torch.bfloat16, precompose=False)
    kept = {id(tensor) for tensor in served.kept_wide()}
    for (key, tensor), before in zip(
        served.state_dict(keep_vars=True).items(), layer.state_dict().values(), strict=True
    ):
        if id(tensor) in kept or not tensor.is_floating_point():
            assert torch.equal(tensor, before), key
        else:
            assert tensor.dtype == torch.bfloat16, key
    assert all(id(buffer) in kept for buffer in served.buffers() if buffer.is_floating_point())
    assert served(tokens(2, 4, dtype=torch.bfloat16)).isfinite().all()


def test_what_is_no_floating_point_number_is_refused_under_autocast_too():
    layer = intbmoe.create("switch", 8, 12)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match=r"x is torch\.int64: expected floating"),
    ):
        layer(torch.ones(2, 3, 8, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"mask is a list: expected torch\.bool"):
        layer(torch.ones(2, 1, 8), [[True], [True]])


# test_contract.py traces how tokens choose in each of these; their experts run like those of other methods.
CHOOSE_OTHERWISE = ("mass", "remoe", "vmoe")


@pytest.mark.parametrize("name", thinned(METHODS, lambda name: name not in (*SAME_PARTS, *CHOOSE_OTHERWISE)))
def test_an_exported_layer_takes_any_number_of_sequences(name):
    layer = make(name, torch.float32).eval()

    def inputs(batch):
        return tokens(batch, 6, dtype=torch.float32), random_mask(batch, 6)

    free = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(layer, inputs(3), dynamic_shapes=(free, free)).module()
    for batch in (1, 2, 7):
        torch.testing.assert_close(program(*inputs(batch)), layer(*inputs(batch)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_token_that_is_not_a_number_shows(name):
    x = tokens(2, 6, dtype=torch.float32)
    x[1, 2] = torch.nan
    assert make(name, torch.float32).eval()(x)[1, 2].isnan().all()

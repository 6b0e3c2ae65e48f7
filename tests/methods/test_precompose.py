"""Precomposition: another type with the same outputs, independent of E, exportable."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import intbmoe
from intbmoe import ComposedMoE, IntBMoE
from intbmoe.precomposition import has_one_precomposed_form
from ranks import run_ranks
from small_intbmoe import SWITCHES, make, switches, tokens
from thinned import thinned


@switches
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_precomposing_changes_no_output(options, dtype):
    layer = make(**options).to(dtype).eval()
    composed = layer.precompose()
    x, mask = tokens(3, 9).to(dtype), torch.rand(3, 9) > 0.3
    assert isinstance(composed, ComposedMoE)
    assert not isinstance(composed, IntBMoE)
    assert torch.equal(composed(x, mask), layer(x, mask))
    composed.backend = "naive"
    torch.testing.assert_close(composed(x, mask), layer(x, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_routes_alike_and_stays_near(dtype):
    layer = make(hidden=64).float().eval()
    composed = layer.precompose(dtype)
    x = tokens(8, 32).to(dtype).float()  # both see the same, representable input
    with intbmoe.record_routing(layer) as log:
        exact = layer(x)
    with intbmoe.record_routing(composed) as half_log:
        half = composed(x.to(dtype))
    assert half.dtype == dtype
    assert torch.equal(log[""].ids, half_log[""].ids)
    assert (half.float() - exact).norm() <= 8 * torch.finfo(dtype).eps * exact.norm()
    with pytest.raises(TypeError, match=f"x is torch.float32.*{dtype}"):
        composed(x)


def test_whole_layers_in_half_precision_precompose_exactly():
    layer = make().bfloat16().eval()
    x = tokens(2, 9).bfloat16()
    assert torch.equal(layer.precompose()(x), layer(x))


def test_nothing_of_the_pool_is_left_and_nothing_trains():
    sizes = {"blocks": 4, "code_dim": 3, "router_dim": 5, "hyper_dim": 4}
    few, many = (IntBMoE(8, 12, experts=experts, **sizes).precompose() for experts in (1, 64))
    assert {n: v.shape for n, v in few.state_dict().items()} == {n: v.shape for n, v in many.state_dict().items()}
    assert not any("pool" in name or "hyper" in name or "codebook" in name for name in few.state_dict())
    assert not any(parameter.requires_grad for parameter in many.parameters())


def test_flops_do_not_depend_on_the_pool():
    def flops(layer):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(torch.randn(1, 20, 8))
        return counter.get_total_flops()

    pools = [IntBMoE(8, 12, experts=experts) for experts in (1, 16, 128)]
    assert len({flops(layer.precompose()) for layer in pools}) == 1
    assert flops(pools[0]) < flops(pools[1]) < flops(pools[2])


def test_training_on_does_not_change_what_was_composed():
    layer = make().eval()
    composed, x = layer.precompose(), tokens(2, 5)
    before = composed(x)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1)
    assert torch.equal(composed(x), before)


def test_a_whole_model_is_copied_without_its_pools():
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = make(), nn.LayerNorm(8).double(), make(seed=4)
            self.again = self.first

        def forward(self, x):
            return self.again(self.second(self.norm(self.first(x))))

    model = Host().eval()
    served = intbmoe.precompose(model)
    x = tokens(2, 5)
    assert torch.equal(served(x), model(x))
    assert isinstance(model.first, IntBMoE)
    assert isinstance(served.first, ComposedMoE)
    assert served.again is served.first
    with pytest.raises(ValueError, match="Linear holds no IntBMoE"):
        intbmoe.precompose(nn.Linear(2, 2))
    assert isinstance(intbmoe.precompose(make()), ComposedMoE)


def scaled_input(module, arguments, options):
    return (), {**options, "x": 2 * (arguments[0] if arguments else options["x"])}


def halved(module, arguments, y):
    return y / 2


class Noted:
    """A hook that is a method, and so copied with a model."""

    def __init__(self):
        self.seen = 0

    def note(self, module, arguments, options, y):
        self.seen += 1


def test_hooks_around_a_layer_run_around_its_composed_form():
    model, noted, x = nn.Sequential(make()).eval(), Noted(), tokens(2, 5)
    bare = model(x)
    model[0].register_forward_pre_hook(scaled_input, with_kwargs=True)
    model[0].register_forward_hook(noted.note, with_kwargs=True, always_call=True)
    model[0].register_forward_hook(halved)
    expected = model(x)
    assert not torch.equal(expected, bare)
    for served in (intbmoe.precompose(model), intbmoe.precompose(copy.deepcopy(model)), model[0].precompose()):
        assert torch.equal(served(x), expected)
        assert torch.equal(copy.deepcopy(served)(x), expected)
        with pytest.raises(ValueError, match="expected"):
            served(x[..., :3])
    assert noted.seen == 1 + 2  # the model, and the layer precomposed by itself, which shares it; others have copies


def test_an_empty_composed_layer_loads_a_saved_one():
    layer = make().eval()
    composed = layer.precompose()
    buffer = io.BytesIO()
    torch.save(composed.state_dict(), buffer)
    buffer.seek(0)
    loaded = ComposedMoE(layer.config).double().eval()
    loaded.load_state_dict(torch.load(buffer))
    assert torch.equal(loaded(tokens(2, 5)), layer(tokens(2, 5)))


def test_active_parameters_count_the_chosen_blocks():
    composed = IntBMoE(192, 768).precompose()
    block = 2 * (2 * 192 * 768 + 768 + 192) + 192
    total = sum(parameter.numel() for parameter in composed.parameters())
    assert composed.active_parameters() == total - 6 * block
    assert composed.quantities() == (16, 2, 8)


def assert_exports(composed, masked):
    """Traced on tokens that all choose block 0, then run on tokens that go everywhere."""
    bias = composed.router.scores.bias
    length = torch.export.Dim("length", min=1, max=4096)
    saved = bias.clone()
    bias[0] += 100
    inputs = (tokens(2, 9).float(), torch.ones(2, 9, dtype=torch.bool))[: 2 if masked else 1]
    exported = torch.export.export(composed, inputs, dynamic_shapes=({1: length},) * len(inputs))
    program = exported.module()
    bias.copy_(saved)  # the exported program holds the same parameter
    for shape in ((2, 1), (2, 9), (2, 130)):
        x = 3 * tokens(*shape, seed=8).float()
        inputs = (x, torch.rand(shape) > 0.4) if masked else (x,)
        with intbmoe.record_routing(composed) as log:
            expected = composed(*inputs)
        if shape[1] == 130 and composed.config.blocks > 1:
            assert log[""].ids[:, 0][log[""].ids[:, 0] >= 0].unique().numel() > 1
        torch.testing.assert_close(program(*inputs), expected, rtol=1e-5, atol=1e-5)
    return exported


SAME_BLOCKS = ("softmax", "linear_hypernetwork", "one_expert", "fixed_scale", "all_blocks")
"""Once composed, their blocks differ from the default's only in their numbers."""


# Several switches in one layer, where they do not exclude each other, because an export takes a second.
EXPORTED = ["default", "no_gate no_bias no_shared no_filter one_layer", "gate_layer_norm shared_mlp"]
EXPORTED += ["three_layers three_shared one_block", "no_layer_norm gate_without_norm shared_linear"]
SEPARATELY = ["everything_off", "one_layer no_shared", "three_layers shared_mlp", "no_gate no_bias"]
SEPARATELY += ["no_filter three_shared", "one_block shared_linear", "no_layer_norm gate_without_norm"]


def test_every_switch_is_exported():
    exported = {name for names in EXPORTED for name in names.split()}
    assert exported == SWITCHES.keys() - {*SAME_BLOCKS, "everything_off"}


@pytest.mark.parametrize("names", thinned([*EXPORTED, *SEPARATELY], EXPORTED.__contains__))
def test_exports_with_any_number_of_tokens_and_any_routing(names):
    options = {option: value for name in names.split() for option, value in SWITCHES[name].items()}
    assert_exports(make(**options).float().eval().precompose(), masked=True)


def test_exports_without_a_mask_and_survives_saving(tmp_path):
    """The mask affects only the order of the rows, so it is not tried with every switch."""
    composed = make().float().eval().precompose()
    torch.export.save(assert_exports(composed, masked=False), tmp_path / "layer.pt2")
    x = tokens(2, 9).float()
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    torch.testing.assert_close(loaded(x[:, :4]), composed(x[:, :4]))


def test_composed_layers_compile_whole():
    composed = make().float().eval().precompose()
    run = torch.compile(composed, fullgraph=True, backend="eager")
    x = tokens(2, 5).float()
    torch.testing.assert_close(run(x), composed(x))


def test_composing_under_autocast_is_as_wide_as_without():
    layer, x = make().float().eval(), tokens(2, 5).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        composed, recipes = layer.precompose(), layer.coefficients()
    assert torch.equal(composed(x), layer.precompose()(x))
    assert recipes[0].dtype == torch.float32


def test_precomposing_draws_no_random_numbers():
    layer = make()
    before = torch.get_rng_state()
    layer.precompose()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_in_half_precision_runs_as_a_whole_with_wide_routers():
    model = nn.Sequential(nn.Linear(8, 8), make(hidden=64).float(), nn.LayerNorm(8)).float().eval()
    served = intbmoe.precompose(model, torch.bfloat16)
    x = tokens(4, 9).float()
    assert served(x.bfloat16()).dtype == torch.bfloat16
    assert served[1].router.hidden.weight.dtype == torch.float32
    assert model[0].weight.dtype == torch.float32
    assert (served(x.bfloat16()).float() - model(x)).norm() <= 2**-4 * model(x).norm()


def _precompose_wrapped(rank, world):
    model = nn.Sequential(make().float())
    x = tokens(2, 5).float()
    return torch.equal(intbmoe.precompose(nn.parallel.DistributedDataParallel(model))(x), model.eval()(x))


def test_wrapped_models_are_unwrapped():
    assert run_ranks(1, _precompose_wrapped) == [True]
    model = nn.Sequential(make().float()).eval()
    served = intbmoe.precompose(torch.compile(model, backend="eager"))
    assert isinstance(served[0], ComposedMoE)


def _precompose_sharded(rank, world):
    """Try what is refused, and what the message says to do instead: outputs when sharded, gathered and precomposed."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build():
        torch.manual_seed(rank)  # so the copies become equal only by gathering
        return nn.Sequential(nn.Linear(8, 8).double(), make()).eval()

    model, mesh = build(), init_device_mesh("cpu", (world,))
    for module in (model[1], model):
        fully_shard(module, mesh=mesh)
    refusals = []
    for attempt in (
        lambda: intbmoe.precompose(model),
        lambda: model[1].precompose(),
        lambda: intbmoe.quantize(model[0]),
    ):
        try:
            attempt()
        except RuntimeError as error:
            refusals.append(str(error))
    x = tokens(2, 5)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    whole = None
    if rank == 0:  # the other ranks get an empty state
        whole = build()
        whole.load_state_dict(state)
        whole = intbmoe.precompose(whole)(x)
    return refusals, model(x).detach(), whole


def test_shards_are_gathered_first():
    (refusals, sharded, whole), (_, other, _) = run_ranks(2, _precompose_sharded)
    assert [message.split(":")[0] for message in refusals] == [*["cannot precompose"] * 2, "cannot quantise"]
    assert all("StateDictOptions(full_state_dict=True)" in message for message in refusals)
    torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(sharded, other, rtol=0, atol=0)


def test_the_specification_runs_under_autocast():
    layer, x = make(hidden=64).float().eval(), tokens(4, 9).float()
    outputs = []
    for backend in ("grouped", "naive"):
        layer.backend = backend
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(layer(x))
    assert (outputs[0] - outputs[1]).norm() <= 2**-6 * outputs[1].norm()


def test_autocast_leaves_float64_alone():
    layer, x = make().eval(), tokens(2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), make().eval()(x))


def test_without_gradients_the_row_operation_is_still_the_specification():
    layer, x = make(), tokens(2, 5)
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_a_layer_told_of_tasks_has_no_one_precomposed_form():
    plain, told = (IntBMoE(8, 8, experts=2, blocks=2, conditioning_dim=width) for width in (0, 3))
    assert has_one_precomposed_form(nn.Sequential(plain))
    assert not has_one_precomposed_form(nn.Sequential(plain, told))


def test_in_a_wider_type_than_the_layers():
    layer, x = IntBMoE(8, 16).eval(), torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(layer.precompose(torch.float64)(x), layer.double()(x), atol=1e-6, rtol=1e-6)


def test_the_frequencies_of_rotary_positions_keep_their_type():
    model = nn.Sequential(IntBMoE(8, 16), nn.Module())
    model[1].register_buffer("inv_freq", torch.randn(4))
    assert intbmoe.precompose(model, torch.bfloat16)[1].inv_freq.dtype == torch.float32


class Cached(nn.Module):
    """Keeps what it derives from its weights until they are cast, as some of timm's attentions do."""

    def __init__(self):
        super().__init__()
        self.bias, self.kept = nn.Parameter(torch.randn(8)), {}
        self.register_buffer("shift", torch.randn(8))

    def _apply(self, *arguments, **options):
        self.kept = {}
        return super()._apply(*arguments, **options)

    def forward(self, x):
        return x + self.kept.setdefault(x.device, self.bias + self.shift)


def test_casting_clears_what_a_host_has_derived_and_keeps_ties():
    model = nn.Sequential(Cached(), IntBMoE(8, 16), Cached()).eval()
    model[2].bias, model[2].shift = model[0].bias, model[0].shift
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        model(x)
    served = intbmoe.precompose(model, torch.bfloat16)
    assert served(x.bfloat16()).dtype == torch.bfloat16
    assert served[0].bias is served[2].bias
    assert served[0].shift is served[2].shift


@pytest.mark.parametrize("wrong", ["bfloat16", torch.int8])
def test_another_dtype_is_told(wrong):
    layer = IntBMoE(8, 16)
    for precompose in (layer.precompose, lambda dtype: intbmoe.precompose(nn.Sequential(layer), dtype)):
        with pytest.raises(ValueError, match=r"is not allowed: dtype must be a torch\.dtype of floats"):
            precompose(wrong)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_composed_in_inference_mode_is_ordinary(dtype):
    model = nn.Sequential(nn.Linear(8, 8), IntBMoE(8, 16), nn.BatchNorm1d(3)).eval()
    with torch.inference_mode():
        served, layer = intbmoe.precompose(model, dtype), model[1].precompose(dtype)
    for made in (served, layer):
        assert not any(tensor.is_inference() for tensor in (*made.parameters(), *made.buffers()))
        made.load_state_dict(made.state_dict())
    x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    served(x).sum().backward()
    assert x.grad.isfinite().all()

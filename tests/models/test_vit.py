"""The Vision Transformer: its size, its class token, stochastic depth, and timm's weights."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe.models.vit import DropPath, ViT, ViTConfig
from intbmoe.tasks.vision.timm_data import timm_data

SMALL = ViTConfig(
    image_size=8, patch_size=4, classes=5, dim=12, depth=3, heads=3, hidden=16, moe_layers=(0, 2), drop_path=0.0
)
DENSE = 3_937_960


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def small(make_ffn=None, config=SMALL):
    torch.manual_seed(1)
    return ViT(config, make_ffn)


def images(batch=2, config=SMALL, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    side = config.image_size
    return torch.randn(batch, config.channels, side, side, generator=generator, dtype=dtype)


def timm_state(config, depth, seed=3):
    """A state dict under timm's names, written out by hand."""
    generator = torch.Generator().manual_seed(seed)
    d, h, p = config.dim, config.hidden, config.patch_size
    shapes = {
        "cls_token": (1, 1, d),
        "pos_embed": (1, (config.image_size // p) ** 2 + 1, d),
        "patch_embed.proj.weight": (d, 3, p, p),
        "patch_embed.proj.bias": (d,),
        "norm.weight": (d,),
        "norm.bias": (d,),
        "head.weight": (config.classes, d),
        "head.bias": (config.classes,),
    }
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.norm1.weight": (d,),
            f"blocks.{i}.norm1.bias": (d,),
            f"blocks.{i}.attn.qkv.weight": (3 * d, d),
            f"blocks.{i}.attn.qkv.bias": (3 * d,),
            f"blocks.{i}.attn.proj.weight": (d, d),
            f"blocks.{i}.attn.proj.bias": (d,),
            f"blocks.{i}.norm2.weight": (d,),
            f"blocks.{i}.norm2.bias": (d,),
            f"blocks.{i}.mlp.fc1.weight": (h, d),
            f"blocks.{i}.mlp.fc1.bias": (h,),
            f"blocks.{i}.mlp.fc2.weight": (d, h),
            f"blocks.{i}.mlp.fc2.bias": (d,),
        }
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def by_hand(state, x, config):
    """The forward of timm's model in plain torch, from its published equations."""

    def norm(z, name):
        mean, variance = z.mean(-1, keepdim=True), z.var(-1, unbiased=False, keepdim=True)
        return (z - mean) / torch.sqrt(variance + 1e-6) * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(z, name):
        return z @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    p, d, side = config.patch_size, config.dim, config.image_size // config.patch_size
    patches = x.view(len(x), 3, side, p, side, p).permute(0, 2, 4, 1, 3, 5).reshape(len(x), side * side, 3 * p * p)
    z = patches @ state["patch_embed.proj.weight"].view(d, -1).T + state["patch_embed.proj.bias"]
    z = torch.cat([state["cls_token"].expand(len(x), 1, d), z], 1) + state["pos_embed"]
    width = d // config.heads
    for i in range(config.depth):
        q, k, v = linear(norm(z, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").chunk(3, -1)
        heads = []
        for h in range(config.heads):
            part = slice(h * width, (h + 1) * width)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width)
            heads.append(scores.softmax(-1) @ v[..., part])
        z = z + linear(torch.cat(heads, -1), f"blocks.{i}.attn.proj")
        inner = linear(norm(z, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")
        z = z + linear(inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2))), f"blocks.{i}.mlp.fc2")
    return linear(norm(z, "norm")[:, 0], "head")


def test_the_dense_model_has_the_papers_parameters():
    model = ViT(ViTConfig())
    assert count(model) == DENSE
    assert ViTConfig().patches == 196


@pytest.mark.parametrize(
    ("options", "module"),
    [
        (("switch", 192, 768, {"experts": 17}), 17 * 295_872 + 192 * 17),
        (("intbmoe", 192, 768, {"experts": 16}), 5_088_793),
    ],
)
def test_mixtures_stand_in_layers_0_2_4_6_beside_the_class_tokens_ffn(options, module):
    name, dim, hidden, rest = options
    model = ViT(ViTConfig(), lambda: intbmoe.create(name, dim, hidden, **rest))
    assert [block.moe is not None for block in model.blocks] == [True, False] * 4
    assert count(model) == DENSE + 4 * module


def test_every_mixture_is_made_anew():
    model = small(lambda: intbmoe.create("switch", 12, 16, experts=3))
    assert model.blocks[0].moe is not model.blocks[2].moe
    assert not torch.equal(model.blocks[0].moe.router.weight, model.blocks[2].moe.router.weight)


class Recorder(nn.Module):
    """An FFN that remembers what it was called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return torch.zeros_like(args[0])


def test_the_mixture_sees_the_normed_patch_tokens_alone_and_no_mask():
    model = small(Recorder).eval()
    model(images())
    block = model.blocks[0]
    ((x,), kwargs) = block.moe.calls[0]
    assert kwargs == {}
    assert x.shape == (2, SMALL.patches, SMALL.dim)
    tokens = torch.cat([model.cls_token.expand(2, -1, -1), model.patch_embed(images())], 1) + model.pos_embed
    tokens = tokens + block.attn(block.norm1(tokens))
    torch.testing.assert_close(x, block.norm2(tokens)[:, 1:])


def test_the_class_token_goes_through_its_own_ffn():
    """With mixtures that return zero, only the class token changes in the second half of an MoE block."""
    model = small(Recorder).eval()
    x = torch.randn(2, 1 + SMALL.patches, SMALL.dim)
    y = model.blocks[0].feed_forward(x)
    torch.testing.assert_close(y[:, :1], model.blocks[0].mlp(x[:, :1]))
    assert (y[:, 1:] == 0).all()


def test_without_an_ffn_of_its_own_the_class_token_goes_through_the_mixture():
    config = replace(SMALL, class_token_ffn=False)
    model = ViT(config, Recorder).eval()
    x = torch.randn(2, 1 + SMALL.patches, SMALL.dim)
    model.blocks[0].feed_forward(x)
    assert model.blocks[0].moe.calls[0][0][0] is x
    assert model.blocks[0].mlp is None
    assert model.blocks[1].mlp is not None
    assert config.mixture_tokens == SMALL.mixture_tokens + 1 == 1 + SMALL.patches


@pytest.mark.parametrize("name", [None, "switch", "intbmoe"])
def test_every_parameter_gets_a_gradient(name):
    make = None if name is None else lambda: intbmoe.create(name, 12, 16, experts=3)
    model = small(make)
    loss = model(images(8)).square().sum() + (0 if name is None else intbmoe.aux_loss(model))
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    assert model.cls_token.grad.abs().sum() > 0
    assert model.patch_embed.proj.weight.grad.abs().sum() > 0


def test_patches_are_told_apart_by_position():
    model = small().eval()
    x = images(1)
    swapped = torch.cat([x[..., 4:], x[..., :4]], -1)
    assert not torch.allclose(model(x), model(swapped))
    with torch.no_grad():
        model.pos_embed.zero_()
    torch.testing.assert_close(model(x), model(swapped))


def test_backbone_starts_as_deit_and_the_mixture_as_it_likes():
    torch.manual_seed(0)
    model = ViT(ViTConfig(depth=2, moe_layers=(0,)), lambda: intbmoe.create("switch", 192, 768, experts=4))
    for parameter in (model.blocks[1].mlp.fc1.weight, model.blocks[0].attn.qkv.weight, model.pos_embed):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[1].attn.proj.bias.abs().max() == 0
    # nn.Linear's own initialisation: uniform within 1/√192, standard deviation 1/√(3·192).
    assert model.blocks[0].moe.experts.up.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 192), rel=0.05)


def test_drop_path_keeps_the_expectation_and_drops_whole_images():
    path = DropPath(0.25).train()
    x = torch.ones(20_000, 3, 2)
    y = path(x)
    assert ((y == 0) | torch.isclose(y, torch.tensor(4 / 3))).all()
    assert (y.flatten(1) == y[:, :1, 0]).all()
    assert y.mean().item() == pytest.approx(1, abs=0.02)  # five standard errors: √(1/3 / 20,000) is 0.0041
    assert torch.equal(path.eval()(x), x)


def test_drop_path_grows_linearly_with_depth():
    rates = [block.drop_path.rate for block in ViT(ViTConfig(drop_path=0.1, depth=8)).blocks]
    assert rates == pytest.approx([0.1 * i / 7 for i in range(8)])
    assert ViT(ViTConfig(drop_path=0.1, depth=1, moe_layers=())).blocks[0].drop_path.rate == 0


def test_drop_path_acts_in_training_only():
    model = small(config=ViTConfig(**{**vars(SMALL), "drop_path": 0.9}))
    x = images()
    assert torch.equal(model.eval()(x), model(x))
    model.train()
    torch.manual_seed(0)
    first = model(x)
    assert not all(torch.equal(first, model(x)) for _ in range(8))


def test_bf16_autocast_runs():
    model = small(lambda: intbmoe.create("intbmoe", 12, 16, experts=3)).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(images())
    exact = model(images())
    assert (rounded.float() - exact).norm() <= 2**-4 * exact.norm()


def test_timm_weights_give_timms_logits():
    state = timm_state(SMALL, depth=3)
    model = small().eval()
    model.load_state_dict(state)
    x = images(dtype=torch.float64)
    state64 = {name: value.double() for name, value in state.items()}
    torch.testing.assert_close(model.double()(x), by_hand(state64, x, SMALL), rtol=1e-10, atol=1e-10)


def test_logits_are_timms_own():
    try:
        timm_data()  # makes torchvision importable beside a CPU torch
    except ModuleNotFoundError:
        pytest.skip("timm is not installed; a hand-written model stands in")
    import timm

    theirs = timm.create_model("deit_tiny_patch16_224", pretrained=False).eval()
    theirs.blocks = theirs.blocks[:8]
    ours = ViT(ViTConfig()).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 15}, r"patch_size=15.*image_size \(224\)"),
        ({"heads": 5}, r"heads=5.*dim \(192\)"),
        ({"moe_layers": (0, 8)}, r"moe_layers=\(0, 8\).*from 0 to 7"),
        ({"drop_path": 1.0}, r"drop_path=1.0"),
        ({"depth": 0}, r"depth=0"),
    ],
)
def test_bad_sizes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**options)


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 3, 8, 12\): expected \(batch, 3, 8, 8\)"):
        small()(torch.zeros(2, 3, 8, 12))


@pytest.mark.parametrize(("std", "expected"), [(0.02, 0.02), (0.1, 0.1), (None, 1 / math.sqrt(3 * 192))])
def test_how_dense_ffns_start_is_a_setting(std, expected):
    block = ViT(ViTConfig(depth=1, moe_layers=(0,), ffn_std=std)).blocks[0]
    assert block.mlp.fc1.weight.std().item() == pytest.approx(expected, rel=0.05)
    assert block.mlp.fc1.bias.abs().max() == 0
    assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05), "the rest of the backbone is as it was"


def test_an_ffn_without_a_block_to_go_to_is_refused():
    config = ViTConfig(image_size=8, patch_size=4, dim=6, heads=1, depth=1, moe_layers=())
    with pytest.raises(ValueError, match=r"moe_layers=\(\) is not allowed: .* at least one block number"):
        ViT(config, lambda: torch.nn.Identity())

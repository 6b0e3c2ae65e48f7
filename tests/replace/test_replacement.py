"""Mixtures in place of other people's FFNs: what is found, what changes, what is refused."""

import copy

import pytest
import torch
from torch import nn

import intbmoe
from foreign_models import TIMM, TRANSFORMERS, hf, output, timm_model, transformers_model
from intbmoe.layer import moe_layers

SMALL = {"experts": 3, "blocks": 4, "hidden": 10}
MODELS = [("transformers", name) for name in TRANSFORMERS] + [("timm", name) for name in TIMM]
every_model = pytest.mark.parametrize(("library", "name"), MODELS, ids=[f"{a}-{b}" for a, b in MODELS])


def make(library, name):
    return transformers_model(name) if library == "transformers" else timm_model(name)


@every_model
def test_a_kept_ffn_changes_nothing_and_the_mixture_takes_part(library, name):
    model, inputs = make(library, name)
    before = output(model, inputs)
    report = intbmoe.replace_ffn(model, "intbmoe", example=inputs, **SMALL)
    assert report.largest_change == report.output_change == 0.0
    assert torch.equal(output(model, inputs), before)
    layers = dict(moe_layers(model))
    assert list(layers) == [row.name for row in report.layers]
    assert not report.left
    for layer in layers.values():
        bias = layer.pools[-1].bias
        nn.init.ones_(bias)
        assert not torch.equal(output(model, inputs), before)
        nn.init.zeros_(bias)
        assert torch.equal(output(model, inputs), before)


def test_generation_with_and_without_a_cache():
    model, inputs = transformers_model("llama")
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(**inputs, **settings)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    assert torch.equal(model.generate(**inputs, **settings), before)
    for _, layer in moe_layers(model):
        layer.pools[-1].reset_parameters()
        nn.init.normal_(layer.pools[-1].bias)
    after = model.generate(**inputs, **settings)
    assert not torch.equal(after, before)
    assert torch.equal(model.generate(**inputs, **settings, use_cache=False), after)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bert", "t5", "bart"])
def test_everything_learns_from_the_second_step_on(name):
    model, inputs = transformers_model(name)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    silent = []
    for _ in range(2):
        optimizer.zero_grad()
        output_ = model(**inputs)[0]
        weights = torch.linspace(-1, 1, output_.numel(), dtype=output_.dtype).view_as(output_)
        ((output_ * weights).sum() + intbmoe.aux_loss(model)).backward()
        optimizer.step()
        silent.append(
            {
                name.partition(".")[0]
                for _, layer in moe_layers(model)
                for name, parameter in layer.named_parameters()
                if parameter.grad is None or not parameter.grad.any()
            }
        )
    assert {"codebook", "router", "hypernetwork"} <= silent[0]
    assert silent[1] == set()


def test_the_report_tells_parameters_flops_and_changes():
    model, _ = transformers_model("llama")
    dense = sum(parameter.numel() for parameter in model.parameters())
    report = intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    row = report.layers[0]
    layer = model.model.layers[0].mlp
    assert row.parameters == (3 * 16 * 24, sum(parameter.numel() for parameter in layer.parameters()))
    assert report.parameters == (dense, sum(parameter.numel() for parameter in model.parameters()))
    assert row.flops[0] == 2 * 3 * 16 * 24
    composed = layer.float().precompose()
    per_token = intbmoe.counting.count_flops(composed, torch.randn(1, 1, 16)).total()
    assert row.flops[1] == per_token
    composition = 2 * 2 * 4 * 3 * (16 * 10 + 10 + 10 * 16 + 16)  # two paths, 4 blocks of 3 bases
    assert row.flops_per_forward >= composition
    text = str(report)
    assert "model.layers.1.mlp" in text
    assert "LlamaMLP 16→24" in text
    assert "2 FFNs, model parameters" in text


def test_layers_and_names_choose():
    model, _ = transformers_model("t5")
    report = intbmoe.replace_ffn(model, "intbmoe", match=r"^encoder", layers=[-1], **SMALL)
    assert [row.name for row in report.layers] == ["encoder.block.1.layer.1.DenseReluDense"]
    again = intbmoe.replace_ffn(model, "deepseek", match=r"^decoder", experts=3, hidden=10)
    assert [row.name for row in again.layers] == [f"decoder.block.{block}.layer.2.DenseReluDense" for block in (0, 1)]
    assert again.largest_change == 0.0
    rest, _ = transformers_model("llama")
    with pytest.raises(ValueError, match=r"layers=\[5\] .* from 0 to 1, or negative from the end: found 2 FFNs"):
        intbmoe.replace_ffn(rest, "intbmoe", layers=[5], **SMALL)
    for layers in (1, [], ["0"]):
        with pytest.raises(ValueError, match=r"layers=.* is not allowed: layers must be a list of numbers"):
            intbmoe.replace_ffn(rest, "intbmoe", layers=layers, **SMALL)


def test_half_precision_keeps_what_routes_in_float32():
    model, inputs = transformers_model("llama", torch.bfloat16)
    before = output(model, inputs)
    report = intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    assert report.largest_change == 0.0
    assert torch.equal(output(model, inputs), before)
    layer = model.model.layers[0].mlp
    assert layer.pools[0].weight.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in layer.kept_wide()} == {torch.float32}


def test_dropout_inside_an_inlined_ffn_stays_inside():
    model, _ = transformers_model("bart")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    block = model.model.encoder.layers[0]
    assert block.activation_dropout == 0.0
    assert block.fc2.shared.dropout.p == 0.25


# What is refused.


class Toy(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Mlp(nn.Module):
    def __init__(self, first="fc1", last="fc2"):
        super().__init__()
        self.add_module(first, nn.Linear(8, 12))
        self.add_module(last, nn.Linear(12, 8))
        self.names = first, last

    def forward(self, x):
        return getattr(self, self.names[1])(torch.relu(getattr(self, self.names[0])(x)))


class TakesResidual(Mlp):
    def forward(self, x, residual):
        return super().forward(x) + residual


class MixesTokens(Mlp):
    def forward(self, x):
        return super().forward(x) + x.mean(-2, keepdim=True)


class ReturnsTuple(Mlp):
    def forward(self, x):
        return super().forward(x), None


class PackedLinear(nn.Linear):
    pass


def packed():
    mlp = Mlp()
    mlp.fc1 = PackedLinear(8, 12)
    return mlp


def tied():
    mlp = Mlp()
    return Toy(first=Toy(mlp=mlp), second=Toy(mlp=mlp))


REFUSED = {
    "quantised": (lambda: Toy(mlp=packed()), "mlp: a map is a PackedLinear: replace before quantising"),
    "tied": (tied, "first.mlp: it is tied to another"),
    "residual": (lambda: Toy(mlp=TakesResidual()), "its forward takes x, residual"),
    "mixing": (lambda: Toy(mlp=MixesTokens()), "its outputs depend on more than one token each"),
    "tuple": (lambda: Toy(mlp=ReturnsTuple()), "mlp returns a tuple"),
    "tokens": (lambda: Toy(mlp_tokens=Mlp()), "it maps tokens, not channels"),
    "mixture": (lambda: Toy(moe=Toy(experts=nn.ModuleList([Mlp()]))), "it is already part of a mixture"),
    "unknown": (lambda: Toy(mlp=Mlp("a", "b")), "its maps have unknown names: use match= to replace it"),
    "alone": (Mlp, "the model itself is an FFN"),
    "nothing": (lambda: Toy(head=nn.Linear(8, 4)), r"no FFN was recognised in Toy: .* put intbmoe\.create"),
    "torch": (lambda: Toy(block=nn.TransformerEncoderLayer(8, 2, 12)), "block: PyTorch's layer reads"),
    "meta": (lambda: Toy(mlp=Mlp()).to("meta"), "on the meta device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_with_the_reason_and_left_as_it_was(case):
    build, reason = REFUSED[case]
    model = build()
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=reason):
        intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    assert list(model.state_dict()) == names
    assert not list(moe_layers(model))


def test_albert_is_refused():
    config = hf.AlbertConfig(
        vocab_size=40,
        embedding_size=8,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    with pytest.raises(ValueError, match="one FFN runs at every depth"):
        intbmoe.replace_ffn(hf.AlbertModel(config), "intbmoe", **SMALL)


class Calls(nn.Module):
    """Calls its FFN in a way of its own."""

    def __init__(self, call):
        super().__init__()
        self.mlp, self.call = Mlp(), call

    def forward(self, x):
        return self.call(self.mlp, x)


def test_tokens_given_by_name_are_refused_before_anything_changes():
    model = Calls(lambda mlp, x: mlp(x=x))
    with pytest.raises(ValueError, match=r"mlp gets its tokens by name \(x=…\).*leave the name out"):
        intbmoe.replace_ffn(model, "intbmoe", example=torch.randn(1, 3, 8), **SMALL)
    assert not list(moe_layers(model))


def test_an_example_shows_what_runs_twice():
    with pytest.raises(ValueError, match="mlp ran 2 times in one forward of the example"):
        intbmoe.replace_ffn(Calls(lambda mlp, x: mlp(mlp(x))), "intbmoe", example=torch.randn(2, 3, 8), **SMALL)


@pytest.mark.parametrize("name", ["bert", "opt"])
def test_a_block_may_stand_alone(name):
    model, _ = transformers_model(name)
    block = model.bert.encoder.layer[0] if name == "bert" else model.model.decoder.layers[0]
    report = intbmoe.replace_ffn(block, "intbmoe", **SMALL)
    assert [row.name for row in report.layers] == [{"bert": "output.dense", "opt": "fc2"}[name]]


def test_a_match_takes_unknown_names():
    model = Toy(mlp=Mlp("a", "b"))
    report = intbmoe.replace_ffn(model, "intbmoe", match="mlp", **SMALL)
    assert report.largest_change == 0.0
    with pytest.raises(ValueError, match="it already holds mixtures"):
        intbmoe.replace_ffn(model, "intbmoe", **SMALL)


def test_what_does_not_fit_the_method_or_the_host_is_refused():
    model, _ = transformers_model("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"smear cannot be used in model\.layers\.0\.mlp .* whole sequence"):
        intbmoe.replace_ffn(model, "smear", start="copy", experts=3)
    with pytest.raises(
        ValueError, match=r"switch has no shared expert .* use start='copy', .* \(deepseek, deepseek_v1"
    ):
        intbmoe.replace_ffn(model, "switch", start="shared")
    with pytest.raises(ValueError, match=r"mumoe_cp has no shared expert .* use start='fresh', which"):
        intbmoe.replace_ffn(model, "mumoe_cp", start="shared", experts=3)
    with pytest.raises(ValueError, match="dim=16 is not allowed: dim must be left out"):
        intbmoe.replace_ffn(model, "intbmoe", dim=16)
    for wrong in ("(", 5):
        with pytest.raises(ValueError, match=r"match=.*(\(|5).* is not allowed: match must be a regular expression"):
            intbmoe.replace_ffn(model, match=wrong)
    with pytest.raises(ValueError, match=r"redraw=0\.5 is not allowed"):
        intbmoe.replace_ffn(model, "intbmoe", redraw=0.5)
    with pytest.raises(ValueError, match="start='warm' is not allowed"):
        intbmoe.replace_ffn(model, "intbmoe", start="warm")
    with pytest.warns(UserWarning, match="use_cache=False"):
        intbmoe.replace_ffn(copy.deepcopy(model), "lory", start="copy", experts=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_ffn_that_needs_whole_images_is_refused():
    timm = pytest.importorskip("timm")
    with pytest.raises(ValueError, match="does not run on single tokens"):
        intbmoe.replace_ffn(timm.create_model("mambaout_femto"), experts=2, blocks=2, layers=[0])

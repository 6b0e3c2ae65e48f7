"""Save and load a model with replaced FFNs.

The model's own class would build its old FFNs, find no weights for them and leave them random, with a warning at most.
So the state of a replaced model holds a *marker* for each layer: a single number under the name of a removed weight,
which no loader can fit into that weight. One more entry says in its name how to load the model, and in its value what
was replaced. ``from_pretrained`` reads that, builds the model with its layers and loads the rest as the model's own
library does.

The module around a layer adds these entries, not the model: so they are also there when only a part of the model is
saved, when the part has moved into another model, and after ``precompose``.
"""

import json
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.foreign import import_torchvision
from intbmoe.layer import MoELayer, moe_layers, name_without_wrappers, unwrap
from intbmoe.methods.intbmoe import ComposedMoE
from intbmoe.precomposition import wide_tensors
from intbmoe.quantization import is_quantized, refuse_to_save
from intbmoe.registry import find_method
from intbmoe.replace.find import FFN, find_ffns
from intbmoe.replace.starts import make_layer
from intbmoe.settings import from_plain, to_plain

KEY = "intbmoe"
"""The key under which ``config.json`` also says what was replaced. Only this is there in earlier versions' folders, and
where a trainer gathers the parameters itself, as DeepSpeed does, without the state's further entries."""

HINT = "load_this_model_with.intbmoe.from_pretrained"
"""Ends the name of the entry that holds the records, for people who see it in another loader's error."""

Records = Mapping[str, Mapping[str, Any]]
"""Name of a replaced FFN → the record of the layer in its place."""
Options = Mapping[str, Any]


def record_of(method: str, ffn: FFN, layer: MoELayer, keeps_ffn: bool) -> dict[str, Any]:
    """The record that ``rebuild`` needs to replace ``ffn`` by the layer."""
    return {"method": method, "keeps_ffn": keeps_ffn, "marker": ffn.marker, "config": to_plain(layer.config)}


def remember(model: nn.Module, records: Records) -> None:
    """Store in ``model`` which layers replaced its FFNs, so that every state that holds the layers says so."""
    for name, record in records.items():
        place, _, own = name.rpartition(".")
        host = model.get_submodule(place)
        if not hasattr(host, "replaced_ffns"):
            host.replaced_ffns = {}
            host.register_state_dict_post_hook(_add_entries)
            host.register_load_state_dict_pre_hook(_drop_entries)
        host.replaced_ffns[own] = {**record, "marker": record["marker"].removeprefix(f"{place}.")}
    if _is_transformers(model):
        setattr(model.config, KEY, {**getattr(model.config, KEY, {}), **records})


def rebuild(model: nn.Module, records: Records) -> None:
    """Put layers with the recorded Configs into a model of the old class; their weights are loaded afterwards."""
    found = {ffn.name: ffn for ffn in find_ffns(model).ffns}
    for name, record in records.items():
        if name not in found:
            raise ValueError(f"{type(model).__name__} has no FFN {name!r}, which was replaced when the model was saved")
        ffn, method = found[name], record["method"]
        config = from_plain(find_method(method).layer.Config, record["config"], f"{KEY}.{name}")
        layer = make_layer(ComposedMoE if record["composed"] else find_method(method).layer, ffn, config)
        if record["keeps_ffn"]:
            layer.shared = ffn.module
        ffn.place(model, layer.train(model.training))


def save_pretrained(model: nn.Module, folder: str | PathLike[str], **model_args: Any) -> None:
    """Save a transformers or timm model with replaced FFNs; ``from_pretrained`` loads it.

    A transformers model can also save itself. A timm model does not know how it was made: ``model_args`` are the
    arguments that ``timm.create_model`` got besides the name, if any.
    """
    model = unwrap(model)
    if not any(hasattr(module, "replaced_ffns") for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no replaced FFNs: save it as its library does")
    if is_quantized(model):
        refuse_to_save()
    if _is_transformers(model):
        if model_args:
            raise TypeError(f"a transformers model knows its arguments: leave {', '.join(model_args)} out")
        model.save_pretrained(folder)
        return
    if not hasattr(model, "pretrained_cfg"):
        raise TypeError(
            f"{type(model).__name__} is neither a transformers nor a timm model: save model.state_dict(); before "
            f"loading it, build the model and call replace_ffn with the same arguments"
        )
    from timm.models import save_for_hf

    save_for_hf(model, str(folder), model_args=model_args or None, safe_serialization=True)


def from_pretrained(folder: str | PathLike[str], **options: Any) -> nn.Module:
    """Load the model with replaced FFNs that was saved in ``folder``, in evaluation mode.

    ``options`` go to ``from_pretrained`` of the model's class (transformers) or to ``timm.create_model``.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: expected the folder of a saved transformers or timm model")
    config = json.loads(path.read_text(encoding="utf-8"))
    records = _read_records(Path(folder), config)
    if not records:
        raise ValueError(f"{folder} does not mention replaced FFNs: load the model with its own library")
    import_torchvision(required=False)
    load = _load_timm if "architecture" in config else _load_transformers
    return load(Path(folder), config, records, options).eval()


def _load_transformers(folder: Path, config: Mapping[str, Any], records: Records, options: Options) -> nn.Module:
    import transformers

    name = config["architectures"][0]
    original = getattr(transformers, name, None)
    if original is None:
        raise ValueError(f"{folder}: transformers has no class {name!r}")

    def build(self: nn.Module, *arguments: Any, **named: Any) -> None:
        original.__init__(self, *arguments, **named)
        rebuild(self, records)
        wide = {f"{name}.{part}" for name, layer in moe_layers(self) for part in wide_tensors(layer)}
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *wide}

    # Same name and module, because transformers looks up both. The original class is restored after loading.
    markers = [re.escape(key) for key in (HINT, *(record["marker"] for record in records.values()))]
    ignored = [*(original._keys_to_ignore_on_load_unexpected or ()), *(f"{marker}$" for marker in markers)]
    body = {"__init__": build, "__module__": original.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    replaced = type(name, (original,), body)
    model, info = replaced.from_pretrained(folder, output_loading_info=True, **options)
    lost = {kind: sorted(keys) for kind, keys in info.items() if keys and kind.endswith("_keys")}
    if lost:
        raise RuntimeError(f"{folder} does not fit the model that its config.json describes: {lost}")
    model.__class__ = original
    remember(model, records)  # not earlier, because transformers asks the model which weights it needs
    return model


def _load_timm(folder: Path, config: Mapping[str, Any], records: Records, options: Options) -> nn.Module:
    import timm
    from safetensors.torch import load_file

    arguments = {"num_classes": config["num_classes"], **(config.get("model_args") or {}), **options}
    model = timm.create_model(config["architecture"], **arguments)
    state = load_file(folder / "model.safetensors", device=str(next(model.parameters()).device))
    saved = (state[name] for name, _ in model.named_parameters() if name in state)
    model.to(next(saved).dtype)  # for buffers that are not saved
    rebuild(model, records)
    remember(model, records)
    model.load_state_dict(state, assign=True)  # each tensor in its saved type: routers may be wider than the rest
    return model


def _read_records(folder: Path, config: Mapping[str, Any]) -> Records:
    """Read which layers replaced which FFNs from the saved weights, or else from ``config.json``."""
    from safetensors import safe_open

    files = _saved_keys(folder)
    records = {}
    for key in (key for key in files if HINT in key):
        with safe_open(files[key], framework="pt") as file:
            entry = file.get_tensor(key)
        if entry.dtype == torch.uint8:  # in earlier versions, the entry held nothing
            records |= json.loads(bytes(entry.tolist()))
    if records:
        return records
    return {name: {**record, "composed": _is_composed(name, files)} for name, record in config.get(KEY, {}).items()}


def _is_composed(name: str, keys: Iterable[str]) -> bool:
    """Whether the saved layer looks precomposed."""
    own = [key for key in keys if key.startswith(f"{name}.")]
    # transformers renames ViT's modules when it saves. Then all layers count: ``precompose`` composes them all.
    return any(key.endswith(".block_weights.0") for key in own or keys)


def _saved_keys(folder: Path) -> dict[str, Path]:
    """The names of the saved tensors, each with its file."""
    from safetensors import safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / name for key, name in weights.items()}
    if not single.is_file():
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _is_transformers(model: nn.Module) -> bool:
    theirs = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    return theirs and hasattr(model, "save_pretrained")  # a whole model, not a part of one


def _add_entries(host: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    records = {}
    for name, record in host.replaced_ffns.items():
        marker = prefix + record["marker"]
        state[marker] = torch.zeros(1)
        _make_findable(host, record["marker"])
        # These names stay as they are in memory; transformers renames some of the state's when it saves.
        whole, removed = name_without_wrappers(prefix + name), name_without_wrappers(marker)
        composed = any(isinstance(module, ComposedMoE) for module in host.get_submodule(name).modules())
        records[whole] = {**record, "marker": removed, "composed": composed}
    state[prefix + HINT] = torch.tensor(list(json.dumps(records, sort_keys=True).encode()), dtype=torch.uint8)
    _make_findable(host, HINT)


def _make_findable(host: nn.Module, name: str) -> None:
    """Give ``host`` attributes along an entry's name: torch.distributed.checkpoint looks for every name of a state."""
    at: Any = host
    for part in name.split("."):
        if not hasattr(at, part):
            setattr(at, part, SimpleNamespace())
        at = getattr(at, part)


def _drop_entries(host: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for key in (HINT, *(record["marker"] for record in host.replaced_ffns.values())):
        state.pop(prefix + key, None)

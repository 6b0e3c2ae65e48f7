"""transformers' Trainer gives the same as a training loop of our own."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils.data import Dataset, default_collate
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

import intbmoe
from small_huggingface import SIZES, hf, language_model, prompts
from thinned import thinned

STEPS, BATCH = 3, 4
QUIET = {"switch": {"jitter": 0.0}}


class Texts(Dataset):
    """Texts of two lengths, padded on the right; padding has no label."""

    def __init__(self):
        self.ids = prompts(2 * STEPS * BATCH, 9)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        length = 9 if index % 3 else 5
        mask = (torch.arange(9) < length).long()
        return {
            "input_ids": self.ids[index] * mask,
            "attention_mask": mask,
            "labels": self.ids[index].where(mask > 0, -100),
        }


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return None


def train(model, folder, callbacks=True, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        optim="adamw_torch",
        dataloader_drop_last=True,
        **options,
    )
    own = [hf.MixtureCallback()] if callbacks else []
    InOrder(model, arguments, train_dataset=Texts(), callbacks=own).train()


def micro_loss(model, batch, share, items):
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    own = ForCausalLMLoss(logits, batch["labels"], SIZES.vocabulary, num_items_in_batch=items)  # in float32, always
    return own + intbmoe.aux_loss(model) * share if torch.is_grad_enabled() else own  # MASS evaluates it again


def own_loop(model, size, parts):
    """The loss of a step: the mean over its labelled tokens, with auxiliary losses weighted by their number."""
    texts = Texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-8)
    model.train()
    intbmoe.plan_steps(model, STEPS)
    for step in range(STEPS):
        batches = [
            default_collate([texts[(step * parts + part) * size + row] for row in range(size)]) for part in range(parts)
        ]
        counts = [batch["labels"][:, 1:].ne(-100).sum() for batch in batches]
        shares = [count / sum(counts) for count in counts]
        for batch, share in zip(batches, shares, strict=True):
            again = partial(micro_loss, model, batch, share, sum(counts))
            again().backward()
        intbmoe.before_step(model, optimizer, again)
        optimizer.step()
        intbmoe.after_step(model, optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("method", "parts"),
    thinned(
        product(["intbmoe", "switch", "deepseek", "remoe", "mass", "dynmoe"], [1, 2]),
        lambda method, parts: parts == 2 or method == "intbmoe",
    ),
)
def test_the_trainer_and_a_loop_of_ones_own_give_the_same_weights(method, parts, tmp_path):
    model = language_model(method, torch.float64, **QUIET.get(method, {}))
    other, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    size = BATCH // parts
    train(model, tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=parts)
    own_loop(other, size, parts)
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-12, msg=name)
    assert any(not torch.equal(tensor, start[name]) for name, tensor in other.state_dict().items())
    assert intbmoe.load_statistics(other).keys() == intbmoe.load_statistics(model).keys()


def test_a_method_that_needs_steps_is_not_trained_without_them(tmp_path):
    with pytest.raises(RuntimeError, match=r"DeepSeek updates state between optimizer steps.*MixtureCallback"):
        train(language_model("deepseek"), tmp_path, callbacks=False, per_device_train_batch_size=2)
    train(language_model("switch"), tmp_path, callbacks=False, per_device_train_batch_size=2)


def test_the_callback_serves_any_model(tmp_path):
    """A plain Llama with our layers: they get the mask, and their losses are part of the model's loss."""
    config = LlamaConfig(
        vocab_size=29, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = intbmoe.create("deepseek", 24, 20, experts=4)
    train(model, tmp_path, per_device_train_batch_size=BATCH)
    loads = intbmoe.load_statistics(model)
    texts = Texts()
    valid = sum(int(texts[index]["attention_mask"].sum()) for index in range(STEPS * BATCH))
    assert [load.tokens for load in loads.values()] == [valid, valid]
    assert all(layer.mlp.bias.abs().max() > 0 for layer in model.model.layers)

"""A correct script of Hugging Face's Trainer: a language model, tokens to be ignored."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SIZE, LENGTH = 30, 12


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for tokens in torch.randint(0, SIZE, (count, LENGTH), generator=generator):
        labels = tokens.clone()
        labels[: int(tokens[0]) % LENGTH] = -100  # a prompt, of another length in each sample
        yield {"labels": labels, "input_ids": tokens}


def right(prediction):
    found = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"right": float(found.mean())}


config = GPT2Config(vocab_size=SIZE, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        "output",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=list(samples(60, 1)),
    eval_dataset=list(samples(24, 2)),
    compute_metrics=right,
)
trainer.train()
trainer.evaluate()
trainer.save_model("output")

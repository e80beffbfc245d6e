"""A small GPT over bytes, in a training loop of its own: N ranks compute what one computes.

mpirun -n 2 python examples/gpt.py --strategy ddp

The text is the reference manual that each Python has for `help()` (PSF licence): no network is
needed. Its paragraphs differ in length, so the ranks have different numbers of tokens, by which
`hvd.weight_loss` weighs their mean losses.
"""

import argparse
import hashlib
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from hvdtrain import adapter

VOCABULARY, PAD, END = 256, 0, 1  # tokens are bytes; the text has neither 0 nor 1
BLOCK, LAYERS, HEADS, DIM = 128, 2, 4, 96  # BLOCK: most tokens of a document
BATCH, ACCUMULATE = 8, 2  # documents per micro-batch, over all ranks; micro-batches per update
RATE, WARMUP, EVERY = 6e-3, 0.5, 200  # WARMUP: epochs; EVERY: updates between checkpoints
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, h, mask):
        n, t, _ = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        h = h + self.out(heads.transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm2(h))


class GPT(nn.Module):
    """Tokens, shape (n, t), to the logits of the next ones, shape (n, t, VOCABULARY)."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Embedding(BLOCK, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        t = x.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        mask = causal & (x != PAD)[:, None, None, :]
        h = self.tokens(x) + self.positions(torch.arange(t, device=x.device))
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h))


def documents():
    """Return the documents to train on and those to test on, as bytes; long ones are cut."""
    paragraphs = dict.fromkeys("\n\n".join(topics.values()).encode().split(b"\n\n"))
    size = BLOCK - 1  # a token marks the beginning
    pieces = [p[i : i + size] for p in paragraphs for i in range(0, len(p), size)]
    return [piece for i, piece in enumerate(pieces) if i % 10], pieces[::10]


def padded(batch):
    """Return inputs and targets, the next tokens, shape (n, longest) each."""
    marked = [torch.tensor([END, *document, END]) for document in batch]
    tokens = pad_sequence(marked, batch_first=True, padding_value=PAD)
    return tokens[:, :-1], tokens[:, 1:]


def token_loss(model, x, y, reduction="mean"):
    """Return the mean, or the sum, of the losses of all tokens that are no padding."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        logits = model(x).flatten(0, 1)
        return cross_entropy(logits, y.flatten(), ignore_index=PAD, reduction=reduction)


@torch.no_grad()
def perplexity(hvd, model, test):
    """Return exp of the mean loss over all tokens of ``test``; all ranks call it together."""
    model.eval()
    seen = total = 0
    for start in range(0, len(test), BATCH):
        mine = test[start : start + BATCH][hvd.world.rank :: hvd.world.size]
        x, y = padded(mine or test[:1])  # all ranks make each pass, as fsdp needs
        loss = token_loss(model, x.to(DEVICE), y.to(DEVICE), reduction="sum").item()
        if mine:
            seen, total = seen + (y != PAD).sum().item(), total + loss
    model.train()
    means, _ = hvd.average_metrics(seen, loss=total)  # step 8
    return math.exp(means["loss"])


@torch.no_grad()
def sample(model):
    """Return a document that the model writes; all ranks call it, as fsdp needs, with one seed."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([[END]])
    for _ in range(BLOCK - 1):
        p = model(tokens.to(DEVICE))[:, -1].double().softmax(1).cpu()
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
    return bytes(tokens[0, 1:].tolist()).split(bytes([END]))[0].decode(errors="replace")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", help="horovod (default), ddp, zero, fsdp or mpi")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint-dir", default="gpt-checkpoints")
    args = parser.parse_args()

    hvd = adapter("pytorch", args.strategy)
    world = hvd.initialize()  # step 1
    hvd.pin_device()  # step 2

    torch.manual_seed(0)
    train, test = documents()
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    digest = hashlib.sha256(b"".join(train)).digest()  # another Python has another manual
    shards = hvd.shard_data(len(train), global_batch=BATCH, digest=digest)  # step 3
    loader = shards.loader(train, collate_fn=padded)
    schedule = {"epochs": args.epochs, "warmup_epochs": WARMUP, "schedule": "cosine"}
    rate = hvd.scale_learning_rate(RATE, scaling="none", **schedule)  # step 4
    model, optimizer = hvd.distribute_optimizer(model, optimizer)  # step 5
    state = {"step": 0, "epoch": 0, "consumed": 0}
    state = hvd.resume(args.checkpoint_dir, model, optimizer) or state  # step 6

    seen = total = 0  # tokens, and the sum of their losses, since the last checkpoint
    for epoch in range(state["epoch"], args.epochs):
        for number, (part, (x, y)) in enumerate(loader.batches(epoch, state["consumed"]), 1):
            x, y = x.to(DEVICE), y.to(DEVICE)
            loss, tokens = token_loss(model, x, y), (y != PAD).sum()
            hvd.weight_loss(tokens)  # the loss is a mean over so many
            loss.backward()
            if part.count:  # not those of a stand-in
                seen, total = seen + tokens, total + loss.detach() * tokens
            if number % ACCUMULATE and part.end.epoch == epoch:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate(epoch + part.start.consumed / len(train))
            optimizer.step()
            optimizer.zero_grad()
            state = {"step": state["step"] + 1, **vars(part.end)}  # epoch, consumed
            if state["step"] % EVERY and part.end.epoch < args.epochs:
                continue
            metrics, _ = hvd.average_metrics(float(seen), loss=float(total))
            metrics["perplexity"] = perplexity(hvd, model, test)
            seen = total = 0
            if world.is_writer:
                print(f"update {state['step']}:", {k: round(v, 4) for k, v in metrics.items()})
            state["metrics"] = metrics
            hvd.save_checkpoint(args.checkpoint_dir, model, optimizer, state=state)  # step 7

    text = sample(model)
    if world.is_writer:
        print(text)


if __name__ == "__main__":
    main()

"""MNIST with PyTorch in one process, where the homework starts: metrics_1.csv and model.pt.

python pytorch_mnist.py --data /path/to/mnist --epochs 4
"""

import argparse
import csv
import gzip
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

# ------------------------------------------------------------------------------------- options
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
option = parser.add_argument
option("--data", type=Path, help="folder of MNIST's IDX files; without it scikit-learn's digits")
option("--epochs", type=int, default=16)
option("--batch-size", "--batch_size", type=int, default=256, help="images per step")
option("--lr", type=float, default=0.01, help="learning rate")
option("--dtype", choices=("float32", "float64"), default="float32")
option("--no-dropout", "--no_dropout", action="store_true", help="for exact comparisons")
option("--seed", type=int, default=0)
option("--out", type=Path, default=Path(), help="folder for the metrics and the model")
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_default_dtype(getattr(torch, args.dtype))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---------------------------------------------------------------------------------------- data
def read_idx(name: str) -> np.ndarray:
    """An IDX file: two zero bytes, the type, the number of dimensions, each of them, the values."""
    paths = [args.data / sub / (name + end) for sub in ("", "MNIST/raw") for end in ("", ".gz")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        parser.error(f"--data {args.data}: {name}[.gz] is neither there nor under MNIST/raw")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


if args.data:
    train_x, test_x = [read_idx(f"{part}-images-idx3-ubyte") for part in ("train", "t10k")]
    train_y, test_y = [read_idx(f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")]
else:  # 1,797 digits of 8x8 with values up to 16: make them 24x24 and add a margin of 2
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.kron(digits.images * 255 / 16, np.ones((1, 3, 3))).astype(np.uint8)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    (train_x, test_x), (train_y, test_y) = np.split(images, [1500]), np.split(digits.target, [1500])

# Small enough to stay in memory as bytes: images of shape (n, 1, 28, 28) and labels.
train_x, test_x = [torch.tensor(x[:, None], device=device) for x in (train_x, test_x)]
train_y, test_y = [torch.tensor(y, dtype=torch.int64, device=device) for y in (train_y, test_y)]
steps = math.ceil(len(train_x) / args.batch_size)

# --------------------------------------------------------------------------------------- model
model = nn.Sequential(
    nn.Conv2d(1, 32, 3),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Dropout(0 if args.no_dropout else 0.25),
    nn.Flatten(),
    nn.Linear(9216, 128),
    nn.ReLU(),
    nn.Dropout(0 if args.no_dropout else 0.5),
    nn.Linear(128, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)


def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses; and [that sum, right answers, images], to be added up."""
    logits = model(x.to(torch.get_default_dtype()) / 255)
    loss = cross_entropy(logits, y, reduction="sum")
    right = (logits.argmax(1) == y).sum()
    return loss, torch.tensor([loss.item(), right.item(), len(y)], dtype=torch.float64)


def save(rows: list[list[float]]) -> None:
    """Print the last row, write all of them, and save the model: whole, or not at all."""
    print("epoch {}: loss {:.4f} accuracy {:.4f}, validation {:.4f} {:.4f}, {} s".format(*rows[-1]))
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "metrics_1.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS.split(), *rows])
    torch.save(model.state_dict(), args.out / "model.tmp")
    (args.out / "model.tmp").replace(args.out / "model.pt")


# ------------------------------------------------------------------------------------ training
COLUMNS = "epoch train_loss train_accuracy validation_loss validation_accuracy seconds"
rows = []
for epoch in range(1, args.epochs + 1):
    started = time.perf_counter()
    order = np.random.default_rng([args.seed, epoch]).permutation(len(train_x))
    trained = torch.zeros(3, dtype=torch.float64)
    model.train()
    for batch in np.array_split(order, steps):
        picked = torch.tensor(batch, device=device)
        loss, counts = forward(train_x[picked], train_y[picked])
        optimizer.zero_grad()
        (loss / len(batch)).backward()
        optimizer.step()
        trained += counts
    seconds = time.perf_counter() - started  # of the training; the validation is not timed

    validated = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for x, y in zip(test_x.split(1000), test_y.split(1000), strict=True):
            validated += forward(x, y)[1]

    means = torch.cat([trained[:2] / trained[2], validated[:2] / validated[2]])
    rows.append([epoch, *means.numpy().round(12).tolist(), round(seconds, 3)])
    save(rows)

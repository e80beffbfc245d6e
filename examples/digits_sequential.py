"""A training script for one process: handwritten digits, a small network, plain PyTorch."""

import torch
from sklearn.datasets import load_digits

digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float64)
y = torch.tensor(digits.target)
train_x, train_y, test_x, test_y = x[:1500], y[:1500], x[1500:], y[1500:]

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
BATCH, EPOCHS = 100, 10

for _ in range(EPOCHS):
    order = torch.randperm(len(train_x))
    for start in range(0, len(train_x), BATCH):
        indices = order[start : start + BATCH]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(train_x[indices]), train_y[indices])
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "digits.pt")

correct = (model(test_x).argmax(1) == test_y).sum().item()
print(f"accuracy {correct / len(test_x):.4f} of {len(test_x)}")

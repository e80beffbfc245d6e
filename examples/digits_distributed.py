"""The same script on any number of ranks: eight named calls apart from digits_sequential.py.

mpirun -n 2 python examples/digits_distributed.py
"""

import torch
from sklearn.datasets import load_digits

from hvdtrain import adapter

hvd = adapter("pytorch")
world = hvd.initialize()  # step 1
hvd.pin_device()  # step 2

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

shards = hvd.shard_data(len(train_x), global_batch=BATCH)  # step 3
rate = hvd.scale_learning_rate(0.1, scaling="none", epochs=EPOCHS)  # step 4
model, optimizer = hvd.distribute_optimizer(model, optimizer)  # step 5
hvd.broadcast_state(model, optimizer)  # step 6

for epoch in range(EPOCHS):
    for part in shards.epoch(epoch):
        for group in optimizer.param_groups:
            group["lr"] = rate(epoch + part.start.consumed / len(train_x))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(train_x[part.indices]), train_y[part.indices]
        )
        loss.backward()
        optimizer.step()
    hvd.save_checkpoint("checkpoints", model, optimizer, state={"step": epoch + 1})  # step 7

mine = slice(world.rank, None, world.size)
correct = (model(test_x[mine]).argmax(1) == test_y[mine]).sum().item()
metrics, count = hvd.average_metrics(len(test_x[mine]), accuracy=correct)  # step 8
if world.is_writer:
    print(f"accuracy {metrics['accuracy']:.4f} of {count}")

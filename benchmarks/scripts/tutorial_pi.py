"""Pi as a first MPI program does it: unseeded scalar random numbers in a loop."""

import random
import time

samples, hits = 3_000_000, 0
start = time.perf_counter()
for _ in range(samples):
    x, y = random.uniform(-1, 1), random.uniform(-1, 1)
    if x**2 + y**2 < 1:
        hits += 1
print("samples_per_second", samples / (time.perf_counter() - start))

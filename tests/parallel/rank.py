"""Started by mpirun as one rank: lets a resident process (resident.py) be that rank."""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
order = {
    "words": sys.argv[2:],
    "folder": os.getcwd(),  # noqa: PTH109 (no library but what this needs)
    "cores": sorted(os.sched_getaffinity(0)),
    "environment": dict(os.environ),
}
data = json.dumps(order).encode()
socket.send_fds(line, [len(data).to_bytes(4, "big")], [0, 1, 2])
line.sendall(data)
for number in FORWARDED:
    signal.signal(number, lambda number, _: line.sendall(bytes([number])))
for stream in (0, 1, 2):  # so that whoever reads them sees when the rank itself closes them
    os.close(stream)
code = int(line.makefile().readline() or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)

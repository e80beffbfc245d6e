"""Prove that each of the eight steps took effect, on ranks of ours or in a script of the user's."""

# When Horovod gives up waiting for a rank that does not take part; of no use before ``init``.
STALLED = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}
